"""Gradients of parameters that several ranks of the pipeline axis hold: summed over exactly these, once a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from itertools import repeat
from operator import itemgetter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_par.fsdp.prefetch import in_use, parts_of_gradients
from lightning_par.fsdp.stored_parameter import Stored
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.host_values import agreed, on_device
from lightning_par.mesh.layout import Groups
from lightning_par.mesh.waits import wait_for
from lightning_par.mesh.world_groups import process_group
from lightning_par.pipeline.between_steps.weights.send_away import Placement
from lightning_par.private.modules import ModuleTree

Holders = tuple[int, ...]


def make_holder_axes(placement: Placement, groups: Groups, timeout: timedelta) -> dict[Holders, Axis]:
    """An axis for each set of holders that this rank is in, by their indices along the pipeline axis.

    All ranks of the world must call it, with the same ``placement``.

    Args:
        placement: who holds what.
        groups: the mesh axes.
        timeout: of the messages.
    """
    pipeline = groups.pipeline
    everyone = tuple(range(pipeline.size))
    axes = {everyone: pipeline} if pipeline.size > 1 else {}
    for holders in sorted(set(placement.holders.values())):
        if 1 < len(holders) < pipeline.size:
            lines = [tuple(line[i] for i in holders) for line in groups.layout.lines(("pipeline",))]
            group = process_group(lines, timeout)
            if pipeline.rank in holders:
                ranks = tuple(pipeline.ranks[i] for i in holders)
                axes[holders] = Axis(pipeline.name, ranks, holders.index(pipeline.rank), group)
    return axes


class TiedGradients:
    """Finishes the gradients of a step.

    Args:
        module: that is spread.
        placement: who holds what; what was registered since belongs to no stage.
        axes: from `make_holder_axes`.
    """

    def __init__(self, module: nn.Module, placement: Placement, axes: Mapping[Holders, Axis]) -> None:
        self._tree, self._placement, self._axes = ModuleTree(module), placement, axes
        self._are_any = any(len(holders) > 1 for holders in placement.holders.values())

    def finish(self, grads: dict[Tensor, Tensor | None]) -> dict[Tensor, Tensor | None]:
        """``grads`` by leaf, those of parameters that several ranks hold summed over these. All ranks must call it."""
        parameters = self._tree.parameters()
        if not self._are_any and not any(map(isinstance, map(itemgetter(1), parameters), repeat(Stored))):
            return grads
        held = {name: p for name, p in parameters if self._placement.knows(name) and in_use(p) in grads}
        like = {name: in_use(p) for name, p in held.items()}
        named = {name: grads[x] for name, x in like.items()}
        summed = sum_over_holders(named, self._placement, self._axes, like)
        stored: dict[Stored, Tensor | None] = {
            p: summed.pop(name) for name, p in held.items() if isinstance(p, Stored) and like[name] is not p.local
        }
        mine = set(map(id, like.values()))  # of a stored weight the part alone is kept, not the whole
        return (
            {x: g for x, g in grads.items() if id(x) not in mine}
            | {like[name]: g for name, g in summed.items()}
            | {p.local: g for p, g in parts_of_gradients(stored).items()}
        )


@torch.no_grad()
def sum_over_holders(
    grads: Mapping[str, Tensor | None], placement: Placement, axes: Mapping[Holders, Axis], like: Mapping[str, Tensor]
) -> dict[str, Tensor | None]:
    """``grads`` with those of parameters that several ranks hold summed over these. All ranks must call it.

    One all-reduce (purpose ``"tied"``) per set of holders and dtype.

    Args:
        grads: by the parameter's first name, this rank's own part of the step's gradient; plain, of the leaf.
        placement: who holds what.
        axes: from `make_holder_axes`.
        like: the leaf of every parameter that this rank holds and that may get a gradient, by first name; of those
            that several ranks hold, the same on these ranks.

    Returns:
        The sums, equal on all holders; None where no holder got a gradient.

    Raises:
        TypeError: a gradient is sparse.
    """
    out = dict(grads)
    # in the same order on all ranks, two of which may share several sets
    messages = [message for holders in sorted(axes) for message in _messages(out, placement, holders, axes, like)]
    for message in messages:
        message.launch()
    for message in messages:
        out.update(message.land())
    return out


def _messages(
    grads: Mapping[str, Tensor | None],
    placement: Placement,
    holders: Holders,
    axes: Mapping[Holders, Axis],
    like: Mapping[str, Tensor],
) -> Iterable[_Message]:
    everyone = max(map(len, axes))
    names = [name for name in like if placement.of(name, everyone) == holders]
    for dtype, device in dict.fromkeys((like[name].dtype, like[name].device) for name in names):
        alike = [name for name in names if (like[name].dtype, like[name].device) == (dtype, device)]
        yield _Message({name: grads.get(name) for name in alike}, {name: like[name] for name in alike}, axes[holders])


class _Message:
    """Gradients of one dtype, and behind them a flag for each that says whether there is one."""

    def __init__(self, grads: dict[str, Tensor | None], like: dict[str, Tensor], axis: Axis) -> None:
        self._grads, self._like, self._axis = grads, like, axis
        self._flat: Tensor
        self._work: dist.Work | None = None

    def launch(self) -> None:
        first = next(iter(self._like.values()))
        there = [grad is not None for grad in self._grads.values()]
        parts = [self._part(name) for name in self._grads]
        self._flat = torch.cat([*parts, on_device(there, first.dtype, first.device)])
        self._work = self._axis.start_all_reduce_(self._flat, "tied")

    def land(self) -> dict[str, Tensor | None]:
        if self._work is not None:
            wait_for(self._work)
        sizes = [x.numel() for x in self._like.values()]
        *parts, flags = self._flat.split([*sizes, len(sizes)])
        # Reading the flags waits for the device, so they are read only where something is missing here.
        there = [grad is not None for grad in self._grads.values()]
        got = there if all(there) else agreed(flags, there, self._axis)
        return {
            name: part.view(x.shape).clone() if flag else None  # a copy: a view would keep the whole message in memory
            for (name, x), part, flag in zip(self._like.items(), parts, got, strict=True)
        }

    def _part(self, name: str) -> Tensor:
        grad, x = self._grads[name], self._like[name]
        if grad is None:
            return torch.zeros(x.numel(), dtype=x.dtype, device=x.device)  # all holders must send equally much
        if grad.is_sparse:
            raise TypeError(f"{name!r} has a sparse gradient; make its layer with sparse=False.")
        return grad.reshape(-1)
