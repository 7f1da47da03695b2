"""torch's transforms of functions, such as ``vmap``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_leaves

from lightning_par.private.transforms import (
    in_functorch,
    is_batched,
    is_wrapped,
    outside_transforms,
    transforms,
    unwrapped,
    without_saved_tensors_hooks,
)
from tests.helpers.pool import Pool


def _calls() -> dict[str, Callable[[], Any]]:
    """Public calls, by the private function at which each begins."""
    from torch.nn.attention.flex_attention import flex_attention

    x, q = torch.ones(3), torch.ones(1, 1, 2, 16)
    return {
        "vmap_impl": lambda: torch.vmap(torch.sin)(x),
        "grad_impl": lambda: torch.func.grad(torch.sum)(x),
        "grad_and_value_impl": lambda: torch.func.grad_and_value(torch.sum)(x),
        "_vjp_with_argnums": lambda: torch.func.vjp(torch.sin, x)[1](x),
        "_jvp_with_argnums": lambda: torch.func.jvp(torch.sin, (x,), (x,)),
        "_autograd_grad": lambda: torch.func.jacrev(torch.sin)(x),
        "_enforce_mem_layouts": lambda: flex_attention(q, q, q),
    }


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_transforms_begin_in_functions_that_are_given_their_tensors() -> None:
    begins = {name: module for module, name, _ in transforms()}
    assert begins.keys() == _calls().keys()
    for name, call in _calls().items():
        with mock.patch.object(begins[name], name, wraps=getattr(begins[name], name)) as entry:
            call()
        assert any(isinstance(x, torch.Tensor) for x in tree_leaves(list(entry.call_args.args))), name


def test_outside_transforms_what_is_closed_over_is_plain() -> None:
    inside, outside = [], []

    def function(x: torch.Tensor) -> torch.Tensor:
        inside.append(in_functorch())
        with outside_transforms():
            outside.append(in_functorch())
        return x * in_functorch()

    assert torch.vmap(torch.vmap(function))(torch.ones(2, 2)).tolist() == [[1, 1], [1, 1]]
    assert (inside, outside) == ([True], [False])


def _run_under_hooks() -> tuple[list[bool], bool]:
    """Where a transform runs: where nothing is done, where hooks may be met, and again; whether its tensor is known."""
    met = []

    def function(x: torch.Tensor) -> torch.Tensor:
        met.append(is_wrapped(x))
        return x.sin().sum()

    def runs() -> bool:
        try:
            torch.func.grad(function)(x)
        except RuntimeError as error:
            assert "saved tensor hooks" in str(error)
            return False
        return True

    x = torch.ones(3)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        before = runs()
        with without_saved_tensors_hooks():
            within = runs()
        after = runs()
    return [before, within, after], all(met) and bool(met) and not is_wrapped(x)


def test_tensors_of_a_transform_are_known_and_it_runs_where_what_is_saved_passes_hooks(pool: Pool) -> None:
    # In a process of its own: where a run has begun before, ours stand in the transforms' place.
    assert pool.run_apart(_run_under_hooks) == ([False, True, False], True)


def test_a_transforms_own_tensor_stands_for_one_that_has_memory() -> None:
    x, found = torch.ones(2, 3), []

    def function(one: torch.Tensor) -> torch.Tensor:
        found.append(unwrapped(one))
        return one.sum()

    torch.vmap(torch.func.grad(function))(x)
    assert found[0].data_ptr() == x.data_ptr() and found[0].shape == x.shape and unwrapped(x) is x


def test_batched_gradients_are_known() -> None:
    seen: list[bool] = []
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: seen.append(is_batched(g)))
    torch.autograd.grad(y, x, torch.eye(3), retain_graph=True, is_grads_batched=True)
    torch.autograd.grad(y, x, torch.ones(3))
    assert seen == [True, False]
