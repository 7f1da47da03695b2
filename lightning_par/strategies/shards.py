"""What is split over the ranks of a stage, and made whole again: weights over tensor, tokens over sequence."""

from __future__ import annotations

import warnings
from datetime import timedelta
from functools import partial
from typing import Any

from lightning_par.fsdp.apply import Storing, unstore
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.handshake import Meeting
from lightning_par.mesh.subgroups import attend_along
from lightning_par.sequence.planning import Planning
from lightning_par.sequence.table import show_plan
from lightning_par.sharded import tensor_names
from lightning_par.sharded.gradient_shares import shared_around
from lightning_par.sharded.patches.module_hooks import refuse_partial_hooks
from lightning_par.sharded.rules import several_axes
from lightning_par.strategies import end_of_run
from lightning_par.strategies.host_memory import Room, shortest_room
from lightning_par.strategies.ranks import RanksMixin
from lightning_par.strategies.stop_iteration import AllStop
from lightning_par.tensor.kept_tensors import make_held_whole
from lightning_par.tensor.planning import Sharding
from lightning_par.tensor.residual_stream import shard_residual, whole_residual


class ShardsMixin(RanksMixin):
    """From a whole module to its shards, and back."""

    def _shard_model(self, trainer: Any) -> None:
        """Called once the module is whole, equal on all ranks, converted and on the device; before optimizers exist."""
        assert self.lightning_module is not None
        groups = self.groups
        split = [axis for axis in (groups.sequence, groups.tensor) if axis.size > 1]
        if len(split) > 1 or (split and groups.pipeline.size > 1):
            several_axes.allow()
        self._planning = self._make_planning()
        if self._planning is not None:  # first, since it runs the step as one device would
            plan = self._planning.apply(trainer, self.lightning_module)
            if groups.sequence.size > 1 and groups.world.rank == 0:
                show_plan(plan, self.attention, groups.layout, self._planning.seconds)
        self._sharding = Sharding(groups, self.plan)
        self._sharding.apply(trainer, self.lightning_module)
        self._storing = Storing(groups, self.reshards) if self.stores_parts else None
        if self.data_parallel == "fsdp" and self._storing is None and groups.world.rank == 0:
            warnings.warn(
                f"data_parallel='fsdp' shares out nothing: no two of the {groups.world.size} ranks use the same weights"
                " (data 1, sequence 1). Give it more devices, or smaller sizes of the other axes.",
                stacklevel=1,
            )
        if split or self._storing is not None:
            among = split[0] if len(split) == 1 else groups.stage_of_replica
            self._meeting = Meeting(among if self._storing is None else groups.stage, self.timeout)
            for axis in self._talking():
                axis.guard = partial(self._meeting.about_to_talk, axis)
            tensor_names.name_weights(self.lightning_module)
        self._stops = AllStop(Meeting(groups.replica, self.timeout, "stop"))
        if self._planning is not None:
            refuse_partial_hooks(self.lightning_module)
            shared_around((groups.sequence, groups.tensor))

    def _make_planning(self) -> Planning | None:
        groups = self.groups
        whole_residual(groups.tensor)  # an earlier run on these groups may have been interrupted
        if groups.sequence.size > 1:
            attend_along(groups, self.attention, self.timeout or timedelta(minutes=30))
            return Planning(groups, self.sequence_dim, self.attention)
        if self.shard_residual and groups.tensor.size > 1:
            return Planning(groups, None, "all_gather", shard_residual(groups.tensor))
        return None

    def _talking(self) -> list[Axis]:
        """The axes along which sharded tensors talk."""
        groups = self.groups
        grid = getattr(getattr(groups.sequence, "attention", None), "grid", None)
        found = [groups.sequence, groups.tensor, groups.tensor.residual, *([] if grid is None else vars(grid).values())]
        stored = [] if self._storing is None else [self._storing.peers, self._storing.all]
        return [axis for axis in (*found, *stored) if axis is not None]

    def _store_parts(self) -> None:
        """Called when this rank holds what its stage uses: keep a part of it."""
        if self._storing is not None:
            assert self.lightning_module is not None
            trainer: Any = self.lightning_module.trainer
            self._storing.apply(self.lightning_module, trainer.callbacks)
            if tensor_names.on:
                tensor_names.name_weights(self.lightning_module)
            if self.groups.world.rank == 0:
                print(self._storing.line(self.lightning_module), flush=True)

    def _close_meeting(self) -> None:
        if self._groups is not None:
            for axis in self._talking():
                axis.guard = None
        self._meeting = self._stops = None
        tensor_names.end()
        shared_around(())

    def _unshard_model(self) -> None:
        """Called after a run that ended well, on all ranks: make the module whole again, if there is room for it."""
        if self._sharding is not None and self.lightning_module is not None:
            room = shortest_room(self.lightning_module, self.optimizers, self.root_device, self.groups.world)
            if not room.suffices:
                self._leave_parts(room)
                return
            for optimizer in self.optimizers:
                end_of_run.unshard_optimizer_state(optimizer, self._stages)
            unstore(self.lightning_module)
            trainer: Any = self.lightning_module.trainer
            if self._storing is not None and self.groups.tensor.size == 1:  # else `Sharding.undo` does it
                make_held_whole([self.lightning_module, *trainer.callbacks])
            self._unspread_model()
            if self._planning is not None:
                self._planning.undo()
                make_held_whole([self.lightning_module, *trainer.callbacks])
            self._sharding.undo(self.lightning_module, trainer.callbacks)
        whole_residual(self.groups.tensor)
        self._sharding = self._planning = self._storing = None

    def _leave_parts(self, room: Room) -> None:
        """The ranks keep what they hold, as after an exception: a checkpoint can still be saved."""
        if self.groups.world.rank == 0:
            warnings.warn(
                f"The module is left in parts, each rank's own, since the whole does not fit on each rank: {room}. Its "
                "weights can't be read here; `trainer.save_checkpoint(path)`, called on all ranks, saves all of them.",
                stacklevel=1,
            )

    def _refuse_parts_without_room(self) -> None:
        """Called before a run, on all ranks: an earlier one may have left parts, which are made whole first."""
        module = self.lightning_module
        assert module is not None
        room = shortest_room(module, (), self.root_device, self.groups.world)
        if not room.suffices:
            raise RuntimeError(
                f"An earlier run has left {type(module).__name__} in parts, and the whole does not fit on each rank: "
                f"{room}. Save a checkpoint, `trainer.save_checkpoint(path)` on all ranks, and go on with a new module "
                f"that makes its layers in configure_model: `trainer.test({type(module).__name__}(), ckpt_path=path)`."
            )

    def _unspread_model(self) -> None:
        """Called before parts of weights are joined: bring back the weights that other ranks hold."""
