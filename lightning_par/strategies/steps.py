"""The steps of a run: batches equal in a replica, draws keyed to the step, gradients averaged after backward."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_par.fsdp.prefetch import in_step, let_go
from lightning_par.mesh.batch_broadcast import broadcast_batch
from lightning_par.optim.shared_memory import Rivals, gradients_written, look_at_gradients
from lightning_par.python_state import generators
from lightning_par.sharded.gradient_shares import shared_over
from lightning_par.sharded.random_streams import streams
from lightning_par.sharded.tensor import ShardedTensor, full
from lightning_par.strategies.dataloader_iter import Fetching
from lightning_par.strategies.entry_points import fetches_itself
from lightning_par.strategies.ranks import RanksMixin
from lightning_par.strategies.stop_iteration import Stopping


class StepsMixin(RanksMixin):
    """What happens in and around a step."""

    _rivals: Rivals | None = None  # gradients that share memory, while a backward runs

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        batch = super().batch_to_device(batch, device, dataloader_idx)
        replica = self.groups.replica
        if replica.size == 1:
            return batch
        # Code that one rank alone ran may have drawn random numbers: a replica's generators start each step equal.
        state = generators.packed_state() if replica.rank == 0 else b""
        batch, state = broadcast_batch((batch, state), replica, self.root_device)
        if replica.rank > 0:
            generators.unpack_state(state)
        return batch

    @contextmanager
    def _step(self, kind: str) -> Generator[None, None, None]:
        """What all ranks run alike: but for the first time, sharded tensors talk without asking for their peers."""
        with (
            shared_over([self.groups.sequence, self.groups.tensor]),
            nullcontext() if self._meeting is None else self._meeting.step(kind),
            nullcontext() if self._stops is None else Stopping(self._stops),
        ):
            yield

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._step("backward"):
            return super().backward(*args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step("optimizer_step"):
            return super().optimizer_step(*args, **kwargs)

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        with self._draws(self.lightning_module.trainer.fit_loop.total_batch_idx):
            return _whole(super().training_step(self._given("training_step", batch), *args, **kwargs))

    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self._draws_of_evaluation():
            return _whole(super().validation_step(self._given("validation_step", batch), *args, **kwargs))

    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self._draws_of_evaluation():
            return _whole(super().test_step(self._given("test_step", batch), *args, **kwargs))

    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with self._draws_of_evaluation():
            return _whole(super().predict_step(self._given("predict_step", batch), *args, **kwargs))

    def _given(self, step: str, batch: Any) -> Any:
        """What a step is given for ``batch``, which is Lightning's iterator where the step fetches batches itself."""
        if isinstance(batch, Iterator) and fetches_itself(getattr(self.lightning_module, step)):
            return Fetching(batch, self.groups.replica, self.root_device, self._marked)
        return self._marked(batch)

    def _marked(self, batch: Any) -> Any:
        """The batch, whose sequences are known as such where they are to be split."""
        return batch if self._planning is None else self._planning.marked(batch)

    @contextmanager
    def _draws(self, step: int) -> Generator[None, None, None]:
        streams.begin_step(torch.initial_seed() + self.groups.data.rank, step)
        try:
            kind = "training_step" if step >= 0 else "evaluation"
            with self._step(kind), in_step(keep=self._storing is None or step < 0 or not self._storing.reshard):
                yield
        finally:
            streams.end_step()
            self.groups.tensor.forget_entries()

    def _draws_of_evaluation(self) -> AbstractContextManager[None]:
        self._evaluated += 1
        return self._draws(-self._evaluated)

    def pre_backward(self, closure_loss: Tensor) -> None:
        if self.lightning_module is not None:
            self._rivals = look_at_gradients(self.lightning_module)
        if self._gradients is not None:
            self._gradients.before_backward()

    def post_backward(self, closure_loss: Tensor) -> None:
        let_go()
        if self._gradients is not None:
            self._gradients.after_backward()
        if self.lightning_module is not None:
            gradients_written(self.lightning_module, self._rivals)
            self._rivals = None

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
    """What leaves a step is plain: callbacks and loops know nothing of shards."""
    return apply_to_collection(output, ShardedTensor, full)
