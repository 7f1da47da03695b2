"""Each strategy against its loop by hand and stock peers: one table of ratios, written to ``docs/benchmarks.md``.

``make benchmarks`` runs it. Every row (`tests.benchmarks.rows`) has processes of its own, on GPUs where there is one
for each rank, else on CPU with one thread each. It takes minutes on two cores, which should be idle::

    python -m tests.benchmarks.table                                       # all rows, into the page
    python -m tests.benchmarks.table --rows tensor data --sizes small --page -   # some, printed

Exits with 1, and leaves the page as it is, where a row fails: where ours or the loop by hand raises, hangs, or the two
train to other weights. What a peer raises is in the table, and so is a peer that trains to other weights.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch

from tests.benchmarks.measured import TOLERANCE, Against, Measured
from tests.benchmarks.rounds import Ratio
from tests.benchmarks.rows import LOOP, ROWS, SIZES, measure
from tests.helpers.pool import Pool, RanksFailedError

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/benchmarks.md"
BEGIN, END = "<!-- written by python -m tests.benchmarks.table: begin -->", "<!-- end -->"
ROUNDS = {"tiny": 3, "small": 60, "large": 15}
LIMIT = 600.0  # seconds for a row, until it is taken to hang


class RowFailedError(RuntimeError):
    """A row did not come to figures; says which and why."""


# --------------------------------------------------------------------------------------------------------------- where


@dataclass(frozen=True)
class Machine:
    """What ran the table, in words.

    Args:
        device: the CPU's or the GPUs' model, and how many.
        accelerator: "cpu" or "gpu".
        versions: of Python, torch and lightning.
        date: when, in UTC.
    """

    device: str
    accelerator: str
    versions: str
    date: str

    @classmethod
    def here(cls, ranks: int) -> Machine:
        """With GPUs where there are as many as ranks."""
        gpus = torch.cuda.device_count()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        device = f"{cpu_model()}, {cores} cores"
        if gpus >= ranks:
            device = f"{gpus} x {torch.cuda.get_device_name()}, {device}"
        versions = f"torch {torch.__version__}, lightning {version('lightning')}, Python {platform.python_version()}"
        date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
        return cls(device, "gpu" if gpus >= ranks else "cpu", versions, date)


def cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class Others:
    """What other processes and other guests of the hypervisor take of the processors, from when it is made on.

    Processes of ours count once they have ended.
    """

    def __init__(self) -> None:
        self.began = self._now()

    def shares(self) -> tuple[float, float] | None:
        """Of all processor time since; None where the kernel does not say."""
        if not self.began or not (now := self._now()):
            return None
        busy, stolen, every, own = (b - a for a, b in zip(self.began, now))
        return max(busy - own, 0.0) / every, stolen / every

    @staticmethod
    def _now() -> tuple[float, float, float, float] | None:
        try:
            ticks = [int(x) for x in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        except (OSError, ValueError):
            return None
        user, nice, system, idle, waiting, irq, soft, stolen = (x / os.sysconf("SC_CLK_TCK") for x in ticks)
        busy = user + nice + system + irq + soft
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return busy, stolen, busy + idle + waiting + stolen, sum(each.ru_utime + each.ru_stime for each in used)


# ---------------------------------------------------------------------------------------------------------------- rows


def run_row(pool: Pool, row: str, size: str, rounds: int, ranks: int, dtype: str, accelerator: str) -> Measured:
    """In processes of its own.

    Raises:
        RowFailedError: it did not end well, or in time, or its weights are not those of the loop by hand.
    """
    try:
        measured: Measured = pool.run(ranks, measure, row, size, rounds, dtype, accelerator, timeout=LIMIT)[0]
    except RanksFailedError as error:
        raise RowFailedError(f"{row}, {size}:\n{error}") from error
    finally:
        pool.restart()
    if wrong := measured.wrong(TOLERANCE[dtype]):
        raise RowFailedError(wrong)
    return measured


# --------------------------------------------------------------------------------------------------------------- table

HEAD = (
    "strategy", "model", "ranks", "ms a step", "to the loop by hand: time", "CPU time", "memory", "stock peer",
    "to it: time", "CPU time", "memory",
)  # fmt: skip


def table(rows: Sequence[Measured], ranks: int, tolerance: float) -> str:
    """In Markdown; a line for each peer, or one where there is none."""
    lines = [HEAD, ("---",) * len(HEAD)]
    for row in rows:
        loop, *peers = row.sides
        assert loop.name == LOOP and loop.time is not None
        begin = (row.row, row.model, str(ROWS[row.row].ranks or ranks), _milliseconds(loop.time.ours))
        by_hand: Sequence[str] = _figures(loop, tolerance)
        for peer in peers or [Against("none", error="")]:
            if not peers:
                lines.append((*begin, *by_hand, ROWS[row.row].none, "", "", ""))
            else:
                lines.append((*begin, *by_hand, peer.name, *_figures(peer, tolerance)))
            by_hand = ("as above", "", "")
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _figures(side: Against, tolerance: float) -> tuple[str, str, str]:
    if side.error:
        words = " ".join(side.error.split()).replace("|", "\\|")
        return f'did not run: "{words[:240]}{"…" * (len(words) > 240)}"', "", ""
    assert side.time is not None and side.processor is not None and side.apart is not None
    if not side.apart <= tolerance:
        return f"trains to other weights: {side.apart:.1e} apart", "", ""
    return _ratio(side.time), _ratio(side.processor), f"{side.memory:.2f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}" if seconds > 0.1 else f"{seconds * 1e3:.3g}"


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.median:.2f} ({ratio.least:.2f} to {ratio.most:.2f})"


def written(page: str, text: str) -> str:
    """``page`` with ``text`` between its two marks, and the rest as it was.

    Raises:
        ValueError: the page has not both marks, in order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def in_words(machine: Machine, rows: Sequence[Measured], dtype: str, shares: tuple[float, float] | None) -> str:
    backends = " and ".join(sorted({row.backend for row in rows}))
    threads = "CPU processes of one thread each" if machine.accelerator == "cpu" else "one GPU a rank"
    busy = "" if shares is None else (
        f" Meanwhile other processes took {shares[0]:.0%} of the processors, and the hypervisor {shares[1]:.0%}."
    )  # fmt: skip
    worst = max(row.apart for row in rows)
    return (
        f"{machine.date}, {machine.device}; {threads}, {backends}, {dtype}; {machine.versions}.{busy} "
        f"After the last step no weight was further than {worst:.0e} from that of the loop by hand."
    )


def _measured(pool: Pool, options: argparse.Namespace, accelerator: str) -> Iterator[Measured | RowFailedError]:
    for size in options.sizes:
        for row in options.rows:
            rounds, ranks = options.rounds or ROUNDS[size], ROWS[row].ranks or options.ranks
            began = time.perf_counter()
            try:
                measured = run_row(pool, row, size, rounds, ranks, options.dtype, accelerator)
            except RowFailedError as error:
                print(f"FAILED {error}", flush=True)
                yield error
                continue
            seconds = time.perf_counter() - began
            print(f"{row}, {size}: {seconds:.0f} s\n{table([measured], ranks, TOLERANCE[options.dtype])}", flush=True)
            yield measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "large"])
    parser.add_argument("--ranks", type=int, default=2, help="at most 4: heads and layers must divide")
    parser.add_argument("--rounds", type=int, help=f"that count; as a rule {ROUNDS}")
    parser.add_argument("--dtype", choices=TOLERANCE, default="float64", help="weights must agree to 1e-9 in float64")
    parser.add_argument("--page", default=str(PAGE), help="into which the table is written; - prints it only")
    options = parser.parse_args()
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # the other way to ask for a GPU spoils what is forked later
    machine, others, pool = Machine.here(options.ranks), Others(), Pool()
    try:
        rows = list(_measured(pool, options, machine.accelerator))
    finally:
        pool.close()
    done = [row for row in rows if isinstance(row, Measured)]
    if len(done) < len(rows):
        sys.exit(f"{len(rows) - len(done)} of {len(rows)} rows failed: no page was written")
    text = in_words(machine, done, options.dtype, others.shares())
    text = f"{text}\n\n{table(done, options.ranks, TOLERANCE[options.dtype])}"
    print(f"\n{text}")
    if options.page != "-":
        page = Path(options.page)
        page.write_text(written(page.read_text(), text))


if __name__ == "__main__":
    main()
