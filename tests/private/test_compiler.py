"""What ``torch.compile`` made."""

from __future__ import annotations

from typing import Any

import torch

from lightning_par.private.compiler import is_compiled_wrapper, uncompiled


def test_compiled_code_can_run_as_it_is_written() -> None:
    compiled: list[Any] = []
    double = torch.compile(lambda x: 2 * x, backend=lambda module, _: compiled.append(module) or module.forward)
    first, last = uncompiled(), uncompiled()
    first.__enter__()
    last.__enter__()
    assert double(torch.ones(2)).sum() == 4 and not compiled
    first.__exit__(None, None, None)  # as threads do, which end in any order
    assert double(torch.ones(2)).sum() == 4 and not compiled
    last.__exit__(None, None, None)
    assert double(torch.ones(2)).sum() == 4 and compiled


def test_the_wrapper_that_compile_makes_is_known() -> None:
    linear = torch.nn.Linear(2, 2)
    assert is_compiled_wrapper(torch.compile(linear, backend="eager"))  # type: ignore[arg-type]
    assert not is_compiled_wrapper(linear)
