"""What came of a stranger under a strategy, on two ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from lightning_par.verdict.compare import compare
from lightning_par.verdict.result import Result
from tests.helpers.pool import Pool, RanksFailedError
from tests.strangers.stranger import Stranger
from tests.strangers.train import Seen, find, train

RANKS = 2
TIMEOUT = 240  # seconds


@dataclass(frozen=True)
class Outcome:
    """Of one run.

    Attributes:
        state: "equal", "differs" or "raised".
        text: what differs first, or what the first rank raised.
        share: of the parameters, on the rank that holds most.
        microbatches: into how many parts a training batch was cut.
        uncut: why into no more.
    """

    state: str
    text: str = ""
    share: float = 0.0
    microbatches: int = 0
    uncut: tuple[str, ...] = ()


@dataclass
class References:
    """What one device does, which several strategies are compared with."""

    pool: Pool

    def __post_init__(self) -> None:
        self._known: dict[tuple[str, str, int], Seen] = {}

    def find(self, package: str, name: str, replicas: int) -> Seen:
        key = (package, name, replicas)
        if key not in self._known:
            (self._known[key],) = self.pool.run(1, train, *key[:2], None, replicas, timeout=TIMEOUT)
        return self._known[key]


def run(package: str, name: str, strategy: str, references: References) -> Outcome:
    """Train a stranger on one device and under ``strategy``, and compare."""
    stranger = find(package, name)
    replicas = RANKS if strategy == "fsdp" and not stranger.own_loop else 1
    reference = references.find(package, name, replicas)
    assert len(reference.result.losses) and reference.result.clipped, "one device has trained nothing"
    try:
        ranks = references.pool.run(RANKS, train, package, name, strategy, replicas, timeout=TIMEOUT)
    except RanksFailedError as error:
        return Outcome("raised", _told(error))
    _merge_gradients(reference.result, [seen.result for seen in ranks])
    found = [line for seen in ranks for line in _differences(stranger, reference, seen, replicas, strategy)]
    share = max(seen.held / reference.total for seen in ranks)
    state, text = ("differs", "; ".join(dict.fromkeys(found))[:1500]) if found else ("equal", "")
    return Outcome(state, text, share, ranks[0].microbatches, ranks[0].uncut)


def _differences(stranger: Stranger, reference: Seen, seen: Seen, replicas: int, strategy: str) -> list[str]:
    expected, result = reference.result, seen.result
    if replicas > 1 or strategy == "fsdp":  # of each replica what it logs and its buffers
        expected, result = (
            replace(one, metrics={}, step_metrics=[{} for _ in one.step_metrics]) for one in (expected, result)
        )
        expected, result = (_without_buffers(one, reference.result.buffers) for one in (expected, result))
    elif not result.metrics:
        expected = replace(expected, metrics={})
    return [str(one) for one in compare(expected, result, replicas, stranger.tolerance)]


def _merge_gradients(reference: Result, results: list[Result]) -> None:
    """The first rank's gradients are those of all ranks, which may hold different parameters, in the module's order."""
    for kind in ("gradients", "clipped"):
        order = {name: i for i, name in enumerate(getattr(reference, kind))}
        merged = {name: x for result in reversed(results) for name, x in getattr(result, kind).items()}
        ordered = dict(sorted(merged.items(), key=lambda item: order.get(item[0], len(order))))
        setattr(results[0], kind, ordered)


def _without_buffers(result: Result, buffers: list[str]) -> Result:
    def kept(state: dict[str, Any]) -> dict[str, Any]:
        return {name: x for name, x in state.items() if name not in buffers}

    checkpoint = {k: kept(v) if k == "state_dict" else v for k, v in result.checkpoint.items()}
    return replace(result, after=kept(result.after), checkpoint=checkpoint)


def _told(error: RanksFailedError) -> str:
    """What the rank raised that failed first; the others lost it, or still wait."""
    reports = [error.reports[rank] for rank in sorted(error.reports)]
    return min(reports, key=lambda report: bool(_OTHERS.search(report)))


_OTHERS = re.compile("closed the connection|Connection closed by peer|Connection reset by peer|no answer after")
