"""The state of a run as one device writes and reads it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from types import FrameType
from typing import Any, Literal

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer

from lightning_par.checkpoint import generator_states
from lightning_par.checkpoint.background import Background, background_group
from lightning_par.checkpoint.checked_together import together
from lightning_par.checkpoint.directory import Writing
from lightning_par.checkpoint.inventory import Inventory
from lightning_par.checkpoint.modules import with_modules_apart, with_modules_whole
from lightning_par.checkpoint.outline import OWN
from lightning_par.checkpoint.reading import is_directory, load
from lightning_par.checkpoint.state_dicts import cut_to_parts, detach_from_file, model_state, optimizer_state, whole
from lightning_par.mesh.handshake import STEP, Meeting
from lightning_par.optim.optimizers import adopt
from lightning_par.optim.unregistered import refuse_unregistered
from lightning_par.pipeline.between_steps.optim.gather_states import whole_where_held
from lightning_par.pipeline.part import StagesPart
from lightning_par.private.lightning_modules import trainer_of
from lightning_par.private.strategies import give_checkpoint_io, given_checkpoint_io
from lightning_par.private.trainer import restores_a_run
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.strategies.rank_numbers import Count
from lightning_par.strategies.resuming import ResumingMixin

_ON_ALL = "Call `trainer.save_checkpoint(path)` on all of them, outside of `if trainer.is_global_zero`."
Distributed = bool | Literal["async"]
"""Whether a checkpoint is a directory to which each rank writes, and whether training goes on meanwhile."""


def check_distributed(value: Distributed) -> Distributed:
    """
    Raises:
        ValueError: ``value`` is none of the three.
    """
    if value not in (True, False, "async") or value in (0, 1) and not isinstance(value, bool):
        raise ValueError(f"`save_distributed_checkpoint` must be True, False or 'async', got {value!r}.")
    return value


class SavingMixin(ResumingMixin):
    """Weights and optimizer states: in parts while a run goes on, whole where they are saved."""

    _inventory: tuple[FrameType, Inventory] | None = None  # of the Trainer.save_checkpoint that runs
    _saves: Meeting | None = None  # of a run
    _starting = False  # whether a run is being set up
    save_distributed_checkpoint: Distributed = False
    """Whether `save_checkpoint` makes a directory to which each rank writes."""

    @property
    def _background(self) -> Background:
        made: Background = vars(self).setdefault("_saving", Background())
        return made

    @property
    def checkpoint_io(self) -> Any:
        """The user's plugin, else ours; a wrapping plugin of the user's is given ours to wrap."""
        if given_checkpoint_io(self) is None:
            give_checkpoint_io(self, self._default_checkpoint_io())
        elif getattr(given_checkpoint_io(self), "checkpoint_io", self) is None:
            setattr(given_checkpoint_io(self), "checkpoint_io", self._default_checkpoint_io())  # noqa: B010
        return given_checkpoint_io(self)

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        give_checkpoint_io(self, io)

    def _default_checkpoint_io(self) -> Any:
        from lightning_par.checkpoint.files import make_checkpoint_io

        return make_checkpoint_io(self.namespace.pytorch)  # type: ignore[arg-type]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights as one device writes them."""
        self._meet_after_exception()
        self._meet_to_save()
        stages = self.parts.of(StagesPart)
        if stages is not None:
            stages.agree_on_buffers()
        weights = super().lightning_module_state_dict()
        return self._gathered(weights, lambda inventory: model_state(weights, inventory))

    def _meet_to_save(self) -> None:
        """Within a run all ranks come to a save, whose first step this is, or an error says who does not."""
        trainer = None if self.lightning_module is None else trainer_of(self.lightning_module)
        running = trainer is not None and trainer.state.status.value == "running"
        if running and self._saves is not None and self._running_save() is not None:
            self._saves.at_any_time("came to save a checkpoint", _ON_ALL, patience=STEP)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state as one device writes it."""
        own = super().optimizer_state(optimizer)
        return self._gathered(own, lambda inventory: optimizer_state(own, inventory))

    def _gathered(self, own: dict[str, Any], take: Callable[[Inventory], dict[str, Any]]) -> dict[str, Any]:
        """The state on the first rank: with its values at once, or as they are read if it is about to be saved."""
        if self._groups is None:
            return own
        save = self._running_save()
        if save is None:
            inventory = Inventory(self._groups, self.stores_parts)
            return whole(take(inventory), inventory)
        if self._inventory is None or self._inventory[0] is not save:
            self._inventory = save, Inventory(self._groups, self.stores_parts)
        return take(self._inventory[1])

    def _running_save(self) -> FrameType | None:
        """The call of `Trainer.save_checkpoint` that this one is a part of."""
        trainer = None if self.lightning_module is None else trainer_of(self.lightning_module)
        methods = [vars(kind).get("save_checkpoint") for kind in type(trainer).__mro__]
        codes = [getattr(method, "__code__", None) for method in methods if method is not None]
        frame = inspect.currentframe()
        while frame is not None and frame.f_code not in codes:
            frame = frame.f_back
        return frame

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write ``checkpoint``; all ranks must call it."""
        if self._groups is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        save, inventory = self._inventory or (None, Inventory(self._groups, self.stores_parts))
        self._inventory = None
        if save is not self._running_save():  # what an earlier one, that failed, has left
            inventory = Inventory(self._groups, self.stores_parts)
        if self._preemption is not None and "optimizer_states" in checkpoint:
            self._preemption.note_saved()
        self._background.finish()
        for key in [key for key in checkpoint if key == "callbacks" or key.endswith("hyper_parameters")]:
            # Any torch can read a file that has plain numbers in it.
            checkpoint[key] = apply_to_collection(checkpoint[key], Count, lambda count: count.processes)
        if "optimizer_states" in checkpoint:  # else it is not to be resumed from
            checkpoint[OWN] = self._kept_for_resume(checkpoint, str(filepath))
        checkpoint = with_modules_apart(checkpoint)
        if self.groups.pipeline.size > 1:  # callbacks may have added copies, plain on the ranks that hold them
            checkpoint = whole_where_held(checkpoint, self.is_global_zero, self.groups.pipeline)
        checkpoint = with_modules_whole(inventory.complete(checkpoint))
        if self.save_distributed_checkpoint:
            self._save_directory(checkpoint, filepath, storage_options, inventory)
            return
        self.barrier("save_checkpoint")  # a rank may still read the checkpoint that this one takes the place of
        with inventory.open():
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def _save_directory(self, checkpoint: dict[str, Any], filepath: Any, options: Any, inventory: Inventory) -> None:
        if options is not None:
            raise TypeError("storage_options go to a CheckpointIO, which save_distributed_checkpoint does not use.")
        writing = Writing(self.broadcast(str(filepath)), inventory)
        writing.begin(checkpoint, [*map(self._names, self.optimizers, checkpoint.get("optimizer_states", ()))])
        trainer = None if self.lightning_module is None else trainer_of(self.lightning_module)
        running = trainer is not None and trainer.state.status.value == "running"
        if self.save_distributed_checkpoint != "async" or not running:
            writing.finish()
            return
        writing.stage()
        group = background_group(self.timeout or timedelta(minutes=30))
        self._background.start(lambda: writing.finish(group))

    def _names(self, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[int, str]:
        """The names of the optimizer's parameters by their id in ``state``."""
        assert self.lightning_module is not None
        names = {id(p): name for name, p in self.lightning_module.named_parameters()}
        ids = [i for group in state.get("param_groups", ()) for i in group["params"]]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return {i: names[id(p)] for i, p in zip(ids, parameters) if id(p) in names}

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a file or a directory, once one that is being written is whole."""
        self._background.then(lambda: super(SavingMixin, self).remove_checkpoint(filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """What a single file or a directory holds; tensors are read when they are used.

        Nothing in it runs code, at whatever path or URL, unless ``weights_only`` is ``False``.

        Raises:
            pickle.UnpicklingError: it holds other things than ``weights_only`` allows; the message names them.
            ValueError: it is a directory with files missing, cut short or garbled.
            RuntimeError: it is a file that is cut short or garbled, or whose tensors do not match their checksums.
        """
        self._background.finish()
        path = str(checkpoint_path)
        if is_directory(path):
            return load(path, weights_only)
        # A plugin of the user's may not load on all ranks, nor need the user's own code call this on all.
        ours = type(self.checkpoint_io) is type(self._default_checkpoint_io())
        restores = ours and self._groups is not None and restores_a_run(inspect.currentframe())
        with together(self.groups.world) if restores else nullcontext():
            return super().load_checkpoint(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights, of which this rank reads no more than it holds."""
        assert self.lightning_module is not None
        own = cut_to_parts(self.lightning_module, checkpoint["state_dict"])
        super().load_model_state_dict({**checkpoint, "state_dict": own}, strict)

    def teardown(self) -> None:
        try:
            self._background.finish()
        finally:
            super().teardown()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        with torch.no_grad():  # torch casts what is loaded: parts are to stay parts
            super().load_optimizer_state_dict(checkpoint)
        given = {x.data_ptr() for x in tensors_in(checkpoint["optimizer_states"]) if type(x) is Tensor and x.numel()}
        for optimizer in self.optimizers:
            detach_from_file(optimizer, given)
        self._adopt_optimizers()  # the state is whole; one without hooks for loading has noticed nothing
        if self._starting and self._generators is not None:
            generator_states.load_state(self._generators)
            self._generators = None

    def _adopt_optimizers(self) -> None:
        """Called when ``self.optimizers`` were made by the user's ``configure_optimizers``."""
        stages = self.parts.of(StagesPart)
        places = None if stages is None else stages.places()
        module, groups = self.lightning_module, self.groups
        for optimizer in self.optimizers:
            if module is not None and max(groups.pipeline.size, groups.data.size) > 1:
                refuse_unregistered(optimizer, module)
            adopt(optimizer, places)
        for part in self.parts:
            for optimizer in self.optimizers:
                part.adopt(optimizer)
