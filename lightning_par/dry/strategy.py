"""The strategy of a dry run: the user's own, in a world where no other rank is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn

from lightning_par.checkpoint.chunks import Chunk
from lightning_par.checkpoint.directory import Writing
from lightning_par.checkpoint.file_cost import FileCost, file_cost
from lightning_par.checkpoint.inventory import Inventory
from lightning_par.checkpoint.outline import take_apart
from lightning_par.dry.any_values import tensor_of
from lightning_par.dry.buffers import untouched_buffers
from lightning_par.dry.other_stages import DryInventory, OtherStages, UnknownStateError
from lightning_par.dry.values import KnownValues
from lightning_par.dry.weights import give_fakes
from lightning_par.fsdp.part import StoragePart
from lightning_par.pipeline.between_steps.remote_reads import JointGradients
from lightning_par.pipeline.part import StagesPart
from lightning_par.pipeline.trial.expected_gradients import expected_gradients
from lightning_par.planner.memory.live_bytes import LiveBytes
from lightning_par.private.fake_groups import begin_fake_world
from lightning_par.private.fake_tensors import FakeTensorMode, unset_fake_temporarily
from lightning_par.python_state.nested_tensors import map_tensors
from lightning_par.sharded.overlapping_parameters import overlapping
from lightning_par.sharded.run_state import RunState
from lightning_par.trial.first_step import FirstStep

if TYPE_CHECKING:
    from lightning_par.strategies.base import StrategyMixin as _Base
else:
    _Base = object

T = TypeVar("T")
_BLOCK = 512
"""Bytes in whose multiples CUDA's caching allocator of torch hands out memory."""


class DryMixin(_Base):
    """Plans on real values, as the batch's, and trains on fakes: nobody is waited for, asked or watched.

    Attributes:
        comes: called before a batch comes.
        stack: what was entered when the fakes began; to be closed after the run.
        live: bytes of the fakes.
    """

    comes: Callable[[], None]
    stack: contextlib.ExitStack
    live: LiveBytes
    _fakes: FakeTensorMode | None = None
    _fake: Tensor | None = None  # one of them
    _begun = False
    _first: FirstStep | None = None  # until fakes are in the module
    _trained: frozenset[str] | None = None  # parameters that have a gradient, where that is known
    _alike: frozenset[str] = frozenset()  # parameters whose memory is others', too
    _buffers: Mapping[str, Tensor] = MappingProxyType({})  # that no step touches
    _saved: DryInventory | None = None  # while it is planned what would be written

    def _heed_signals(self) -> None:
        """This process alone ends by a signal."""

    def _begin_watch(self, world: Any) -> None:
        """Nobody can hang."""

    def _connect(self, backend: str, device: torch.device) -> None:
        assert self.layout is not None and self.cluster_environment is not None
        begin_fake_world(self.cluster_environment.global_rank(), self.layout.world_size, self.timeout)
        self.namespace.from_fabric("utilities.rank_zero", "rank_zero_only").rank = self._process_rank

    def _first_step(self, trainer: Any) -> FirstStep:
        self._first = first = super()._first_step(trainer)
        if self.groups.pipeline.size > 1:
            self._alike = frozenset(overlapping(first.module, trainer.callbacks))
            self._buffers = untouched_buffers(first)
        return first

    def _materialise(self, module: nn.Module) -> None:
        first, self._first = self._first, None
        if first is not None and self.groups.pipeline.size > 1:
            with self._state.entered(copies_are_processes=True):  # a trial of the step
                self._trained, stages = _trained(first), self.parts.of(StagesPart)
            if stages is not None:
                stages.tell_alone(self._tell_alone)
        self._fakes, self.live = FakeTensorMode(allow_non_fake_inputs=True), self._live_bytes()
        with self.live:
            give_fakes(module, self._fakes)
        with self._fakes:
            self._fake = torch.empty(())

    def _tell_alone(self, asks: JointGradients) -> None:
        """What other stages would tell of their weights, gradients, optimizers and buffers."""
        stages = self._other_stages()
        assert stages is not None
        asks.in_parts = stages.in_parts(asks.parameters)
        asks.alone.expected, asks.alone.state_of, asks.buffers_alone.values = (
            self._trained,
            self._state_of,
            self._buffers,
        )

    def _state_of(self, optimizer: Any, p: Any, group: Mapping[str, Any]) -> Mapping[Any, Any] | None:
        stages = self._other_stages()
        try:
            return None if stages is None else stages.state_there(optimizer, p, group)
        except UnknownStateError:
            return None

    def _live_bytes(self) -> LiveBytes:
        kind = self.root_device.type
        return LiveBytes(kind=kind, block=_BLOCK if kind == "cuda" else 1)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """The batch is real, and has its values; what meets weights has none."""
        self.comes()
        if self._fakes is None:
            return super().batch_to_device(batch, device, dataloader_idx)
        with unset_fake_temporarily():
            batch = super().batch_to_device(batch, device, dataloader_idx)
        if not self._begun:
            self._begun = True
            self.stack.enter_context(self._fakes)
            self.stack.enter_context(KnownValues(self._fakes))
            self.stack.enter_context(self.live)
            self.stack.enter_context(patch.object(torch, "tensor", tensor_of(self._fakes)))
        with unset_fake_temporarily():  # a step may write to it
            return map_tensors(lambda x: x.detach().clone(), batch)

    def _gathered(self, own: dict[str, Any], take: Callable[[Inventory], dict[str, Any]]) -> dict[str, Any]:
        return super()._gathered(own, take) if self._saved is None else take(self._saved)

    def planned_checkpoint(self) -> tuple[list[Chunk], FileCost]:
        """What this rank would write now of a distributed checkpoint, weights and the optimizers' states; and what a
        single file of them would cost it.

        Raises:
            UnknownStateError: other stages hold some of it, of which it is not known what.
        """
        self._saved, stages = DryInventory(self.groups, self.stores_parts), self._other_stages()
        try:
            if stages is not None:
                self._saved.others = stages.weights
            weights, states = self.lightning_module_state_dict(), []
            for optimizer in self.optimizers:
                if stages is not None:
                    self._saved.others = partial(stages.states, optimizer)
                states.append(self.optimizer_state(optimizer))
            writing = Writing("", self._saved)
            checkpoint = {"state_dict": weights, "optimizer_states": states}
            writing.outline = take_apart(checkpoint, [*map(self._names, self.optimizers, states)])
            return writing.chunks(), file_cost(self._saved, writing.outline.tensors)
        except NotImplementedError as error:  # the module's own code asks other stages
            raise UnknownStateError(str(error).rstrip(".")) from error
        finally:
            self._saved = None

    def _other_stages(self) -> OtherStages | None:
        part = self.parts.of(StagesPart)
        if part is None or self.groups.pipeline.size == 1:
            return None
        assert self._lightning_module is not None and self._fake is not None
        return OtherStages(
            self._lightning_module, self.groups, part.holders, self.parts.of(StoragePart), self._alike,
            self._trained, self._fake,
        )  # fmt: skip

    def teardown(self) -> None:
        self.stack.close()
        self._fake = None
        module, self.optimizers, self._lightning_module = self._lightning_module, [], None
        super().teardown()  # fakes can't be moved to the host
        self._lightning_module = module  # whose hooks follow

    def barrier(self, name: str | None = None) -> None: ...

    def broadcast(self, obj: T, src: int = 0) -> T:
        return obj

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision


def _trained(first: FirstStep) -> frozenset[str] | None:
    """The first names of the parameters that get a gradient, if that can be told."""
    streams = RunState.current.streams
    before, streams.whole = streams.whole, False  # any draws show whether it goes by them
    try:
        return expected_gradients(first.step())
    finally:
        streams.whole = before


def dry(strategy: Any) -> type[Any]:
    """The class of a dry run in the place of the class ``strategy``."""
    return type(strategy.__name__, (DryMixin, strategy), {"__module__": strategy.__module__})
