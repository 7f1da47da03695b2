"""A program under a layout, compared with one device."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_par.verdict.compare import TOLERANCE, compare, largest
from tests.fuzz.layouts import LAYOUTS
from tests.fuzz.running import MARK, Ran, one_device, run
from tests.helpers.pool import Pool, RanksFailedError

SEED = 1234


@dataclass(frozen=True)
class Outcome:
    """What came of a program under a layout.

    Args:
        kind: "equal", "refused" before training, "late" (refused in training), "wrong", "hang", "crash", "invalid"
            (it does not train on one device) or "drawn" (it draws numbers, which need not be kept).
        lines: what differs, or the message.
        details: traces.
        key: a message without its names and numbers, by which outcomes are alike.
    """

    kind: str
    lines: tuple[str, ...] = ()
    details: str = ""
    key: str = ""


@dataclass
class Judge:
    """Runs programs in warm processes.

    Args:
        timeout: seconds for a run, after which it is a hang.
    """

    pool: Pool = field(default_factory=Pool)
    timeout: float = 60.0
    runs: int = 0

    def reference(self, source: str, nudge: float = 0.0) -> Ran | Outcome:
        """The program on one device."""
        try:
            (ran,) = self.pool.run(1, one_device, source, SEED, nudge, timeout=self.timeout)
        except RanksFailedError as error:
            return _of_failure(error, "invalid")
        assert isinstance(ran, Ran)
        return ran

    def judge(self, source: str, layout: str, draws: bool = False, reference: Ran | Outcome | None = None) -> Outcome:
        """Train the program both ways and compare."""
        self.runs += 1
        if self.runs % 300 == 0:
            self.pool.restart()  # what a process keeps of each run adds up
        if reference is None:
            reference = self.reference(source)
        if isinstance(reference, Outcome):
            return reference
        try:
            with tempfile.TemporaryDirectory() as folder:
                ranks = LAYOUTS[layout].ranks
                results = self.pool.run(ranks, run, source, layout, folder, SEED, timeout=self.timeout, grace=4.0)
        except RanksFailedError as error:
            return _of_failure(error, "")
        if draws:
            return Outcome("drawn")
        found = differences(reference, results)
        if found and self._is_chaotic(source, reference):
            return Outcome("chaotic", tuple(found))
        return Outcome("wrong", tuple(found), key=_key(found[0])) if found else Outcome("equal")

    def _is_chaotic(self, source: str, reference: Ran) -> bool:
        """Whether rounding alone moves one device's results as far as that.

        Both ways: a decision by the sign of what is zero but for rounding stays where one nudge has the same sign.
        """
        return any(self._moves(source, reference, nudge) for nudge in (1e-14, -1e-14))

    def _moves(self, source: str, reference: Ran, nudge: float) -> bool:
        nudged = self.reference(source, nudge)
        return isinstance(nudged, Outcome) or any(
            "initial weight" not in line for line in differences(reference, [nudged], generators=False)
        )

    def close(self) -> None:
        self.pool.close()


def _of_failure(error: RanksFailedError, kind: str) -> Outcome:
    details = str(error)
    failures = [json.loads(text) for text in re.findall(rf"{MARK}(\{{.*\}})", details)]
    stuck = [rank for rank, text in error.reports.items() if text.startswith("no answer after")]
    if not failures:
        return Outcome(kind or ("hang" if stuck else "crash"), (details[-1500:],), details, _key(details[:80]))
    first = min(failures, key=lambda one: any(word in one["message"] for word in _LOST))
    message = f"{first['kind']}: {first['message']}"
    if not kind:
        refuses = first["refuses"] or _LIGHTNINGS in message
        kind = "crash" if not refuses else "late" if first["steps"] else "refused"
        alone = f" (ranks {stuck} waited for it)" if stuck else ""
        if alone and kind in ("refused", "late"):
            kind = "crash"
        message += alone
    where = f"at {', '.join(first['ours'])}, batch {first['batches']}, step {first['steps']}"
    return Outcome(kind, (message, where), "\n".join(one["trace"] for one in failures), _key(message))


_LOST = ("closed the connection", "onnection reset", "onnection closed", "ended with", "Broken pipe")
_LIGHTNINGS = "returning None in distributed training is not supported"


def _key(message: str) -> str:
    message = re.sub(r"\S*program-\d\.py:\d+", "LINE", message)
    message = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`", "'…'", message)
    message = re.sub(r"\b[A-Za-z_]*\d*(\.[A-Za-z_0-9]+)+", "NAME", message)
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", message)[:160]


# -------------------------------------------------------------------------------------------------------- difference


def differences(reference: Ran, results: list[Any], generators: bool = True) -> list[str]:
    """What breaks the law, one line each."""
    found: list[str] = []
    one = reference.result
    _merge(one, [ran.result for ran in results])
    off = {path: _off_on(path, value, results) for path, value in reference.state.items()}
    for rank, ran in enumerate(results):
        try:
            lines = [str(finding) for finding in compare(one, ran.result)]
        except ValueError as error:
            lines = [f"batches: {len(one.losses)} on one device, {len(ran.result.losses)} here ({error})"]
        lines += [line for path in reference.state for line in off[path].get(rank, ())]
        if generators:
            for name, state in reference.generators.items():
                lines += [] if _same(state, ran.generators[name]) else [f"generator of {name}: state differs"]
        found += [f"rank {rank}: {line}" for line in lines]
    return found


def _off_on(path: str, value: Any, results: list[Any]) -> dict[int, list[str]]:
    """Where a piece of state differs, by rank. A module's own is that of the rank that has the module."""
    lines = {
        rank: _unequal(path, value, ran.state[path], _scale(value)) if path in ran.state else [f"{path}: missing"]
        for rank, ran in enumerate(results)
    }
    of_a_module = path.startswith(("attribute", "metric")) and not path.startswith("attribute .")
    return {} if of_a_module and not all(lines.values()) else lines


def _merge(reference: Any, results: list[Any]) -> None:
    """The first rank's gradients are those of all ranks, which may hold different parameters, in the module's order."""
    for kind in ("gradients", "clipped"):
        order = {name: i for i, name in enumerate(getattr(reference, kind))}
        merged = {name: x for result in reversed(results) for name, x in getattr(result, kind).items()}
        setattr(results[0], kind, dict(sorted(merged.items(), key=lambda item: order.get(item[0], len(order)))))


def _same(a: Any, b: Any) -> bool:
    return bool(torch.equal(a, b)) if isinstance(a, Tensor) else a == b


def _scale(value: Any) -> float:
    if isinstance(value, Tensor):
        return largest(value)
    if isinstance(value, float):
        return abs(value) if value == value and abs(value) != float("inf") else 0.0
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max((_scale(one) for one in inner), default=0.0)


def _unequal(path: str, a: Any, b: Any, scale: float) -> list[str]:
    if type(a) is not type(b):
        return [f"{path}: {_short(a)} on one device, {_short(b)} here"]
    if isinstance(a, dict):
        if list(a) != list(b):
            return [f"{path}: keys {list(a)} on one device, {list(b)} here"]
        return [line for key in a for line in _unequal(f"{path}.{key}", a[key], b[key], scale)]
    if isinstance(a, list):
        if len(a) != len(b):
            return [f"{path}: {len(a)} items on one device, {len(b)} here"]
        return [line for i, (x, y) in enumerate(zip(a, b)) for line in _unequal(f"{path}.{i}", x, y, scale)]
    if isinstance(a, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return [f"{path}: {a.dtype} {tuple(a.shape)} on one device, {b.dtype} {tuple(b.shape)} here"]
        if a.is_floating_point():
            off = (a - b).abs()
            off[(a == b) | (a.isnan() & b.isnan())] = 0.0
            error = off.nan_to_num(nan=float("inf")).max().item() if off.numel() else 0.0
            return [f"{path}: off by {error:.2e}"] if error > TOLERANCE * scale else []
        return [] if torch.equal(a, b) else [f"{path}: not equal"]
    if isinstance(a, float):
        same = a == b or (a != a and b != b) or abs(a - b) <= TOLERANCE * max(scale, abs(a))
        return [] if same else [f"{path}: {a} on one device, {b} here"]
    return [] if a == b else [f"{path}: {_short(a)} on one device, {_short(b)} here"]


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor {tuple(value.shape)}"
    return repr(value)[:120]
