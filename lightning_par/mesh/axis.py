"""One mesh axis as one rank sees it; what is sent along it goes by `lightning_par.mesh.verbs`."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.mesh.collectives import enter
from lightning_par.mesh.listener import heard
from lightning_par.mesh.verbs import Verbs
from lightning_par.mesh.wire import Wire
from lightning_par.private.tensors import write_count
from lightning_par.trial.memo import Memo


class Axis(Verbs):
    """One mesh axis as this rank sees it: the verbs along it, and what tensors that are sharded over it go by.

    Args:
        name: the axis' name in the mesh, e.g. ``"tensor"``.
        ranks: the global ranks along the axis through this rank, in order.
        rank: this process' index in ``ranks``.
        group: the process group of ``ranks``; ``None`` only where the axis has size 1.

    Example::

        axis = Axis("tensor", ranks=(0,), rank=0, group=None)
        assert axis.size == 1
    """

    by_sample = False
    """Whether its parts are samples that run one after another, so that a sum over it is a share of the whole."""
    depth = 3
    """Of a tensor sharded over two axes, the one of smaller depth is the outer one."""
    pretends = False
    """Whether nothing moves along it, since tensors are fake."""
    tells_gathers = True
    """Whether the user is told of functions that gather along it."""
    stores = False
    """Whether its ranks store parts of weights that each of them uses whole."""
    gradient_shares = False
    """Whether each rank has a share of a replicated tensor's gradient, they sum to the whole; else each has all."""

    hides_entries = True
    """Whether backward may compute weights' gradients while that of what entered is summed over the axis."""

    def __init__(self, name: str, ranks: tuple[int, ...], rank: int, group: dist.ProcessGroup | None) -> None:
        super().__init__(name, ranks, rank, group)
        self.residual: Any = None
        """Where tokens are sharded between islands along a tensor axis; see `lightning_par.tensor.residual_stream`."""
        self.mix: Any = None
        """With which others a tensor may be sharded over it; see `lightning_par.sharded.rules.several_axes`."""
        self.rings = 0
        """Calls of ring attention along it so far, alike on all ranks, whose messages have tags by them."""
        self.calls: Memo[Any, Any] = Memo()
        """Of functions of tensors that are sharded over it; see `lightning_par.sharded.local_calls.repeated_calls`."""
        self.forms: Memo[Any, Any] = Memo()
        """Of tensors that are sharded over it; see `lightning_par.sharded.local_calls.form`."""
        self._entries: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> Axis:
        """The same: ranks and their groups are not copied with a trainer, strategy or callback that leads to them."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """A trainer that is saved as a whole has no groups: each run makes its own."""
        none = dict.fromkeys(("group", "guard", "mix"))
        wire = Wire(self.ranks, None)
        return {**vars(self), **none, "calls": Memo(), "forms": Memo(), "_entries": {}, "_wire": wire}

    @heard
    def entered(self, x: Tensor) -> Tensor:
        """`enter` ``x``, once for all that read the same tensor: their gradients then share one all-reduce."""
        if self.size == 1 or self.gradient_shares or not (x.requires_grad and torch.is_grad_enabled()):
            return x
        key = id(x)
        known = self._entries.get(key)
        if known is not None:
            reference, version, entry = known
            # An optimizer or `x.data = ...` may have changed x since.
            if reference() is x and version == write_count(x) and entry.data_ptr() == x.data_ptr():
                return entry
        entry = enter(x, self)
        self._entries[key] = (weakref.ref(x, lambda _: self._entries.pop(key, None)), write_count(x), entry)
        return entry

    def end_step(self) -> None:
        """A step has ended. The graph of what entered holds a leaf, as the input of a gradient penalty is, for ever."""
        self._entries.clear()

    def spread(self, size: int) -> Any:
        """`Positions` for ``size`` indices that the batch or a gathered result has; None to leave them whole."""
        return None

    def about_to_gather(self, func: Any, x: Tensor) -> None:
        """Called before a function without a rule gathers ``x``. The planner's axis objects."""

    def about_to_cut(self, x: Tensor) -> None:
        """Called before the replicated ``x`` is cut to this rank's part."""

    def no_shares(self, name: str) -> None:
        """Called where ``name`` goes on with a sum over the axis in a way that shares of the sum can't."""

    def __repr__(self) -> str:
        return f"Axis({self.name!r}, size={self.size}, rank={self.rank})"
