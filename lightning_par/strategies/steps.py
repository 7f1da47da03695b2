"""The steps of a run: batches equal in a replica, draws keyed to the step, gradients averaged after backward."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_par.fsdp.part import StoragePart
from lightning_par.mesh.batch_broadcast import broadcast_batch
from lightning_par.optim.gradients_ahead import Ahead
from lightning_par.optim.optimizers import may_go_by_loss
from lightning_par.optim.replica_losses import averaged
from lightning_par.optim.shared_memory import Rivals, gradients_written, look_at_gradients
from lightning_par.pipeline.part import StagesPart
from lightning_par.python_state import generators
from lightning_par.python_state.nested_tensors import map_tensors
from lightning_par.sharded.gradient_shares import shared_over
from lightning_par.sharded.patches import look_for_compiled
from lightning_par.sharded.tensor import full
from lightning_par.strategies.dataloader_iter import Fetching
from lightning_par.strategies.entry_points import fetches_itself, meets_the_loss
from lightning_par.strategies.ranks import RanksMixin
from lightning_par.trial.step import Step


class StepsMixin(RanksMixin):
    """What happens in and around a step."""

    _rivals: Rivals | None = None  # gradients that share memory, while a backward runs

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        batch = super().batch_to_device(batch, device, dataloader_idx)
        replica = self.groups.replica
        self._come("batch", "came to the next batch")
        if replica.size == 1:
            return batch
        # Code that one rank alone ran may have drawn random numbers: a replica's generators start each step equal.
        state = generators.packed_state() if replica.tells() else b""
        batch, state = broadcast_batch((batch, state), replica, self.root_device)
        if replica.rank > 0:
            generators.unpack_state(state)
        return batch

    @contextmanager
    def _step(self, kind: str) -> Generator[None, None, None]:
        """What all ranks run alike."""
        shared = kind != "optimizer_step" and self.groups.replica.size > 1
        with self._state.entered(copies_are_processes=shared), ExitStack() as stack:
            stack.enter_context(shared_over(self.groups.sharding))
            for part in self.parts:
                stack.enter_context(part.step(kind))
            yield

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._step("backward"):
            return super().backward(*args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
        if self.groups.data.size > 1 and may_go_by_loss(optimizer):
            closure = averaged(closure, self.groups.data)
        with self._step("optimizer_step"):
            return super().optimizer_step(optimizer, closure, *args, **kwargs)

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.lightning_module
        number = module.trainer.fit_loop.total_batch_idx
        with self._draws(number):
            stages = self._staged()
            if stages is None:
                return _whole(super().training_step(self._given("training_step", batch), *args, **kwargs))
            scaler = getattr(self.precision_plugin, "scaler", None)
            # Lightning divides the loss before its backward: hooks on what the step made meet gradients of that.
            scale = (1.0 if scaler is None else scaler.get_scale()) / module.trainer.accumulate_grad_batches
            step = self._step_on("training_step", batch, args, kwargs)
            return stages.train(step, self.optimizers, scale, self._key(number), self._ahead())

    def _ahead(self) -> Ahead | None:
        """What averages gradients before backward is called, where that gives just what the step has made.

        Code of the user's that meets the loss before may scale it on one rank in another way than on others.
        """
        module: Any = self.lightning_module
        ahead = None if self._gradients is None else self._gradients.ahead()
        return None if meets_the_loss(module, module.trainer.callbacks, self.precision_plugin) else ahead

    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation("validation_step", batch, args, kwargs)

    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation("test_step", batch, args, kwargs)

    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation("predict_step", batch, args, kwargs)

    def _evaluation(self, name: str, batch: Any, args: Any, kwargs: Any) -> Any:
        if self._preemption is not None:
            self._preemption.before_evaluation_step()
        self._evaluated += 1
        with self._draws(-self._evaluated):
            stages = self._staged()
            if stages is None:
                return _whole(getattr(super(), name)(self._given(name, batch), *args, **kwargs))
            return _whole(stages.evaluate(self._step_on(name, batch, args, kwargs), self._key(-self._evaluated)))

    def _staged(self) -> StagesPart | None:
        """What runs the steps, where the layers are spread over ranks."""
        stages = self.parts.of(StagesPart)
        return None if stages is None or stages.engine is None else stages

    def _step_on(self, name: str, batch: Any, args: Any, kwargs: Any) -> Step:
        module: Any = self.lightning_module
        trainer = module.trainer
        shared = (trainer, self, *trainer.loggers, *trainer.callbacks)
        context = self.precision_plugin.forward_context
        rest = (*args, *kwargs.values())
        return Step(module, name, batch, rest, context, name == "training_step", self.root_device, shared)

    def _key(self, number: int) -> tuple[int, int]:
        return torch.initial_seed() + self.groups.data.rank, number

    def _given(self, step: str, batch: Any) -> Any:
        """What a step is given for ``batch``, which is Lightning's iterator where the step fetches batches itself."""
        if isinstance(batch, Iterator) and fetches_itself(getattr(self.lightning_module, step)):
            return Fetching(batch, self.groups.replica, self.root_device, self._marked)
        return self._marked(batch)

    def _marked(self, batch: Any) -> Any:
        for part in self.parts:
            batch = part.given(batch)
        return batch

    @contextmanager
    def _draws(self, step: int) -> Generator[None, None, None]:
        self._come("step", "came to the next step")
        look_for_compiled()
        self._state.streams.begin_step(*self._key(step))
        try:
            with self._step("training_step" if step >= 0 else "evaluation"):
                yield
        finally:
            self._state.streams.end_step()
            for axis in self.groups.sharding:
                axis.end_step()

    def pre_backward(self, closure_loss: Tensor) -> None:
        if self.lightning_module is not None:
            self._rivals = look_at_gradients(self.lightning_module)
        if self._gradients is not None:
            self._gradients.before_backward()
        stages = self.parts.of(StagesPart)
        if stages is not None:
            stages.before_backward(closure_loss)

    def post_backward(self, closure_loss: Tensor) -> None:
        storage = self.parts.of(StoragePart)
        if storage is not None:
            storage.after_backward()
        if self._gradients is not None:
            self._gradients.after_backward()
        if self.lightning_module is not None:
            gradients_written(self.lightning_module, self._rivals)
            self._rivals = None
        stages = self.parts.of(StagesPart)
        if stages is not None:
            stages.after_backward()

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Inside, gradients stay each replica's own; the next backward outside averages what was gathered."""
        gradients = self._gradients
        if gradients is None:
            yield
            return
        before, gradients.blocked = gradients.blocked, True
        try:
            yield
        finally:
            gradients.blocked = before


def _whole(output: Any) -> Any:
    """What leaves a step is plain: callbacks and loops know nothing of shards. It is the very object where it was: a
    step may return its batch, which callbacks write into."""
    return map_tensors(full, output)
