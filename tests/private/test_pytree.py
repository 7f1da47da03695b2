"""Nested containers of tensors."""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any, NamedTuple

import torch

from lightning_par.private.pytree import (
    APPLIERS,
    SUPPORTED_NODES,
    leaves_given,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)


class Pair(NamedTuple):
    first: object
    second: object


def test_containers_are_walked_and_made_again() -> None:
    nested = {"a": [1, (2, None)], "b": OrderedDict(c=Pair(3, [4]))}
    assert tree_leaves(nested) == [1, 2, None, 3, 4]
    leaves, structure = tree_flatten(nested)
    again = tree_unflatten(leaves, structure)
    assert again == nested and type(again["b"]["c"]) is Pair
    assert tree_map(lambda x: [x], (1, [2])) == ([1], [[2]])


def test_the_kinds_of_containers_are_known() -> None:
    assert {list, tuple, dict, OrderedDict} <= SUPPORTED_NODES.keys()
    flatten, unflatten = SUPPORTED_NODES[dict].flatten_fn, SUPPORTED_NODES[dict].unflatten_fn
    assert unflatten(*flatten({"a": 1})) == {"a": 1}


def test_what_a_function_is_given_is_walked_likewise() -> None:
    for args, kwargs in (
        ((1, "a", None), {"b": 2.0}), ((1, [2, (3,)]), {}), ((Pair(1, 2),), {"c": 3}),
        ((), {"a": {"b": [4]}}), ((), {}),
    ):  # fmt: skip
        assert leaves_given(args, kwargs) == tree_leaves((args, kwargs))


def test_the_callers_of_given_functions_are_known() -> None:
    callers: list[Any] = []
    note = lambda *_: callers.append(sys._getframe(1).f_globals["__name__"])  # noqa: E731
    tree_map(note, [1])
    torch.no_grad()(note)()
    assert {*callers} == {*APPLIERS}
