"""Hooks that user code puts on nodes of autograd's graph: on one device's, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge, register_multi_grad_hook

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.sharded.graph_node import STAGES
from lightning_par.sharded.patches import NODES, SHARDED
from lightning_par.sharded.patches.graph_nodes import of_another_stage
from lightning_par.sharded.run_state import RunState
from lightning_par.tensor.apply import shard_module
from lightning_par.tensor.plan import Split, TensorPlan

AXIS = Axis("tensor", ranks=(0,), rank=0, group=None)
PLAN = TensorPlan(1, (Split(("weight",), (4, 4), 0, "colwise", Positions.of([0] * 4)),))
REFUSED = r"test_graph_node.py:\d+: a hook is put on a node of autograd's graph"


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with SHARDED.installed(), NODES.installed():
        yield


def _refused(node: Any, why: str) -> None:
    for register in (node.register_hook, node.register_prehook):
        with pytest.raises(NotImplementedError, match=f"{REFUSED}.*{why}"):
            register(lambda *gradients: None)


def _halved(*gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(g / 2 for g in gradients[-1])


def test_nodes_of_whole_tensors_are_what_they_are() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    node: Any = y.grad_fn
    assert isinstance(node, Node) and type(node).__name__ == "ExpBackward0" == node.name()
    assert node == y.grad_fn and node in {y.grad_fn} and node._saved_result is not None
    end, place = node.next_functions[0]
    assert end.variable is x and place == 0 and end.next_functions == ()
    node.register_prehook(_halved)
    end.register_prehook(_halved)
    y.sum().backward()
    torch.testing.assert_close(x.grad, x.exp().detach() / 4)
    assert (x.detach() * 2).grad_fn is None


def test_hooks_on_nodes_of_parts_are_refused_and_those_of_tensors_and_modules_work() -> None:
    linear, seen = nn.Linear(4, 4, bias=False), list[Any]()
    shard_module(linear, PLAN, AXIS)
    linear.register_full_backward_hook(lambda *given: seen.append("module"))
    y = linear(torch.ones(1, 4, requires_grad=True))
    register_multi_grad_hook((y,), lambda grads: seen.append(grads[0].shape))
    _refused(y.grad_fn, "this rank's part")
    _refused(get_gradient_edge(y).node, "this rank's part")
    _refused(y.grad_fn.next_functions[0][0], "this rank's part")
    _refused(get_gradient_edge(linear.weight).node, "this rank's part")
    y.sum().backward()
    assert seen == [(1, 4), "module"]


def test_hooks_on_nodes_of_a_pipelines_stages_are_refused() -> None:
    state = RunState()
    state.torn = STAGES
    with state.entered():
        _refused((torch.ones(2, requires_grad=True) * 2).grad_fn, "those of its own stages")


def test_a_hook_on_layers_that_are_taken_apart_is_refused_and_one_on_a_function_is_its_stages() -> None:
    assert of_another_stage(nn.GELU()).name() == "BackwardHookFunctionBackward"
    with pytest.raises(NotImplementedError, match="A Sequential has a full backward hook"):
        of_another_stage(nn.Sequential(nn.Linear(1, 1)))
