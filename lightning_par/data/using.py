"""Stored weights where they are used: gathered once for a module's call, let go at its end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par import comm
from lightning_par.data.stored import PURPOSE, Stored
from lightning_par.rules.report import user_line
from lightning_par.view import ShardedTensor, full, leaf


@dataclass
class _Kept:
    weight: Stored
    version: int
    used: Tensor


_kept: dict[tuple[int, bool], _Kept] = {}  # by the weight's id, and whether it was gathered for backward
_memories: dict[int, tuple[Stored, int]] = {}  # those of gathered weights: whose, at which version


def gathered(x: ShardedTensor) -> Tensor:
    """The whole weight that is stored in parts, as it is used; all ranks that use it must call it."""
    if not isinstance(x, Stored):
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"A copy of a weight that data_parallel='fsdp' stores in parts wants a gradient at {user_line()}. Make "
                "it of the whole weight: `weight.clone().detach().requires_grad_()`."
            )
        return full(x)  # a gradient, or something else that lies as a weight does
    key = id(x), torch.is_grad_enabled() and x.requires_grad and not torch.is_inference_mode_enabled()
    known = _kept.get(key)
    if known is None or known.weight is not x or known.version != x._local._version:
        used = x.gathered()
        known = _kept[key] = _Kept(x, x._local._version, used)
        _memories[leaf(used).untyped_storage()._cdata] = x, x._local._version
    return known.used


@torch.no_grad()
def use_throughout(weights: Iterable[Tensor]) -> list[Tensor]:
    """Gather the stored ones of ``weights`` until the step ends; all ranks that use them must call it.

    Returns:
        For each of ``weights`` the leaf whose gradient this step leaves there; see `part_of_gradient`.
    """
    leaves = []
    for x in weights:
        if isinstance(x, Stored):
            held = leaf(x.gathered()).detach().requires_grad_(x.requires_grad)
            used = x.used(held)
            _kept[id(x), True] = _Kept(x, x._local._version, used)
            with_no_graph = x.used(held.detach())
            _kept[id(x), False] = _Kept(x, x._local._version, with_no_graph)
            leaves.append(held)
        else:
            leaves.append(leaf(x))
    return leaves


def in_use(x: Tensor) -> Tensor:
    """The leaf whose gradient the step that runs leaves there: see `use_throughout`."""
    known = _kept.get((id(x), True))
    return leaf(x) if known is None else leaf(known.used)


@torch.no_grad()
def parts_of_gradients(gradients: Mapping[Stored, Tensor | None]) -> dict[Stored, Tensor | None]:
    """This rank's part of gradients, which each of its peers has one of, averaged over replicas.

    None where no peer has one. All peers must call it with the same weights.
    """
    if not gradients:
        return {}
    peers = next(iter(gradients))._peers
    device = next(iter(gradients))._local.device
    flags = torch.tensor([g is not None for g in gradients.values()], dtype=torch.uint8, device=device)
    peers.all_reduce_(flags, "gradient flags", "max")
    found: dict[Stored, Tensor | None] = {}
    for (x, gradient), there in zip(gradients.items(), flags.tolist(), strict=True):
        if there:
            whole = x.held_like() if gradient is None else gradient
            found[x] = comm.sum_scatter(whole, x._dim, x._inner, peers, PURPOSE) / peers.copies
        else:
            found[x] = None
    return found


def let_go(weights: Iterable[Tensor] | None = None) -> None:
    """Forget what was gathered of ``weights``, or of all."""
    if weights is None:
        _kept.clear()
        _memories.clear()
        return
    for x in weights:
        for key in ((id(x), True), (id(x), False)):
            known = _kept.pop(key, None)
            if known is not None:
                _memories.pop(leaf(known.used).untyped_storage()._cdata, None)


@dataclass(frozen=True)
class _Again:
    """A gathered weight that backward needs, or a view of it, to be gathered again."""

    weight: Stored
    version: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def get(self) -> Tensor:
        x = self.weight
        if x._local._version != self.version:
            raise RuntimeError("A weight was written to in place between the step and its backward, which needs it.")
        held = comm.gather(x._local.detach(), x._dim, x._inner, x._peers, PURPOSE)
        return held.as_strided(self.size, self.stride, self.offset)


def _packed(x: Tensor) -> Tensor | _Again:
    weight, version = _memories.get(x.untyped_storage()._cdata, (None, 0))
    if weight is None:
        return x
    return _Again(weight, version, tuple(x.shape), x.stride(), int(x.storage_offset()))


def _unpacked(x: Tensor | _Again) -> Tensor:
    return x.get() if isinstance(x, _Again) else x


@contextmanager
def in_step(keep: bool) -> Iterator[None]:
    """Around a step. What is gathered is let go at its end at the latest; unless ``keep``, backward gathers again."""
    try:
        if keep:
            yield
        else:
            with torch.autograd.graph.saved_tensors_hooks(_packed, _unpacked):
                yield
    finally:
        let_go()


def let_go_after_calls(module: nn.Module) -> list[Any]:
    """Have every module in ``module`` let go of its own weights after each call; returns handles to undo that."""

    def after(m: nn.Module, args: Any, output: Any) -> None:
        let_go(m._parameters.values())  # type: ignore[arg-type]

    owners = [m for m in module.modules() if any(isinstance(p, Stored) for p in m._parameters.values())]
    return [m.register_forward_hook(after, always_call=True) for m in owners]
