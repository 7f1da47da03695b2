"""What ``torch.compile`` made."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_par.private.compiler import (
    Compiler,
    as_compiled,
    as_written,
    compiler_of,
    compiler_of_function,
    forget_traced,
    graph_owner,
    is_compiled_wrapper,
    is_higher_order,
    is_loaded,
    may_know,
    own_frame,
    skip_frame,
    uncompiled,
)
from lightning_par.private.fake_tensors import FakeTensorMode


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


def test_compiled_code_can_run_compiled_within() -> None:
    compiled: list[Any] = []
    double = torch.compile(lambda x: 2 * x, backend=lambda module, _: compiled.append(module) or module.forward)
    with uncompiled():
        with uncompiled(), as_compiled():  # another says that nothing is to
            assert double(torch.ones(2)).sum() == 4 and not compiled
        with as_compiled():
            assert double(torch.ones(2)).sum() == 4 and len(compiled) == 1
        torch.compiler.reset()
        assert double(torch.ones(2)).sum() == 4 and len(compiled) == 1
    assert double(torch.ones(2)).sum() == 4 and len(compiled) == 2


def _square(x: Tensor) -> Tensor:
    return x * x


@pytest.mark.parametrize("made", ["a wrapper", "in place", "of a function"])
def test_what_the_user_compiled_by_compiles_more(made: str) -> None:
    graphs, linear = list[Any](), nn.Linear(2, 2)
    options: Any = dict(backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True)
    compiler: Compiler | None
    if made == "a wrapper":
        compiler = compiler_of(torch.compile(linear, **options))  # type: ignore[arg-type]
    elif made == "in place":
        linear.compile(**options)
        compiler = compiler_of(linear)
    else:
        compiler = compiler_of_function(torch.compile(_square, **options))
    assert compiler is not None
    assert compiler(_square)(torch.full((1,), 3.0)) == 9 and len(graphs) == 1
    torch.compiler.reset()


def test_what_was_not_compiled_has_no_compiler() -> None:
    assert compiler_of(nn.Linear(2, 2)) is None and compiler_of_function(_square) is None
    assert isinstance(_square, FunctionType)


def test_a_function_is_found_as_it_was_written() -> None:
    twice = torch.compile(torch.compile(_square, backend="eager"), backend="eager")
    assert as_written(twice) is _square and as_written(_square) is _square


def test_a_call_of_a_module_of_torchs_is_one_graph_with_a_cache_of_its_own() -> None:
    graphs = list[Any]()

    def compiled(call: Any) -> Any:
        return torch.compile(call, backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True)

    layers = [nn.Linear(2, 2) for _ in range(12)]  # more than torch's limit of graphs for one code
    for layer in layers:
        call = compiled(own_frame(layer._call_impl, layer.forward))
        assert torch.equal(call(torch.ones(2)), layer(torch.ones(2)))
    assert len(graphs) == len(layers)
    assert own_frame(_square, _square) is _square  # of the user's it is the call itself
    torch.compiler.reset()


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


def test_what_was_traced_can_be_swapped_once_it_is_forgotten() -> None:
    import torch._dynamo  # as where anything was compiled

    weight, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))
    mode = FakeTensorMode()
    mode.from_tensor(weight)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(weight, other)
    forget_traced()
    torch.utils.swap_tensors(weight, other)
    assert weight.eq(1).all() and mode is not None
