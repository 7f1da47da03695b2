"""What each collective comes to where a copy of the model is one process.

All of them go by what every copy has of a tensor, in the copies' order. Ranks that share a copy have the same tensors,
or parts of the same, so that each group of them comes to the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.sharded.rules.lookup import user_line
from lightning_par.sharded.run_state import RunState


@dataclass(frozen=True)
class Copies:
    """The copies of the model, as processes.

    Attributes:
        rank: of this one.
        size: how many there are.
        group: one rank of each; None where there is one copy.
    """

    rank: int
    size: int
    group: Any

    def of_all(self, x: Tensor) -> Tensor:
        """``x``, alike in shape on all copies, of each of them, along a new first dim."""
        return x.detach()[None] if self.size == 1 else RunState.current.of_copies(x.detach())

    def one(self, among: int | None, within: int | None) -> int:
        """Which copy is asked for, by its number ``among`` all processes or ``within`` a group.

        Raises:
            ValueError: there is no such one.
        """
        found = int(among if among is not None else within or 0)
        if not 0 <= found < self.size:
            have = "one copy" if self.size == 1 else f"{self.size} copies"
            raise ValueError(
                f"{user_line()}: a collective names rank {found}. In a step the ranks that share a copy of the model "
                f"are one process, and there is {have} of it: take numbers from `torch.distributed.get_rank()` and "
                "`get_world_size()` in the step."
            )
        return found


Collective = Callable[..., None]


def _no_grad(collective: Collective) -> Collective:
    @functools.wraps(collective)
    def without(*args: Any, **kwargs: Any) -> None:
        with torch.no_grad():  # to which they are no functions
            collective(*args, **kwargs)

    return without


def _all_reduce(copies: Copies, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
    if copies.size > 1:
        tensor.copy_(_reduced(copies.of_all(tensor), op))


def _reduce(copies: Copies, tensor: Tensor, dst: int | None = None, op: Any = dist.ReduceOp.SUM,
            group_dst: int | None = None) -> None:  # fmt: skip
    at = copies.one(dst, group_dst)
    found = copies.of_all(tensor)
    if copies.size > 1 and copies.rank == at:
        tensor.copy_(_reduced(found, op))


def _broadcast(copies: Copies, tensor: Tensor, src: int | None = None, group_src: int | None = None) -> None:
    at = copies.one(src, group_src)
    if copies.size > 1:
        tensor.copy_(copies.of_all(tensor)[at])


def _all_gather(copies: Copies, tensor_list: list[Tensor], tensor: Tensor) -> None:
    _fill(copies, tensor_list, tensor, copies.of_all(tensor))


def _gather(copies: Copies, tensor: Tensor, gather_list: list[Tensor] | None = None, dst: int | None = None,
            group_dst: int | None = None) -> None:  # fmt: skip
    at, found = copies.one(dst, group_dst), copies.of_all(tensor)
    if copies.rank == at and gather_list is not None:
        _fill(copies, gather_list, tensor, found)


def _all_gather_into_tensor(copies: Copies, output_tensor: Tensor, input_tensor: Tensor) -> None:
    output_tensor.copy_(copies.of_all(input_tensor).reshape(output_tensor.shape))


def _reduce_scatter_tensor(copies: Copies, output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
    whole = _reduced(copies.of_all(input), op)
    output.copy_(whole.reshape(copies.size, *output.shape)[copies.rank])


def _reduce_scatter(copies: Copies, output: Tensor, input_list: list[Tensor], op: Any = dist.ReduceOp.SUM) -> None:
    _count(copies, input_list)
    output.copy_(_reduced(copies.of_all(_stacked(input_list)), op)[copies.rank])


def _scatter(copies: Copies, tensor: Tensor, scatter_list: list[Tensor] | None = None, src: int | None = None,
             group_src: int | None = None) -> None:  # fmt: skip
    at = copies.one(src, group_src)
    given = [tensor] * copies.size if scatter_list is None or copies.rank != at else scatter_list
    _count(copies, given)
    tensor.copy_(copies.of_all(_stacked(given))[at][copies.rank])


def _all_to_all(copies: Copies, output_tensor_list: list[Tensor], input_tensor_list: list[Tensor]) -> None:
    _count(copies, input_tensor_list)
    _fill(copies, output_tensor_list, input_tensor_list[0], copies.of_all(_stacked(input_tensor_list))[:, copies.rank])


def _all_to_all_single(copies: Copies, output: Tensor, input: Tensor, output_split_sizes: Sequence[int] | None = None,
                       input_split_sizes: Sequence[int] | None = None) -> None:  # fmt: skip
    sizes = {*(output_split_sizes or ()), *(input_split_sizes or ())}
    if len(sizes) > 1 or len(input) % copies.size:
        raise ValueError(f"{user_line()}: all_to_all_single in a step takes equal parts alone, got sizes {sizes}.")
    parts = copies.of_all(input).reshape(copies.size, copies.size, -1, *input.shape[1:])
    output.copy_(parts[:, copies.rank].reshape(output.shape))


_TENSORS: dict[str, Collective] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "reduce_scatter": _reduce_scatter,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
}
BY_NAME = {name: _no_grad(collective) for name, collective in _TENSORS.items()}
"""Those of tensors, by their names in `torch.distributed`, with its arguments but for the group."""


def _reduced(found: Tensor, op: Any) -> Tensor:
    """``found`` [copies, ...] reduced over its first dim."""
    for one, reduce in _REDUCED:
        if op == one:
            return reduce(found)
    raise ValueError(f"{user_line()}: a collective in a step that ranks share can't reduce by {op}.")


def _of_bits(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda found: functools.reduce(function, found.unbind())


_REDUCED: list[tuple[Any, Callable[[Tensor], Tensor]]] = [
    (dist.ReduceOp.SUM, lambda found: found.sum(0)),
    (dist.ReduceOp.AVG, lambda found: found.sum(0) / len(found)),
    (dist.ReduceOp.PRODUCT, lambda found: found.prod(0)),
    (dist.ReduceOp.MIN, lambda found: found.amin(0)),
    (dist.ReduceOp.MAX, lambda found: found.amax(0)),
    (dist.ReduceOp.BAND, _of_bits(torch.bitwise_and)),
    (dist.ReduceOp.BOR, _of_bits(torch.bitwise_or)),
    (dist.ReduceOp.BXOR, _of_bits(torch.bitwise_xor)),
]


def _stacked(parts: list[Tensor]) -> Tensor:
    """
    Raises:
        ValueError: they are not alike in shape, which copies can't know of one another.
    """
    if any(x.shape != parts[0].shape for x in parts):
        raise ValueError(f"{user_line()}: a collective in a step that ranks share takes tensors of one shape alone.")
    return torch.stack([x.detach() for x in parts])


def _fill(copies: Copies, entries: list[Tensor], given: Tensor, found: Tensor) -> None:
    _count(copies, entries)
    if any(x.numel() != given.numel() for x in entries):
        raise ValueError(
            f"{user_line()}: a collective in a step that ranks share gathers tensors of one shape alone, and the list "
            f"for them has shapes {[tuple(x.shape) for x in entries]}. Pad them."
        )
    for entry, x in zip(entries, found.unbind(), strict=True):
        entry.copy_(x.reshape(entry.shape))


def _count(copies: Copies, entries: Sequence[Any]) -> None:
    if len(entries) != copies.size:
        raise ValueError(
            f"{user_line()}: a collective is given a list of {len(entries)} tensors, for {copies.size} in a step: "
            "there the ranks that share a copy of the model are one process. Take the number from "
            "`torch.distributed.get_world_size()` in the step, or from `self.trainer.world_size`."
        )


# ----------------------------------------------------------------------------------------------------------- objects


def _keep(*args: Any, **kwargs: Any) -> None:
    """What one process sends to itself stays as it is."""


def _own_to_list(object_list: list[Any], obj: Any) -> None:
    object_list[0] = obj


def _own_to_gather_list(obj: Any, object_gather_list: list[Any] | None = None, **_: Any) -> None:
    if object_gather_list is not None:
        object_gather_list[0] = obj


def _own_of_scatter_list(
    scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None, **_: Any
) -> None:
    if scatter_object_input_list is not None:
        scatter_object_output_list[0] = scatter_object_input_list[0]


OF_ONE: dict[str, Collective] = {
    "broadcast_object_list": _keep,
    "barrier": _keep,
    "monitored_barrier": _keep,
    "all_gather_object": _own_to_list,
    "gather_object": _own_to_gather_list,
    "scatter_object_list": _own_of_scatter_list,
}
"""Those of Python's objects, and of nothing: what becomes of them with one copy."""


def of_objects(name: str, copies: Copies, plain: Callable[..., None], given: dict[str, Any]) -> None:
    """The one of `OF_ONE` of this ``name``, called with the arguments ``given`` but for the group.

    Raises:
        NotImplementedError: a pipeline's step, which runs on several ranks of a copy and not equally often, sends
            objects to others.
    """
    if copies.size == 1:
        OF_ONE[name](**given)
    elif RunState.current.sends_objects:
        for end in [one for one in ("src", "dst") if one in inspect.signature(plain).parameters]:  # 0, if none is named
            given[f"group_{end}"] = copies.one(given.pop(end, None), given.pop(f"group_{end}", None))
        plain(**given, group=copies.group)
    elif not name.endswith("barrier"):
        raise NotImplementedError(
            f"{user_line()}: `torch.distributed.{name}` in a step of a pipeline with {copies.size} copies of the "
            "model. Send tensors, as by `self.all_gather`, or call it in a hook."
        )
