"""One device, then each layout, in processes of their own; and what comes of comparing them."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from dataclasses import replace
from functools import partial

from lightning_par.verdict.compare import Finding, compare
from lightning_par.verdict.layouts import AskedLayout
from lightning_par.verdict.processes import RankFailedError, run_ranks
from lightning_par.verdict.report import LayoutVerdict, Verdict
from lightning_par.verdict.result import Result
from lightning_par.verdict.train import Job, train


def judge(job: Job, layouts: tuple[AskedLayout, ...], timeout: float) -> Verdict:
    """The verdict on ``job`` under ``layouts``.

    Args:
        job: what to train.
        layouts: under which it is compared with one device.
        timeout: seconds for each run.

    Raises:
        RuntimeError: the module does not train on one device.
    """
    references: dict[int, Result] = {}
    for copies in sorted({one.copies for one in layouts if not one.refusal}):
        references[copies] = _on_one_device(job, copies, timeout)
    judged = tuple(_judge_one(job, one, references, timeout) for one in layouts)
    return Verdict(judged, tuple(_notes(job, layouts, references.values())), job.steps)


def _on_one_device(job: Job, copies: int, timeout: float) -> Result:
    try:
        (reference,) = _run(job, None, 1, copies, timeout)
    except RankFailedError as error:
        raise RuntimeError(
            f"The module does not train on one device, so there is nothing to compare with. {error}\n{error.details}"
        ) from None
    return reference


def _run(job: Job, asked: AskedLayout | None, devices: int, copies: int, timeout: float) -> list[Result]:
    strategy = None if asked is None else asked.strategy
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(devices, partial(train, job, strategy, devices, copies, folder), folder, timeout)


def _judge_one(job: Job, asked: AskedLayout, references: dict[int, Result], timeout: float) -> LayoutVerdict:
    try:
        if asked.refusal:
            raise RankFailedError(asked.refusal)
        results = _run(job, asked, asked.devices, asked.copies, timeout)
    except RankFailedError as error:
        return LayoutVerdict(asked.name, asked.sizes or str(asked.devices), "refused", str(error))
    reference = references[asked.copies]
    _merge_gradients(reference, results)
    found: dict[tuple[str, str], Finding] = {}
    for result in results:
        if asked.copies > 1:
            result = replace(result, metrics={})  # each replica's own, or their means: at a step both can be told apart
        expected = replace(reference, metrics=result.metrics and reference.metrics)
        for one in compare(expected, result, asked.copies, synced=_synced(reference, result, asked.copies)):
            if asked.copies > 1 and one.what.startswith("weight") and one.name in reference.buffers:
                continue  # each copy's own, as BatchNorm's statistics
            one = _named(one, reference.names)
            key = (one.what, one.name)
            found[key] = max(found.get(key, one), one, key=lambda finding: finding.error)
    state = "differs" if found else "equal"
    return LayoutVerdict(asked.name, asked.sizes, state, findings=tuple(found.values()))  # type: ignore[arg-type]


def _merge_gradients(reference: Result, results: list[Result]) -> None:
    """The first rank's gradients are those of all ranks, which may hold different parameters, in the module's order."""
    for kind in ("gradients", "clipped"):
        order = {name: i for i, name in enumerate(getattr(reference, kind))}
        merged = {name: x for result in reversed(results) for name, x in getattr(result, kind).items()}
        ordered = dict(sorted(merged.items(), key=lambda item: order.get(item[0], len(order))))
        setattr(results[0], kind, ordered)


def _synced(reference: Result, result: Result, copies: int) -> set[str]:
    """What the step logs with ``sync_dist``: in the first window nearer to the replicas' mean than to its own value."""
    if copies == 1 or not result.step_metrics:
        return set()
    window = reference.step_metrics[:copies]
    found = set()
    for name, x in result.step_metrics[0].items():
        values = [float(metrics[name]) for metrics in window if name in metrics]
        if len(values) == copies:
            own, mean = values[result.replica], sum(values) / copies
            if abs(float(x) - mean) < abs(float(x) - own):
                found.add(name)
    return found


def _named(finding: Finding, names: dict[str, str]) -> Finding:
    """Optimizer state by the parameter's name in place of its id."""
    kind, _, rest = finding.what.partition(" ")
    key = f"{rest.partition(' ')[0]}.{finding.name}"
    return replace(finding, name=names[key]) if kind == "optimizer" and key in names else finding


def _notes(job: Job, layouts: tuple[AskedLayout, ...], references: Collection[Result]) -> list[str]:
    notes = []
    undropped = sorted({name for one in references for name in one.undropped})
    if undropped:
        more = f" and {len(undropped) - 3} more" if undropped[3:] else ""
        notes.append(
            f"Dropout was off for this ({', '.join(undropped[:3])}{more}): on shards its masks are not one device's. "
            "With dropout=True layouts draw what one device draws."
        )
    drawing = any(one.draws for one in references)
    if drawing and any(one.strategy.draws == "per_shard" for one in layouts):
        notes.append(
            "The step draws random numbers. On shards they are not one device's, nor then are the results. With "
            "draws='one_device' they are."
        )
    if drawing and any(one.copies > 1 for one in layouts):
        notes.append(
            "The step draws random numbers. Each copy of the model draws them as if it were alone, one device that "
            "accumulates one batch's after the other's."
        )
    if any(one.copies > 1 for one in layouts):
        if len(job.batches) == 1:
            notes.append("All copies of the model saw the same batch. Give a DataLoader, and each sees its own.")
        apart = any(one.buffers for one in references)
        buffers = " Buffers, of which each copy has its own, are not compared." if apart else ""
        notes.append(f"Under data parallelism, one device accumulated gradients over as many batches.{buffers}")
    return notes
