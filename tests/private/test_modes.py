"""Modes, which see each torch function or each operation."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_par.private.fake_tensors import FakeTensor, FakeTensorMode
from lightning_par.private.modes import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    TorchDispatchMode,
    innermost_mode,
    is_any_autocast,
    no_modes,
    number_of_modes,
    surroundings,
    unselected,
)


class Functions(TorchFunctionMode):
    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Seen(torch.Tensor):
    functions: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.functions.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(("disable", "of_mode"), [(DisableTorchFunction, 0), (DisableTorchFunctionSubclass, 1)])
def test_classes_don_t_see_functions_where_that_is_disabled(disable: Any, of_mode: int) -> None:
    seen, x = list[Any](), torch.ones(1).as_subclass(Seen)
    Seen.functions.clear()
    with Functions(seen), disable():
        x.exp()
    assert len(seen) == of_mode and not Seen.functions
    x.exp()
    assert Seen.functions


def test_a_mode_sees_operations() -> None:
    seen: list[Any] = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Operations():
        x.exp()
    assert seen == [torch.ops.aten.exp.default]


def test_no_mode_sees_what_is_done_without_modes() -> None:
    seen: list[Any] = []
    with Functions(seen), FakeTensorMode():
        assert isinstance(torch.ones(1), FakeTensor) and len(seen) == 1
        with no_modes():
            assert type(torch.ones(1)) is torch.Tensor
    assert len(seen) == 1


def test_the_innermost_mode_is_known() -> None:
    outer, inner = Functions([]), Functions([])
    assert innermost_mode() is None
    with outer, inner:
        assert innermost_mode() is inner
        inner.__exit__(None, None, None)
        assert innermost_mode() is outer
        inner.__enter__()


@pytest.mark.parametrize(
    "around",
    [
        torch.no_grad,
        torch.inference_mode,
        FakeTensorMode,
        lambda: torch.autocast("cpu"),
        lambda: torch.autocast("cpu", torch.float16),
        lambda: sdpa_kernel(SDPBackend.MATH),
        lambda: torch.autograd.graph.saved_tensors_hooks(abs, abs),
        lambda: torch.autograd.set_detect_anomaly(True),
    ],
)
def test_what_user_code_puts_around_a_call_shows(around: Any) -> None:
    before = surroundings()
    with around():
        assert surroundings() != before
    assert surroundings() == before


def test_whether_a_mode_is_entered() -> None:
    assert not number_of_modes()
    with torch.device("cpu"):
        assert number_of_modes()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_autocast_of_any_kind_is_seen(kind: str) -> None:
    assert not is_any_autocast()
    with torch.autocast(kind, torch.bfloat16, enabled=kind == "cpu" or torch.cuda.is_available()):
        assert is_any_autocast() == torch.is_autocast_enabled(kind)
        with torch.autocast(kind, enabled=False):
            assert not is_any_autocast()
    assert not is_any_autocast()


def test_selective_checkpointing_does_not_count_what_is_unselected() -> None:
    seen: list[Any] = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    runs = iter((1, 3))  # of what is done beside the region, more in the second run

    def region(x: torch.Tensor) -> torch.Tensor:
        with unselected(), torch.no_grad():
            for _ in range(next(runs)):
                torch.ones(2).cos()
        return x.cos().cos()

    x = torch.ones(2, requires_grad=True)
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.cos.default])
    with Operations():
        checkpoint(region, x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert seen.count(torch.ops.aten.cos.default) == 1 + 2 + 3  # others see it
    expected = torch.ones(2, requires_grad=True)
    expected.cos().cos().sum().backward()
    assert torch.equal(x.grad, expected.grad)  # type: ignore[arg-type]
