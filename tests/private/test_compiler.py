"""What ``torch.compile`` made."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_par.private.compiler import (
    graph_owner,
    is_compiled_wrapper,
    is_higher_order,
    is_loaded,
    may_know,
    skip_frame,
    uncompiled,
)


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


def test_graphs_are_handed_on_by_a_method_that_has_the_backend() -> None:
    owner = graph_owner()
    plain, seen = owner.call_user_compiler, []

    def call(self: Any, graph: Any, inputs: Any) -> Any:
        seen.append((self.compiler_fn, len(inputs)))
        return plain(self, graph, inputs)

    def backend(graph: Any, inputs: Any) -> Any:
        return graph.forward

    owner.call_user_compiler = call
    try:
        assert torch.equal(torch.compile(lambda x: 3 * x, backend=backend)(torch.ones(2)), torch.full((2,), 3.0))
    finally:
        owner.call_user_compiler = plain
        torch.compiler.reset()
    (found,) = seen
    assert callable(found[0]) and found[1] == 1 and is_loaded()


def test_a_frame_that_is_skipped_runs_as_written() -> None:
    owner = graph_owner()
    plain = owner.call_user_compiler

    def call(self: Any, graph: Any, inputs: Any) -> Any:
        raise skip_frame("a test")

    owner.call_user_compiler = call
    try:
        assert torch.equal(torch.compile(lambda x: 4 * x, backend="eager")(torch.ones(2)), torch.full((2,), 4.0))
    finally:
        owner.call_user_compiler = plain
        torch.compiler.reset()


def test_code_within_code_is_told_from_functions() -> None:
    assert is_higher_order(torch.ops.higher_order.cond) and not is_higher_order(torch.add)


def test_a_wrapper_is_known() -> None:
    plain, in_place = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    in_place.compile(backend="eager")
    wrapper: Any = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    assert [is_compiled_wrapper(m) for m in (plain, in_place, wrapper)] == [False, False, True]


def test_who_asks_torch_whether_a_tensor_wraps_others_is_told_from_the_compiler() -> None:
    told: list[bool] = []

    class Asked(torch.Tensor):
        @property
        def __tensor_flatten__(self) -> Any:
            told.append(may_know(sys._getframe(1)))
            return None

    x = torch.ones(1).as_subclass(Asked)
    is_traceable_wrapper_subclass(x)
    x.__tensor_flatten__  # noqa: B018
    assert told == [False, True]
