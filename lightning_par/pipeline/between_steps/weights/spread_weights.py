"""The weights and buffers that some ranks of a pipeline alone hold, and what user code makes of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_par.mesh.axis import Axis
from lightning_par.pipeline.between_steps.weights.remote_weight import Weight, WeightView, plain
from lightning_par.pipeline.between_steps.weights.send_away import Placement
from lightning_par.pipeline.between_steps.weights.weight_classes import WeightClasses
from lightning_par.private.modules import buffers_of
from lightning_par.sharded.rules.alias import Alias
from lightning_par.sharded.tensor import ShardedTensor
from lightning_par.sharded.user_classes import set_class


class SpreadWeights:
    """Shows user code such tensors, and knows their views and copies by the names of what they were made of.

    Args:
        owner: a `lightning_par.pipeline.between_steps.remote_reads.JointGradients`, which they ask.
        module: spread by `lightning_par.pipeline.between_steps.weights.send_away.send_away`.
        placement: who holds what.
        axis: the pipeline axis.
    """

    def __init__(self, owner: Any, module: nn.Module, placement: Placement, axis: Axis) -> None:
        self._owner = owner
        self.parameters = _spread(module.named_parameters(), placement, axis)
        # Steps may exchange buffers: they are found anew.
        self._buffers = {name: _place_of(module, name) for name in _spread(module.named_buffers(), placement, axis)}
        self._classes = WeightClasses(owner, [*self.parameters.values()])
        self.recast = self._classes.recast
        self._names = {id(p): name for name, p in self.parameters.items()}
        self._views: dict[int, weakref.ref[Tensor]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parameters and buffers."""
        return (*self.parameters, *self._buffers)

    def name_of(self, x: Any) -> str:
        """The name of the spread parameter that ``x`` is, or is a view of."""
        return vars(x).get("_of") or self._names[id(x)]

    def spread_name(self, x: Any) -> str | None:
        """The name of the spread parameter that ``x`` is; None where it is none."""
        return self._names.get(id(x))

    def buffer_name(self, x: Any) -> str | None:
        """The name of the spread buffer that ``x`` is; None where it is none."""
        return next((name for name, own in self._buffers_now() if own is x), None)

    def is_weight(self, x: Any) -> bool:
        """Whether ``x`` is a spread weight, or a view or a copy of one: this rank's whole, its part, or what stands
        for it."""
        if isinstance(x, ShardedTensor | Alias):
            return vars(x).get("_lender") is self._owner or "_of" in vars(x)
        return isinstance(x, Weight)

    def is_itself(self, x: Tensor) -> bool:
        """Whether ``x``, which this rank has whole, has the very entries of a parameter or buffer."""
        name = self.name_of(x)
        buffers, own = self._buffers.get(name, ({}, ""))
        weight: Any = self.parameters.get(name, buffers.get(own))
        return weight is not None and bool(plain(x).is_set_to(plain(weight)))

    def show_all(self) -> None:
        """Let user code see what is spread."""
        self._classes.show()
        for name, x in self._buffers_now():
            self.show(x, name)

    def hide_all(self) -> None:
        """Let parameters and buffers be what they were."""
        self._classes.hide()
        for _, x in self._buffers_now():
            _be_plain(x)

    def forget_views(self) -> None:
        """Let views and copies be what they were."""
        for view in [view for ref in [*self._views.values()] if (view := ref()) is not None]:
            _be_plain(view)
        self._views.clear()  # what is referred to weakly can't become whole

    def _buffers_now(self) -> Iterator[tuple[str, Tensor]]:
        for name, (buffers, own) in self._buffers.items():
            x = buffers.get(own)
            if x is not None and not isinstance(x, ShardedTensor):
                yield name, x

    def show(self, x: Any, of: str, copied: object | None = None) -> Any:
        """Let user code see ``x``, on the ranks of the parameter or buffer ``of``, as it sees that one; ``x`` again.

        Args:
            x: a buffer, a view or a copy.
            of: the parameter's or buffer's name.
            copied: what is the same for copies that share memory.
        """
        if self.is_weight(x) or id(x) in self._names:
            return x
        x._of, x._copied = of, copied
        if isinstance(x, ShardedTensor | Alias):  # of which other code asks for the very class
            return x
        key = id(x)
        set_class(x, self._classes.class_of(WeightView, type(x)))
        self._views[key] = weakref.ref(x, lambda _: self._views.pop(key, None))
        return x


def _spread(tensors: Iterable[tuple[str, Tensor]], placement: Placement, axis: Axis) -> dict[str, Tensor]:
    return {name: x for name, x in tensors if len(placement.of(name, axis.size)) < axis.size}


def _place_of(module: nn.Module, name: str) -> tuple[dict[str, Tensor | None], str]:
    path, _, own = name.rpartition(".")
    return buffers_of(module.get_submodule(path)), own


def _be_plain(x: Tensor) -> None:
    if isinstance(x, WeightView):
        set_class(x, x._plain)
        del x._of, x._copied
        vars(x).pop("_links", None)
        vars(x).pop("_way", None)
