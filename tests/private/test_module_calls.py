"""What the call of a module runs."""

from __future__ import annotations

import copy
import functools
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from lightning_par.private.module_calls import (
    CALL,
    METHODS,
    drop_calls,
    forget_call,
    get_call,
    is_within_call,
    plain_call,
    reset_call,
    set_call,
    set_inner_call,
    takes,
)


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def renamed(function: Any) -> Any:
    @functools.wraps(function)
    def called(self: Any, *args: Any, old: Any = None, **kwargs: Any) -> Any:
        return function(self, *(args or (old,)), **kwargs)

    return called


class Renamed(Double):
    @renamed
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * x


def test_a_call_is_replaced_and_put_back() -> None:
    module, x = nn.Linear(1, 1), torch.ones(1)
    before = plain_call(module)
    set_call(module, lambda x: "ours")
    assert module(x) == "ours" and plain_call(module)(x) == "ours" and get_call(module) is vars(module)[CALL]
    assert isinstance(copy.deepcopy(module)(x), torch.Tensor)  # what is set stays behind
    reset_call(module, before)
    assert get_call(module) is None and torch.equal(module(x), before(x)) and CALL not in vars(module)


def test_a_compiled_call_is_what_runs_and_is_put_back_and_forgotten() -> None:
    module, x, compiled = Double(), torch.ones(1), list[Any]()
    module.compile(backend=lambda graph, _: compiled.append(graph) or graph.forward)
    before = plain_call(module)
    set_call(module, lambda x: "ours")
    reset_call(module, before)
    module(x)
    assert len(compiled) == 1 and get_call(module) is before
    torch.compiler.reset()
    forget_call(module)
    module(x)
    assert len(compiled) == 1 and get_call(module) is None


def test_a_wrapper_that_compile_made_runs_what_it_wraps_uncompiled_once_forgotten() -> None:
    compiled = list[Any]()
    wrapper: Any = torch.compile(Double(), backend=lambda graph, _: compiled.append(graph) or graph.forward)
    wrapper.register_forward_hook(lambda module, args, y: y + 1)
    forget_call(wrapper)
    assert wrapper(torch.ones(1)) == 3 and not compiled


@pytest.mark.parametrize("kind", [nn.Sequential, nn.ModuleList])
def test_a_modules_calls_saving_and_loading_run_this_code(kind: Any) -> None:
    ran: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals["__name__"] == "torch.nn.modules.module":
            ran.add(frame.f_code.co_name)

    module = kind([nn.Linear(1, 1)]) if kind is nn.ModuleList else kind(nn.Linear(1, 1))
    state, before = dict(module.state_dict()), sys.getprofile()
    try:
        sys.setprofile(note)
        module[0](torch.ones(1))
        module[0].register_forward_hook(lambda layer, given, made: None)  # with hooks it runs code of its own
        module[0](torch.ones(1))
        module.state_dict()
        module.load_state_dict(state)
    finally:
        sys.setprofile(before)
    assert ran >= METHODS


class _Around:
    def __init__(self, name: str, original: Any) -> None:
        self.name, self.original = name, original

    def __call__(self, x: Any) -> Any:
        return [self.name, self.original(x)]


class _Inner(_Around):
    pass


@pytest.mark.parametrize("outer", [False, True])
def test_a_call_is_set_within_one_that_decides_whether_it_runs(outer: bool) -> None:
    module, x = Double(), torch.ones(1)
    if outer:
        set_call(module, _Around("outer", plain_call(module)))
    assert is_within_call(module) is outer
    set_inner_call(module, lambda plain: _Inner("inner", plain))
    assert module(x) == (["outer", ["inner", 2 * x]] if outer else ["inner", 2 * x])
    drop_calls(module, _Inner)
    assert module(x) == (["outer", 2 * x] if outer else 2 * x)
    drop_calls(module, _Inner)
    assert (get_call(module) is not None) is outer


def test_what_a_forward_does_not_take_is_known_without_a_call() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(2)
    assert takes(layer, (x,), {}) and takes(layer, (), {"input": x})
    assert not takes(layer, (x,), {"lengths": None}) and not takes(layer, (x, x), {}) and not takes(layer, (), {})
    handle = layer.register_forward_pre_hook(lambda m, args, kwargs: (args, {}), with_kwargs=True)
    assert takes(layer, (x,), {"lengths": None})  # the hook drops it
    handle.remove()
    assert takes(torch.jit.script(layer), (x,), {})
    assert takes(Renamed(), (), {"old": x})  # which its decorator takes
