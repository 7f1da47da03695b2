"""Autograd's graph: its nodes, and the backward that runs."""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_par.private.graph import (
    KEEPS_ARGUMENTS,
    Accumulation,
    NodeStand,
    asker_of_node,
    at_end_of_backward,
    autograd_function,
    can_order_nodes,
    checkpoint_generator,
    checkpointing_as,
    current_backward,
    function_of,
    gathered_by,
    in_backward,
    is_asked_for,
    is_known_node,
    kept_by_node,
    made_by,
    node_of,
    order_of,
    preserve_version,
    saves_for_python,
    set_order,
)
from tests.helpers.torch_version import VERSION


def test_a_callback_runs_at_the_end_of_the_backward() -> None:
    order: list[str] = []
    x = torch.ones(1, requires_grad=True)
    y = torch.ones(1, requires_grad=True)

    def hook(_: Any) -> None:
        order.append("hook")
        at_end_of_backward(lambda: order.append("end"))

    y.register_post_accumulate_grad_hook(hook)
    x.register_post_accumulate_grad_hook(lambda _: order.append("other"))
    (x * y).sum().backward()
    assert sorted(order[:2]) == ["hook", "other"] and order[2:] == ["end"]


def test_a_node_that_gathered_a_weight_leads_to_its_part() -> None:
    class Gathers(torch.autograd.Function):
        gathers_a_weight = True

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x * 2

    part = torch.ones(2, requires_grad=True)
    whole = Gathers.apply(part)  # without which the node is gone, too
    assert [*map(id, gathered_by(whole.grad_fn)[0])] == [id(part), id(0)]


def test_the_node_that_made_a_tensor_is_told_whatever_its_class_says() -> None:
    class Silent(torch.Tensor):
        grad_fn = None  # type: ignore[assignment]

    made = (torch.ones(2, requires_grad=True) * 2).as_subclass(Silent)  # type: ignore[arg-type]
    assert made.grad_fn is None
    assert node_of(made) is not None


def test_who_asks_for_a_gradient_edge_asks_for_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def grad_fn(x: torch.Tensor) -> Any:
        asked.append(asker_of_node(sys._getframe(1)).f_code.co_name)
        return node_of(x)

    monkeypatch.setattr(torch.Tensor, "grad_fn", property(grad_fn), raising=False)
    leaf = torch.ones(2, requires_grad=True)
    made = leaf * 2
    assert made.grad_fn is torch.autograd.graph.get_gradient_edge(made).node
    torch.autograd.graph.get_gradient_edge(leaf)
    assert {*asked} == {"test_who_asks_for_a_gradient_edge_asks_for_its_node"}
    asked.clear()
    torch.autograd.graph.register_multi_grad_hook((made,), lambda gradients: None)
    assert {*asked} == {"_get_grad_fn_or_grad_acc", "register_hook"}


def test_what_stands_for_a_node_tells_all_of_it() -> None:
    leaf = torch.ones(2, requires_grad=True)
    made, seen = leaf.exp(), list[int]()
    node: Any = made.grad_fn
    stand = NodeStand(node)
    assert isinstance(stand, torch.autograd.graph.Node) and stand == node and stand == NodeStand(node)
    assert stand in {node} and repr(stand) == repr(node) and dir(stand) == sorted(dir(node))
    for name in ("name", "_sequence_nr"):
        assert getattr(stand, name)() == getattr(node, name)()
    assert stand.next_functions == node.next_functions and stand.metadata is node.metadata
    assert len(stand._input_metadata) == 1 and torch.equal(stand._saved_result, made)
    stand.register_hook(lambda into, out: seen.append(1))
    stand.register_prehook(lambda out: seen.append(2))
    made._backward_hooks = OrderedDict({0: lambda grad: seen.append(3)})  # type: ignore[assignment]
    stand._register_hook_dict(made)
    made.sum().backward()
    assert seen[-1] == 1 and sorted(seen)[:2] == [1, 2]


def test_a_view_made_without_gradients_that_was_written_into_is_in_no_graph() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with torch.no_grad():
        row = weight[0].zero_()
    with pytest.raises(RuntimeError, match="created in no_grad mode"):
        assert row.grad_fn
    assert made_by(row) is None and made_by(made := weight * 2) is made.grad_fn is not None
    assert node_of(torch.ones(2)) is None


def test_where_a_graph_ends_is_known() -> None:
    leaf = torch.ones(1, requires_grad=True)
    node = leaf.exp().grad_fn
    end = node.next_functions[0][0]  # type: ignore[union-attr]
    assert type(end) is Accumulation and end.variable is leaf and type(node) is not Accumulation


def test_the_function_of_a_node_is_known_by_its_class() -> None:
    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x.clone()

    leaf = torch.ones(1, requires_grad=True)
    assert function_of(type(Plain.apply(leaf).grad_fn)) is Plain and function_of(type(leaf.exp().grad_fn)) is None


def test_a_running_backward_is_known() -> None:
    leaf, seen = torch.ones(1, requires_grad=True), list[bool]()
    leaf.register_hook(lambda grad: seen.append(in_backward()))
    leaf.exp().backward()
    assert seen == [True] and not in_backward()


def test_a_checkpoint_is_given_what_it_runs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, runs = getattr(*checkpoint_generator()), []

    def generator(fn: Any, *args: Any, **kwargs: Any) -> Any:
        runs.append(fn)
        return plain(fn, *args, **kwargs)

    monkeypatch.setattr(*checkpoint_generator(), generator)
    checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert runs == [torch.sin]


def test_what_a_python_function_saves_is_told_from_what_torchs_own_nodes_save() -> None:
    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            ctx.save_for_backward(x)
            return x.exp()

    found: list[bool] = []

    def hook(x: torch.Tensor) -> torch.Tensor:
        def asks() -> None:
            found.append(saves_for_python())

        asks()
        return x

    leaf = torch.ones(1, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(hook, lambda x: x):
        Saves.apply(leaf)
        leaf.exp()
    assert found == [True, False]


def test_what_runs_within_a_python_function_is_told_as_far_up_as_is_asked() -> None:
    def asks() -> Any:
        return autograd_function({calls.__code__})

    def calls() -> Any:
        return asks()

    found: list[Any] = []

    class Calls(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, through: bool) -> torch.Tensor:  # type: ignore[override]
            found.extend([calls()] if through else [asks(), asks()])
            return x.exp()

    Calls.apply(torch.ones(1), False)
    Calls.apply(torch.ones(1), True)
    once, again, through = found
    assert once is not None and once is again and through is None and asks() is None


def test_a_node_may_be_moved_in_the_order_in_which_backward_takes_what_is_ready() -> None:
    order: list[str] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:  # type: ignore[override]
            ctx.name = name
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
            order.append(ctx.name)
            return grad, None

    x = torch.ones(1, requires_grad=True)
    first, second = Noted.apply(x, "first"), Noted.apply(x, "second")
    (first + second).sum().backward()
    assert order == ["second", "first"]
    order.clear()
    assert can_order_nodes()
    first, second = Noted.apply(x, "first"), Noted.apply(x, "second")
    set_order(node_of(first), order_of(node_of(second)) + 1)
    (first + second).sum().backward()
    assert order == ["first", "second"]


def test_the_function_that_keeps_what_a_region_is_run_again_on_is_known_where_there_is_one() -> None:
    assert (KEEPS_ARGUMENTS is None) == (VERSION >= (2, 13))
    assert KEEPS_ARGUMENTS is None or issubclass(KEEPS_ARGUMENTS, torch.autograd.Function)


def test_what_a_node_keeps_for_backward() -> None:
    weight, bias = torch.ones(2, 3, requires_grad=True), torch.ones(2, requires_grad=True)
    x = torch.ones(4, 3)
    node = node_of(torch.nn.functional.linear(x, weight, bias))
    assert is_known_node(node)
    memory = {kept.untyped_storage().data_ptr() for kept in kept_by_node(node) or []}
    assert memory == {x.untyped_storage().data_ptr()}  # nobody asks for its gradient, which the weight is kept for
    assert kept_by_node(node_of(torch.stack([weight, weight]))) == []
    result = weight.exp()
    result.detach().zero_()
    assert kept_by_node(node_of(result)) is None


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_checkpointing_goes_by_what_takes_its_place(use_reentrant: bool) -> None:
    seen: list[str] = []

    def generator(fn: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append("begins")
        yield
        seen.append("ends")

    def reentrant(fn: Any, preserve: bool, *args: Any) -> Any:
        seen.append("is run")
        return fn(*args)

    x = torch.ones(2, requires_grad=True)
    with checkpointing_as(generator, reentrant):
        assert checkpoint(torch.exp, x, use_reentrant=use_reentrant).grad_fn.name() == "ExpBackward0"
    assert seen == (["is run"] if use_reentrant else ["begins", "ends"])
    checkpoint(torch.exp, x, use_reentrant=use_reentrant)
    assert len(seen) == (1 if use_reentrant else 2)


class _Asks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, seen: list[Any], *inputs: torch.Tensor) -> torch.Tensor:
        ctx.seen = seen
        return sum(inputs) * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.seen.append([is_asked_for(node) for node, _ in ctx.next_functions])
        return None, *(grads[0] for _ in ctx.next_functions)


def test_a_node_knows_which_of_its_inputs_gradients_are_asked_for() -> None:
    seen: list[Any] = []
    x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    inner = x * 2
    y = _Asks.apply(seen, inner, w, torch.ones(2)).sum()
    for inputs in (x, w, inner):
        torch.autograd.grad(y, inputs, retain_graph=True)
    y.backward(inputs=[w], retain_graph=True)
    y.backward()
    assert seen == [[True, False, False], [False, True, False]] + [[True, False, False], [False, True, False]] + [
        [True, True, False]
    ]


def test_each_backward_has_a_number() -> None:
    seen = [current_backward()]
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda g: seen.append(current_backward()))
    for _ in range(2):
        (x * 2).sum().backward()
    assert seen[0] == -1 and len({*seen}) == 3


def test_a_write_need_not_be_counted() -> None:
    x = torch.ones(2)
    with preserve_version(x):
        x.add_(1)
    assert x._version == 0
