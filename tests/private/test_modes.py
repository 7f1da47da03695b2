"""Modes, which see each torch function or each operation."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from lightning_par.private.modes import innermost_mode, no_modes


def test_no_mode_sees_what_is_done_without_modes() -> None:
    seen: list[Any] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Functions(), FakeTensorMode():
        assert isinstance(torch.ones(1), FakeTensor) and len(seen) == 1
        with no_modes():
            assert type(torch.ones(1)) is torch.Tensor
    assert len(seen) == 1


def test_the_innermost_mode_is_known() -> None:
    class Functions(TorchFunctionMode):
        pass

    outer, inner = Functions(), Functions()
    assert innermost_mode() is None
    with outer, inner:
        assert innermost_mode() is inner
        inner.__exit__(None, None, None)
        assert innermost_mode() is outer
        inner.__enter__()
