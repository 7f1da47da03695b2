"""The start-up table of the sequence axis: what is split along which dim, and what attention moves."""

from __future__ import annotations

from typing import Any

from lightning_par.sequence.plan import AttentionUse, SequencePlan
from lightning_par.sequence.scheme import elements
from lightning_par.strategies.startup_table import bytes_text, show_table


def show_plan(plan: SequencePlan, asked: Any, layout: object, seconds: float) -> None:
    """Print ``plan``, which took ``seconds`` to make; ``asked`` is the user's ``attention``."""
    title = f"Sequence parallel over {plan.ranks} ranks ({layout}), planned in {seconds:.1f} s"
    show_table(title, ("what", "shape", "a rank holds"), input_rows(plan), footer(plan, asked), wraps=2)


def input_rows(plan: SequencePlan) -> list[tuple[str, str, str]]:
    """A row for each tensor of the batch."""
    rows = []
    for name, shape, dim in zip(plan.names, plan.shapes, plan.dims, strict=True):
        held = "all of it: no sequence was found in it"
        if dim is not None:
            tokens = -(-shape[dim] // plan.ranks)
            held = f"up to {tokens} of {shape[dim]} along dim {dim}"
            if shape[dim] < 2 * plan.ranks:
                held = f"all of it: {shape[dim]} tokens are too few for {plan.ranks} ranks"
        rows.append((f"batch{name}" if name[:1] in ("", "[") else name, " x ".join(map(str, shape)) or "1", held))
    return rows


def footer(plan: SequencePlan, asked: Any) -> list[str]:
    """The lines below the table: how attention runs, in which order tokens lie, which functions gather."""
    lines = [_attention_line(use, asked, plan.ranks) for use in plan.attention]
    if plan.zigzag:
        lines.append("Tokens lie in zigzag order, so that all ranks have equally many pairs under a causal mask.")
    if plan.gathers:
        listed = ", ".join(f"{name} at {place} ({count})" for name, place, count in plan.gathers)
        lines.append(f"Functions that gather: {listed}.")
    if not any(dim is not None for dim in plan.dims):
        lines.append(
            "Nothing is split: all ranks do the same work. Name the dim by sequence_dim=, or use another axis."
        )
    if plan.stopped:
        lines.append(f"The trial run of the step ended early ({plan.stopped}): what comes after it is not listed here.")
    return lines


def _attention_line(use: AttentionUse, asked: Any, ranks: int) -> str:
    kind = "causal" if use.causal else "masked" if use.masked else "full"
    heads = f"{use.heads} heads" if use.heads == use.kv_heads else f"{use.heads} heads, {use.kv_heads} of keys"
    lengths = f"{use.queries} x {use.keys}"
    what = f"Attention, {use.calls} calls, {kind}, {lengths}, {heads}"
    scheme = use.scheme(asked, ranks)
    sent = bytes_text(elements(scheme, use.shapes, use.itemsize) * use.itemsize * use.calls)
    return f"{what}: {scheme}, {sent} sent by a rank a step."
