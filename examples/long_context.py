"""How long a sequence fits: a GPT learns from ever longer texts, on one device and with the sequence over several.

    python examples/long_context.py                      # two processes
    python examples/long_context.py --lengths 4096 65536 --devices 4

Each length is trained for two steps in fresh processes, once on one device and once with
``strategy="sequence_parallel"``; model and data are those of ``gpt.py``. Shown is the peak of what training adds to a
process that has the weights: activations, gradients and AdamW's state. On CPU it is anonymous resident memory (Linux),
on CUDA what torch allocated.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, StandardLibrary
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from lightning_par.strategies.startup_table import bytes_text, show_table

STEPS = 2  # gradients and the optimizer's state are there in the second
MARK = "measured:"


@dataclass(frozen=True)
class Measured:
    """What training on sequences of ``length`` tokens took: bytes on the rank that has most, and the last loss."""

    length: int
    devices: int
    nbytes: int
    loss: float


class PeakMemory(Callback):
    """Prints the most memory that this rank took while it trained, and the loss."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.cuda = pl_module.device.type == "cuda"
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
            return
        self.before = self.peak = _anonymous()
        self.stop = threading.Event()
        self.watch = threading.Thread(target=self._watch, daemon=True)
        self.watch.start()

    def _watch(self) -> None:
        while not self.stop.is_set():
            self.peak = max(self.peak, _anonymous())
            time.sleep(0.001)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.cuda:
            self.peak = torch.cuda.max_memory_allocated()
        else:
            self.stop.set()
            self.watch.join()
        loss = trainer.callback_metrics["train_bpb"].item()
        print(f"\n{MARK} {self.peak - self.before} {loss}", flush=True)


def _anonymous() -> int:
    """Bytes of this process that are backed by no file."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def train(length: int, devices: int, accelerator: str) -> None:
    """What a user would write, and a callback that looks on."""
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    seed_everything(0, verbose=False)
    trainer = Trainer(
        strategy="sequence_parallel" if devices > 1 else "auto",
        devices=devices,
        accelerator=accelerator,
        max_steps=STEPS,
        limit_val_batches=0,
        callbacks=[PeakMemory()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = GPT(width=128, heads=4, depth=3, context=length)
    trainer.fit(model, StandardLibrary(context=length, batch_size=1, max_bytes=2_000_000))


def measure(length: int, devices: int, accelerator: str) -> Measured:
    """`train` in processes of its own.

    Raises:
        RuntimeError: it failed, as where memory did not suffice.
    """
    command = [
        sys.executable,
        __file__,
        "--train",
        str(length),
        "--devices",
        str(devices),
        "--accelerator",
        accelerator,
    ]
    # Every tensor of some size is a mapping of its own, which goes back to the system when it is freed.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or len(lines) != devices:
        raise RuntimeError(f"{length} tokens on {devices} devices failed:\n{done.stdout}{done.stderr}")
    return Measured(length, devices, max(int(nbytes) for nbytes, _ in lines), float(lines[0][1]))


def show(pairs: Sequence[tuple[Measured, Measured]]) -> None:
    """The table, and bars."""
    devices = pairs[0][1].devices
    header = ("tokens", "one device", f"a rank of {devices}", "share", "loss on one device", f"on {devices}")
    rows = [
        (f"{one.length:,}", bytes_text(one.nbytes), bytes_text(part.nbytes), f"{part.nbytes / one.nbytes:.2f}",
         f"{one.loss:.6f}", f"{part.loss:.6f}")
        for one, part in pairs
    ]  # fmt: skip
    show_table("Peak memory of training", header, rows, [f"Loss: bits per byte of the batch of step {STEPS}."], wraps=0)
    most = max(each.nbytes for pair in pairs for each in pair)
    print()
    for pair in pairs:
        for each, sign in zip(pair, "█▒"):
            name = "one device" if each.devices == 1 else f"a rank of {each.devices}"
            bar = sign * max(1, round(50 * each.nbytes / most))
            print(f"{each.length:>8,} tokens, {name:<13} {bar} {bytes_text(each.nbytes)}", flush=True)


def drawn(pairs: Sequence[tuple[Measured, Measured]]) -> str:
    """The bars as SVG text."""
    height, most = 40 + 54 * len(pairs), max(each.nbytes for pair in pairs for each in pair)

    def lines() -> Iterator[str]:
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" width="720" height="{height}" '
            'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12" '
            'fill="#808891">'  # read on white and on black alike
        )
        yield '<text x="110" y="20">peak memory of training, by the length of the sequence</text>'
        for number, pair in enumerate(pairs):
            top = 36 + 54 * number
            yield f'<text x="100" y="{top + 27}" text-anchor="end">{pair[0].length:,} tokens</text>'
            for row, (each, colour) in enumerate(zip(pair, ("#c25b4e", "#3f78c0"))):
                y, width = top + 22 * row, 400 * each.nbytes / most
                name = "one device" if each.devices == 1 else f"a rank of {each.devices}"
                yield f'<rect x="110" y="{y}" width="{width:.1f}" height="18" rx="2" fill="{colour}"/>'
                yield f'<text x="{116 + width:.1f}" y="{y + 13}">{bytes_text(each.nbytes)}, {name}</text>'
        yield "</svg>"

    return "\n".join(lines()) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--plot", type=Path, default=Path("long_context.svg"))
    parser.add_argument("--train", type=int, metavar="LENGTH", help="no table: train on this one length, and say so")
    options: Any = parser.parse_args()
    if options.train is not None:
        train(options.train, options.devices, options.accelerator)
        return
    pairs = []
    for length in options.lengths:
        one, part = (measure(length, devices, options.accelerator) for devices in (1, options.devices))
        print(
            f"{length:,} tokens: {bytes_text(one.nbytes)} on one device, {bytes_text(part.nbytes)} a rank", flush=True
        )
        pairs.append((one, part))
    show(pairs)
    options.plot.write_text(drawn(pairs), encoding="utf-8")
    print(f"\nThe same as a picture: {options.plot}")


if __name__ == "__main__":
    main()
