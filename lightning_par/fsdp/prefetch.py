"""Stored weights where they are used: gathered once for a module's call, let go at its end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.fsdp.block_calls import BlockCalls
from lightning_par.fsdp.buckets import gather_all, sum_all
from lightning_par.fsdp.regathered import Again, Regathered, Together
from lightning_par.fsdp.saved import Packed, Viewed, unpacked
from lightning_par.fsdp.stored_parameter import Stored
from lightning_par.mesh.host_values import agreed, on_device
from lightning_par.private.modes import unselected
from lightning_par.private.module_hooks import drop_forward_hooks
from lightning_par.private.modules import parameters_of
from lightning_par.private.storage import memory_of
from lightning_par.private.tensors import write_count
from lightning_par.sharded.rules.gather_report import user_line
from lightning_par.sharded.rules.stored_weights import Gathering
from lightning_par.sharded.tensor import ShardedTensor, full, leaf


@dataclass
class _Kept:
    weight: Stored
    version: int
    memory: int  # of the part that it was gathered from
    used: Tensor

    @classmethod
    def of(cls, weight: Stored, used: Tensor) -> _Kept:
        return cls(weight, write_count(weight._local), weight._local.data_ptr(), used)

    @property
    def is_current(self) -> bool:
        """Whether the weight is as it was; of writes through ``.data`` only `Prefetch.about_to_write` knows."""
        local = self.weight._local
        return (self.version, self.memory) == (write_count(local), local.data_ptr())


Use = tuple[bool, torch.dtype]  # whether for backward, too, and in which precision


class Prefetch(Gathering):
    """What is gathered of the weights of one run.

    Args:
        reshard: whether it is let go after each call of a module, and gathered again for backward.
        cut: whether a step runs forward and backward of several microbatches, in any order.

    Attributes:
        keep: whether weights stay whole until the end of the step.
        blocks: those of the weights that are gathered together, around calls of their modules.
    """

    def __init__(self, reshard: bool, cut: bool = False) -> None:
        super().__init__()
        self.keep = not reshard
        self.blocks = BlockCalls(self.keep, cut)
        self._throughout: set[int] = set()  # ids of weights whose whole has one leaf for all of the step
        self._kept: dict[int, dict[Use, _Kept]] = {}  # by the weight's id
        self._memories: dict[int, Regathered] = {}  # by the memory of what was gathered
        self._together = Together()  # what is gathered now

    def gathered(self, x: ShardedTensor, dtype: torch.dtype | None = None) -> Tensor:
        """The whole weight that is stored in parts, as it is used; all ranks that use it must call it.

        Args:
            dtype: in which the function that uses it would cast it.
        """
        if not isinstance(x, Stored):
            if x.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    "A copy of a weight that data_parallel='fsdp' stores in parts wants a gradient at "
                    f"{user_line()}. Make it of the whole weight: `weight.clone().detach().requires_grad_()`."
                )
            return full(x)  # a gradient, or something else that lies as a weight does
        with unselected():
            found = self.blocks.served(x, dtype) if self.blocks.serving else None
            return self._gathered(x, dtype) if found is None else found

    def _gathered(self, x: Stored, dtype: torch.dtype | None) -> Tensor:
        """As `gathered`, of what no call that runs has."""
        if dtype is None or id(x) in self._throughout:  # it is there in one precision, with one leaf
            dtype = x._local.dtype
        use = torch.is_grad_enabled() and x.requires_grad and not torch.is_inference_mode_enabled(), dtype
        known = self._kept.get(id(x), {}).get(use)
        if known is None or known.weight is not x or not known.is_current:  # an id may be another's by now
            if id(x) in self._throughout:
                _refuse_write()
            if known is not None:
                self.let_go([x])
            again = self._together.noted(x, dtype)
            known = self._keep(x, use, x.gathered(dtype, self._together.gather))
            self._memories[memory_of(leaf(known.used))] = again
        return known.used

    def _keep(self, x: Stored, use: Use, used: Tensor) -> _Kept:
        known = self._kept.setdefault(id(x), {})[use] = _Kept.of(x, used)
        return known

    @torch.no_grad()
    def use_throughout(self, weights: Iterable[Tensor]) -> list[Tensor]:
        """Gather the stored ones of ``weights`` until the step ends; all ranks that use them must call it.

        Returns:
            For each of ``weights`` the leaf whose gradient this step leaves there; see `parts_of_gradients`.
        """
        leaves, weights = [], [*weights]
        wholes = iter(gather_all([x for x in weights if isinstance(x, Stored)]))
        for x in weights:
            if isinstance(x, Stored):
                held = next(wholes).requires_grad_(x.requires_grad)
                self._keep(x, (True, x._local.dtype), x.used(held))
                # for functions under no_grad, which have no graph
                self._keep(x, (False, x._local.dtype), x.used(held.detach()))
                self._throughout.add(id(x))
                leaves.append(held)
            else:
                leaves.append(leaf(x))
        return leaves

    def in_use(self, x: Stored) -> Tensor:
        """The leaf whose gradient the step that runs leaves there: the part, or see `use_throughout`."""
        if id(x) not in self._throughout:
            return leaf(x)  # what may be gathered of it sums its gradient into that
        return leaf(self._kept[id(x)][True, leaf(x).dtype].used)

    def about_to_write(self, targets: Sequence[ShardedTensor], given: Sequence[Any]) -> None:
        """Forget what was gathered of weights that share memory with ``targets``, and note what they are ``given``."""
        if given:
            for x in targets:
                self._note_write(x, given)
        memories = {memory_of(x._local) for x in targets}
        self.blocks.written(memories)
        known = (next(iter(uses.values())).weight for uses in self._kept.values())
        written = {id(x): x for x in known if memory_of(x._local) in memories}
        if not self._throughout.isdisjoint(written):
            _refuse_write()
        self.let_go(written.values())

    def _note_write(self, x: ShardedTensor, given: Sequence[Any]) -> None:
        """Of what shares memory with a weight, as `weight.data` does, the weight is known where it is in a block."""
        weight = x if isinstance(x, Stored) else next(iter(self.blocks.weights_of([x])), None)
        axis: Any = x._axis if weight is None else weight._peers
        if not axis.dry:  # in a dry run there are no values
            axis.order.note_write("a weight" if weight is None else repr(weight._name), user_line(), given)

    def has_written(self, targets: Sequence[ShardedTensor]) -> None:
        self.blocks.has_written(targets)

    def about_to_use(self, used: Sequence[ShardedTensor]) -> None:
        self.blocks.settle(used)

    def has_moved(self, x: ShardedTensor) -> None:
        assert isinstance(x, Stored)
        self.blocks.has_moved(x)

    def begin_optimizer_step(self, weights: Sequence[ShardedTensor]) -> None:
        self.blocks.end_backward()
        stored = [x for x in weights if isinstance(x, Stored)]
        self.blocks.escaped.begin_step(stored)
        for peers in {id(x._peers): x._peers for x in stored}.values():
            if (
                not peers.order.is_empty
            ):  # of weights that are in no block; else it has been told with the blocks' views
                peers.order.ask(peers)

    def end_optimizer_step(self, written: Sequence[ShardedTensor]) -> None:
        self.blocks.escaped.end_step([x for x in written if isinstance(x, Stored)])

    def let_go(self, weights: Iterable[Tensor] | None = None) -> None:
        """Forget what was gathered of ``weights``, or of all."""
        self._together = Together()
        if weights is None:
            self._throughout.clear()
            self._kept.clear()
            self._memories.clear()
            return
        for x in weights:
            for known in self._kept.pop(id(x), {}).values():
                self._memories.pop(memory_of(leaf(known.used)), None)

    def views_of(self, x: ShardedTensor, whole: Tensor) -> None:
        assert isinstance(x, Stored)
        self.blocks.escaped.hand_over(x, whole)

    @contextmanager
    def in_step(self, kind: str, keep: bool) -> Iterator[None]:
        """Around a step, at whose end all is let go at the latest.

        Args:
            keep: whether the graph keeps what backward needs as it is, of weights, too.
        """
        self.blocks.begin_step(kind)
        noted = nullcontext() if keep else torch.autograd.graph.saved_tensors_hooks(self._packed, unpacked)
        try:
            with noted:
                yield
            self.blocks.agree()
        finally:
            self.blocks.end_step()
            self.let_go()

    def _packed(self, x: Tensor) -> Packed | Again:
        """What the graph keeps of ``x``, which backward needs; of a weight how to gather it again."""
        if self._is_any and x.layout == torch.strided:
            memory = memory_of(x)
            for use in self.blocks.live:
                kept = use.memories.get(memory)
                if kept is not None:
                    return use.refers_to(kept, x)
            known = self._memories.get(memory)
            if known is not None:
                return Viewed(x, known.weight, known.version) if self.keep else known.view_like(x)
            weight = self.blocks.escaped.weight_at(memory, x)
            if weight is not None:
                return Viewed(x, weight)
        return x, write_count(x)

    @property
    def _is_any(self) -> bool:
        return bool(self.blocks.live or self._memories) or self.blocks.escaped.may_be_here


def in_use(x: Tensor) -> Tensor:
    """The leaf whose gradient the step that runs leaves there."""
    if isinstance(x, Stored) and isinstance(x._peers.gathering, Prefetch):
        return x._peers.gathering.in_use(x)
    return leaf(x)


@torch.no_grad()
def parts_of_gradients(gradients: Mapping[Stored, Tensor | None]) -> dict[Stored, Tensor | None]:
    """This rank's part of gradients, which each of its peers has one of, averaged over replicas.

    None where no peer has one. All peers must call it with the same weights.
    """
    if not gradients:
        return {}
    peers = next(iter(gradients))._peers
    device = next(iter(gradients))._local.device
    mine = [g is not None for g in gradients.values()]
    flags = peers.all_reduce_(on_device(mine, torch.uint8, device), "gradient flags", "max")
    # Reading the flags waits for the device, so they are read only where something is missing here.
    there = [x for x, flag in zip(gradients, mine if all(mine) else agreed(flags, mine, peers), strict=True) if flag]
    # all peers take part in the sum
    given = [(x, x.held_like() if (g := gradients[x]) is None else g) for x in there]
    found: dict[Stored, Tensor | None] = dict.fromkeys(gradients)
    return found | dict(zip(there, sum_all(given), strict=True))


def _refuse_write() -> None:
    raise RuntimeError(
        f"A weight is written to at {user_line()}, within a step whose microbatches share what data_parallel='fsdp' "
        "has gathered. Do it in on_train_batch_end, or write data_parallel='ddp'."
    )


class _LetGo:
    """The hook by which a module lets go of its own weights after each call."""

    def __init__(self, prefetch: Prefetch) -> None:
        self._prefetch = prefetch

    def __call__(self, m: nn.Module, args: Any, output: Any) -> None:
        self._prefetch.let_go(parameters_of(m).values())  # type: ignore[arg-type]


def let_go_after_calls(module: nn.Module, prefetch: Prefetch) -> None:
    """Have every module in ``module`` let go of its own weights after each call. What lies within a block has no hook
    for that, which compiled code would go by: the block lets go of all."""
    inside = {id(m) for block in prefetch.blocks.blocks for part in block.modules for m in part.modules()}
    for m in module.modules():
        if id(m) not in inside and any(isinstance(p, Stored) for p in parameters_of(m).values()):
            m.register_forward_hook(_LetGo(prefetch), always_call=True)  # also where forward raises


def keep_after_calls(module: nn.Module) -> None:
    """Undo `let_go_after_calls`, be it of an earlier run that failed."""
    for m in module.modules():
        drop_forward_hooks(m, _LetGo)
