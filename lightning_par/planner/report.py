"""A plan as a table, as JSON, and as what to write."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from itertools import product
from typing import Any

from lightning_par.planner.advice import Advice
from lightning_par.planner.layouts.candidates import RuledOut
from lightning_par.planner.prediction import Prediction
from lightning_par.planner.replay.untold import UntoldError
from lightning_par.strategies.startup_table import bytes_text, format_rows

SHOWN = 12
_HEADER = ("", "layout", "fits", "peak", "weights + grads + states", "activations", "step", "tokens/s", "MFU", "bubble",
           "waits for messages")  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What `lightning_par.plan` found.

    Attributes:
        layouts: priced; the fastest that fit first, then those that nearly fit.
        ruled_out: layouts that can't be, and why.
        title: what was planned.
        devices: over all hosts, and on each.
        advice: where nothing fits.
        notes: what is assumed.
    """

    layouts: tuple[Prediction, ...]
    ruled_out: tuple[RuledOut, ...]
    title: str
    devices: int
    on_host: int
    advice: Advice | None = None
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> int | None:
        """The number of the layout to take; None where none fits."""
        fitting = [i for i, one in enumerate(self.layouts) if one.fits]
        return min(fitting, key=lambda i: self.layouts[i].seconds / self.layouts[i].tokens, default=None)

    def as_dict(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        found = dict[int, dict[str, Any]]()
        for number, one in enumerate(self.layouts):
            with contextlib.nullcontext() if number == self.chosen else contextlib.suppress(UntoldError):
                found[number] = layout_dict(one)
        chosen = None if self.chosen is None else [*found].index(self.chosen)
        return {"layouts": [*found.values()], "chosen": chosen}

    def json(self) -> str:
        return json.dumps(self.as_dict())

    def show(self) -> None:
        """Print the table, and what to write, in lines as wide as they are: they are there to be copied."""
        print(self, flush=True)

    def __str__(self) -> str:
        rows = [self._row(i, one) for i, one in enumerate(self.layouts[:SHOWN])]
        counts_tokens = any(one.tokens > one.candidate.samples for one in self.layouts)
        header = [name if counts_tokens or name != "tokens/s" else "samples/s" for name in _HEADER]
        return "\n".join([self.title, *format_rows([tuple(header), *rows]), *self.footer()])

    def footer(self) -> list[str]:
        lines = [f"ruled out: {one.layout}: {one.reason}" for one in self.ruled_out]
        lines += list(self.notes)
        if self.advice is not None:
            lines.append(str(self.advice))
        if self.chosen is not None:
            lines += _parts(self.layouts[self.chosen])
            lines += ["", trainer_line(self.layouts[self.chosen], self.devices, self.on_host), ""]
            lines += yaml_lines(self.layouts[self.chosen], self.devices, self.on_host)
        return lines

    def _row(self, number: int, one: Prediction) -> tuple[str, ...]:
        worst = max(one.stages, key=lambda rank: rank.peak)
        held = worst.parameters + worst.gradients + worst.optimizer
        waits = sum(one.parts[name] for name in ("tensor", "sequence", "gather", "replicas")) / one.seconds
        return (
            "*" if number == self.chosen else "",
            named(one),
            "yes" if one.fits else f"no, {bytes_text(one.peak - one.memory)} too much",
            bytes_text(one.peak),
            bytes_text(held),
            bytes_text(worst.activations),
            f"{one.seconds:.3g} s",
            f"{one.tokens_per_s:,.0f}",
            f"{one.mfu:.1%}",
            f"{one.bubble:.1%}",
            f"{waits:.1%}",
        )


def layout_dict(one: Prediction) -> dict[str, Any]:
    """One layout, as ``--json`` prints it."""
    layout = one.candidate.layout
    ranks = []
    for data, pipeline, sequence, tensor in product(*map(range, layout.sizes)):
        where = pipeline, tensor, data * layout.sequence + sequence
        held, memory = one.each.held(*where), one.beside(tensor, sequence)[pipeline]
        ranks.append(
            {
                "parameters": round(held.parameters), "gradients": round(held.gradients),
                "optimizer": round(held.optimizer), "activations": round(memory.activations),
                "buffers": round(memory.buffers), "peak": round(memory.peak),
                "sent": {axis: round(size) for axis, size in one.each.sent(*where).items()},
            }
        )  # fmt: skip
    return {
        "arguments": one.candidate.arguments(),
        "fits": one.fits,
        "step_time_s": one.seconds,
        "tokens_per_s": one.tokens_per_s,
        "mfu": one.mfu,
        "ranks": ranks,
        "sent": {axis: round(size) for axis, size in one.sent.items()},
        "sent_between_hosts": {axis: round(size) for axis, size in one.each.most_sent_outside().items()},
        "bubble": one.bubble,
        "parts": one.parts,
        "micro_batch_size": one.candidate.micro,
        "accumulate_grad_batches": one.candidate.accumulated,
        "global_batch": one.candidate.samples,
    }


def trainer_line(one: Prediction, devices: int, on_host: int) -> str:
    """The Trainer for a layout."""
    arguments = ", ".join(f"{key}={value!r}" for key, value in _written(one).items())
    nodes = f", num_nodes={devices // on_host}" if devices > on_host else ""
    more = f", accumulate_grad_batches={one.candidate.accumulated}" if one.candidate.accumulated > 1 else ""
    each = one.candidate.micro * one.candidate.microbatches
    batch = f"  # batch_size={each:g} in the DataLoader"
    return f"Trainer(strategy=HybridParallelStrategy({arguments}), devices={min(devices, on_host)}{nodes}{more}){batch}"


def yaml_lines(one: Prediction, devices: int, on_host: int) -> list[str]:
    """The same for LightningCLI."""
    lines = ["trainer:", "  strategy:", "    class_path: lightning_par.HybridParallelStrategy"]
    written = [f"      {key}: {json.dumps(value)}" for key, value in _written(one).items()]
    lines += ["    init_args:", *written] if written else []
    lines.append(f"  devices: {min(devices, on_host)}")
    if devices > on_host:
        lines.append(f"  num_nodes: {devices // on_host}")
    if one.candidate.accumulated > 1:
        lines.append(f"  accumulate_grad_batches: {one.candidate.accumulated}")
    return lines


def _written(one: Prediction) -> dict[str, Any]:
    return {k: v for k, v in one.candidate.arguments().items() if not (k.endswith("_size") and v == 1)}


def named(one: Prediction) -> str:
    """A layout in words."""
    candidate = one.candidate
    named = [str(candidate.layout)]
    named += ["fsdp"] * candidate.stored + ["shard_residual"] * candidate.shard_residual
    if candidate.layout.pipeline > 1:
        named.append(f"{candidate.schedule}, {candidate.microbatches} microbatches of {candidate.micro:g}")
    else:
        named.append(f"{candidate.accumulated} x {candidate.micro:g} samples")
    return ", ".join(named)


def _parts(one: Prediction) -> list[str]:
    shares = [f"{name} {seconds:.3g} s" for name, seconds in one.parts.items() if seconds > 0.001 * one.seconds]
    outside = one.each.most_sent_outside()
    sent = [
        f"{axis} {bytes_text(size)}" + f", of which {bytes_text(outside[axis])} to other hosts" * (outside[axis] > 0)
        for axis, size in one.sent.items()
        if size
    ]
    return [f"a step of the marked one: {', '.join(shares)}", f"a rank sends: {'; '.join(sent) or 'nothing'}"]
