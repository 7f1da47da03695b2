"""Rules take arguments by the names that torch has for them: the cases of `tests.rule_cases`, called by keyword."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.helpers.rule_check import Case, check
from tests.helpers.slow import long, slow
from tests.rule_cases import CASES

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch's, of old spellings that the cases call on purpose
    pytest.mark.usefixtures("shares"),
]

Names = list[str]


def _spellings(func: Any, count: int) -> list[Names]:
    """What the first ``count`` parameters of ``func`` may be called."""
    try:
        return [list(inspect.signature(func).parameters)[:count]]
    except (TypeError, ValueError):  # a builtin: its operator's overloads, whose `self` functions call `input`
        packet: Any = getattr(torch.ops.aten, func.__name__, None)
        overloads = () if packet is None else [getattr(packet, name)._schema for name in packet.overloads()]
        named = [[argument.name for argument in schema.arguments][:count] for schema in overloads]
        return [["input" if name == "self" else name for name in names] for names in named if len(names) == count]


class _Learns(TorchFunctionMode):
    """Hands all arguments but the first ``kept`` over by keyword, wherever torch takes that of plain tensors."""

    def __init__(self, kept: int) -> None:
        super().__init__()
        self.kept = kept
        self.learnt: list[Names] = []  # of each call; none where it stays as it is

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        may = len(args) > self.kept and not getattr(func, "__name__", "__").startswith("__")
        for names in _spellings(func, len(args)) if may else ():
            if len(names) == len(args) and not set(names) & set(kwargs):
                try:
                    result = _by_keyword(func, names[self.kept :], args, kwargs)
                except (TypeError, ValueError, RuntimeError):
                    continue
                self.learnt.append([func.__name__, *names[self.kept :]])
                return result
        self.learnt.append([])
        return func(*args, **kwargs)


class _Repeats(TorchFunctionMode):
    """Calls as was learnt."""

    def __init__(self, learnt: list[Names]) -> None:
        super().__init__()
        self.calls = iter(learnt)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _by_keyword(func, next(self.calls)[1:], args, kwargs or {})


def _by_keyword(func: Any, names: Names, args: Any, kwargs: Any) -> Any:
    """Call ``func`` with its last arguments by their ``names``."""
    kept = len(args) - len(names)
    return func(*args[:kept], **dict(zip(names, args[kept:])), **kwargs)


class _Known(Exception):  # noqa: N818 (a signal, not an error)
    """Nothing in a case is called in a new way."""


@long()
@slow(but=["all"])
@pytest.mark.parametrize("kept", [0, 1], ids=["all", "all but the first"])
def test_arguments_may_be_keywords(kept: int) -> None:
    seen: set[tuple[str, ...]] = set()
    failed = []
    for case in CASES:
        try:
            check(replace(case, call=_respelt(case, kept, seen)), ["zigzag"])
        except _Known:
            continue
        except AssertionError as error:
            failed.append(f"{case.name}: {str(error).splitlines()[-1]}")
    assert not failed, "\n".join(failed)
    assert len(seen) > 300
    assert kept == 0 or ("roll", "shifts", "dims") in seen


def _respelt(case: Case, kept: int, seen: set[tuple[str, ...]]) -> Any:
    """The case's call, by keyword. Its first run is on plain tensors."""
    learns = _Learns(kept)

    def call(*inputs: Tensor) -> Any:
        if learns.learnt:
            with _Repeats(learns.learnt):
                return case.call(*inputs)
        with learns:
            result = case.call(*inputs)
        new = {tuple(names) for names in learns.learnt if names} - seen
        if not new:
            raise _Known
        seen.update(new)
        return result

    return call
