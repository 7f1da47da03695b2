"""From weights that every replica stores to parts, and back."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.fsdp.block_call import release_blocks
from lightning_par.fsdp.blocks import Block, plan_blocks, plan_units
from lightning_par.fsdp.kept_whole import kept_whole, told
from lightning_par.fsdp.prefetch import Prefetch, keep_after_calls, let_go_after_calls
from lightning_par.fsdp.stored_block import StoredBlock, entries_in_message, fits
from lightning_par.fsdp.stored_parameter import StorageAxis, Stored, dim_of
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.host_values import agreed
from lightning_par.mesh.layout import Groups
from lightning_par.optim.gradient_sync import runs_too_early
from lightning_par.private.leaf_hooks import hooks_of
from lightning_par.private.module_calls import is_within_call
from lightning_par.sharded import aliases
from lightning_par.sharded.identity import become, swappable
from lightning_par.sharded.patches import NODES, SHARDED, SHARES, STORED, Patches
from lightning_par.sharded.rules.stored_weights import gathering_of
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import leaf
from lightning_par.strategies.part import Part
from lightning_par.strategies.startup_table import bytes_text
from lightning_par.tensor.kept_tensors import make_held_whole
from lightning_par.trial.first_step import FirstStep


class StoragePart(Part):
    """The weights of one module in one run of a Trainer's entry point, stored in parts.

    Args:
        groups: the mesh axes.
        reshard: whether what is gathered for forward is let go, and gathered again for backward. Otherwise it stays:
            in a pipeline until the end of the step, for all of its microbatches; else as long as backward needs it.
    """

    def __init__(self, groups: Groups, reshard: bool) -> None:
        copies = groups.data.size
        self.prefetch = Prefetch(reshard, groups.pipeline.size > 1)
        self.peers = StorageAxis(groups.gradients, copies, self.prefetch)
        self.all = StorageAxis(groups.stage, copies, self.prefetch)
        self.groups = groups
        self.reshard = reshard
        self.whole: dict[str, str] = {}  # weights that stay whole, and why

    @property
    def throughout(self) -> bool:
        """Whether weights are gathered once for all microbatches of a step."""
        return not self.reshard and self.groups.pipeline.size > 1

    def axes(self) -> list[Axis]:
        return [self.peers, self.all]

    def patches(self) -> tuple[Patches, ...]:
        return SHARDED, STORED, SHARES, NODES

    def apply(self, first: FirstStep) -> None:
        """Keep this rank's part of every parameter that it holds, if it is long enough. No communication.

        All ranks hold the same weights by now, whole or split over the tensor axis, those of their stages.
        """
        module = first.module
        if first.trains:
            _refuse_early_hooks(module)
        self.whole = kept_whole(module, first.trainer.callbacks, first.trains)
        with swappable(module.modules()):
            for name, parameter in module.named_parameters():
                if name in self.whole or is_elsewhere(parameter):
                    continue
                if dim_of(parameter, self.peers.size) is not None:
                    stored = Stored.of(parameter, self.all, self.peers)
                    stored._name = name
                    become(parameter, stored, name)
        if not self.throughout:
            self._take_blocks(module)
        if self.reshard:
            let_go_after_calls(module, self.prefetch)
        names = RunState.current.names
        if names.on:
            names.name_weights(module)
        if first.world.rank == 0:
            print(self.line(module), flush=True)

    def _take_blocks(self, module: nn.Module) -> None:
        """Gather weights by blocks where they can be."""
        stored: dict[str, Any] = {name: p for name, p in module.named_parameters() if fits(p)}
        hidden = {id(p) for m in module.modules() if isinstance(m, nn.RNNBase) for p in m.parameters(recurse=False)}
        sizes = {name: entries_in_message(p) for name, p in stored.items() if id(p) not in hidden}
        for block in self._plan(module, sizes):
            kinds: dict[Any, list[Any]] = {}
            for name in block.weights:
                p = stored[name]
                kinds.setdefault((p.dtype, p.device), []).append(p)
            most = max(kinds.values(), key=len)
            modules = [*map(module.get_submodule, block.paths)]
            self.prefetch.blocks.take_over(StoredBlock(modules, most))

    def _plan(self, module: nn.Module, sizes: dict[str, int]) -> tuple[Block, ...]:
        if self.groups.pipeline.size == 1:
            return plan_blocks(module, sizes)
        return plan_units(module, [path for path, m in module.named_modules() if is_within_call(m)], sizes)

    def step(self, kind: str) -> AbstractContextManager[Any]:
        if kind not in ("training_step", "evaluation"):
            return nullcontext()
        # an evaluation has no backward, and within a step of microbatches no weight is written to
        return self.prefetch.in_step(kind, keep=kind == "evaluation" or self.throughout)

    def after_backward(self) -> None:
        """Called on all ranks after a backward, which has no more use for what was gathered."""
        self.prefetch.blocks.end_backward()
        self.prefetch.let_go()

    def undo(self, module: nn.Module, callbacks: Iterable[Any]) -> None:
        try:
            if not self.peers.dry:
                self.peers.order.ask(self.peers)  # what was written since the last step of an optimizer
        finally:
            unstore(module)
            # else `TensorPart.undo` makes the module itself whole, once a pipeline has brought all of it back
            make_held_whole([module, *callbacks], () if self.groups.tensor.size == 1 else module.parameters())

    def agree(self, microbatches: int) -> bool:
        """Ranks that store parts of the same weights gather them together. All of them must call it in each step of a
        pipeline.

        Args:
            microbatches: into how many this rank's batch is cut; 0 if its step has no schedule.

        Returns:
            Whether the steps of all have one.

        Raises:
            RuntimeError: each microbatch gathers weights, and not all have as many.
        """
        counts = [microbatches, -microbatches]  # the most and the fewest in one message
        reduced = self.peers.all_reduce_(torch.tensor(counts), "microbatches", "max")
        most, fewest = agreed(reduced, counts, self.peers)
        if fewest and most != -fewest and not self.throughout:
            raise RuntimeError(
                f"Of the ranks that store parts of the same weights one cuts its batch into {-fewest} microbatches, "
                f"another into {most}; with reshard_after_forward=True each microbatch gathers weights from all of "
                "them. Give the replicas batches of equal size, or leave reshard_after_forward out."
            )
        return bool(fewest)

    def line(self, module: nn.Module) -> str:
        """What the start-up table says of it."""
        size, used = 0, 0
        for p in module.parameters():
            if not is_elsewhere(p):
                held = leaf(p)
                size += held.numel() * held.element_size()
                used += (p.shape.numel() if isinstance(p, Stored) else held.numel()) * held.element_size()
        stored = (
            f"Stored in parts over {self.peers.size} ranks (fsdp): {bytes_text(size)} of weights a rank, of "
            f"{bytes_text(used)}; gathered {self._where(module)}."
        )
        return " ".join(filter(None, (told(self.whole), stored)))

    def _where(self, module: nn.Module) -> str:
        blocks = self.prefetch.blocks.blocks
        if not blocks:
            return "where they are used"
        others = sum(isinstance(p, Stored) for p in module.parameters()) - sum(len(x.weights) for x in blocks)
        return f"by {len(blocks)} blocks" + f", {others} of them where they are used" * (others > 0)


def unstore(module: nn.Module) -> None:
    """Give every rank what it held of ``module`` before it was stored in parts. All ranks must call it."""
    release_blocks(module)
    keep_after_calls(module)
    with swappable(module.modules()):
        for name, parameter in module.named_parameters():
            if isinstance(parameter, Stored):
                gathering_of(parameter).about_to_use([parameter])
                gathering_of(parameter).let_go()
                if aliases.is_any():
                    aliases.look([parameter._innermost])
                whole = parameter.unstored()
                gathering_of(parameter).views_of(parameter, leaf(whole))
                become(parameter, whole, name)


def _refuse_early_hooks(module: nn.Module) -> None:
    """Before a step has begun; see `lightning_par.optim.gradient_sync`."""
    for name, parameter in module.named_parameters():
        if not is_elsewhere(parameter) and hooks_of(leaf(parameter))[1]:
            raise runs_too_early(name)
