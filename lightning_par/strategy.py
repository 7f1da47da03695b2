"""The Lightning face that all strategies share: launch, sampler, batch, reduce, clip, state, teardown.

No Lightning is imported here: the classes are mixins, and `lightning_par.lightning_strategies` and `lightning_par.pl`
join them to the ``ParallelStrategy`` of their Lightning.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_par import generators, launch, precision, private, state
from lightning_par.batch import broadcast_batch
from lightning_par.gradients import GradientSync
from lightning_par.intercept import hand_metrics_whole_tensors
from lightning_par.launch import StartMethod
from lightning_par.layout import Groups, Layout, Size, make_groups
from lightning_par.logging import (
    gather_metrics_over,
    quiet_sync_advice,
    reduce_over_axis,
    reduce_over_group,
    restore_metrics,
)
from lightning_par.meeting import Meeting
from lightning_par.namespace import OTHER, Namespace
from lightning_par.optimizers import adopt
from lightning_par.random import streams
from lightning_par.sharding import Sharding
from lightning_par.tensor.held import make_held_whole
from lightning_par.tensor.plan import check_styles
from lightning_par.view import ShardedTensor, full
from lightning_par.weights import equalize
from lightning_par.writers import refuse_batch_size_finder, restore_writers, write_predictions_once

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as _Base
else:
    _Base = object

T = TypeVar("T")
_runs = itertools.count()  # of this process; all ranks count alike
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class StrategyMixin(_Base):
    """What every strategy of this package does for Lightning; a subclass says how the ranks are laid out.

    Subclasses override `resolve_layout`.
    """

    namespace: Namespace

    def __init__(self, process_group_backend: str | None, timeout: timedelta | None, start_method: StartMethod) -> None:
        launch.check_start_method(start_method)
        super().__init__()
        self.process_group_backend = process_group_backend
        self.timeout = timeout
        self.start_method = start_method
        self.num_nodes = 1
        self.layout: Layout | None = None
        self._groups: Groups | None = None
        self._gradients: GradientSync | None = None
        self._sharding: Sharding | None = None
        self._meeting: Meeting | None = None
        self.plan: dict[str, str] | None = None
        self._synced_batch_norm = False
        self._run = 0
        self._met_after_exception = False
        self._evaluated = 0  # steps without training since `setup`

    def __repr__(self) -> str:
        # Lightning prints this where a Trainer of the other namespace is given the object.
        other, name = OTHER[self.namespace], type(self).__name__
        return (
            f"<{name}: this strategy belongs to {self.namespace.pytorch}; with {other.pytorch} use {other.ours}.{name}>"
        )

    # ---- what a subclass says ----

    def resolve_layout(self, world_size: int) -> Layout:
        """The axis sizes for ``world_size`` ranks.

        Raises:
            ValueError: the sizes that the user gave don't fit.
        """
        raise NotImplementedError

    def _shard_model(self, trainer: Any) -> None:
        """Called once the module is whole, equal on all ranks, converted and on the device; before optimizers exist."""
        assert self.lightning_module is not None
        self._sharding = Sharding(self.groups, self.plan)
        self._sharding.apply(trainer, self.lightning_module)
        if self.groups.tensor.size > 1:
            self._meeting = self.groups.tensor.guard = Meeting(self.groups.tensor, self.timeout)

    def _unshard_model(self) -> None:
        """Called after a run that ended well, on all ranks: make the module whole again."""
        if self._sharding is not None and self.lightning_module is not None:
            for optimizer in self.optimizers:
                state.unshard_optimizer_state(optimizer)
            trainer: Any = self.lightning_module.trainer
            self._sharding.undo(self.lightning_module, trainer.callbacks)
        self._sharding = None

    def _adopt_optimizers(self) -> None:
        """Called when ``self.optimizers`` were made by the user's ``configure_optimizers``."""
        for optimizer in self.optimizers:
            adopt(optimizer)

    # ---- ranks and processes ----

    @property
    def groups(self) -> Groups:
        """The mesh axes through this rank."""
        if self._groups is None:
            raise RuntimeError("The mesh axes are known once the Trainer has started its processes.")
        return self._groups

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices or [])

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning shards samplers and syncs logged values: only where there are several replicas."""
        return self.layout is not None and self.layout.data > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.groups.data.size, "rank": self.groups.data.rank}

    def set_world_ranks(self) -> None:
        environment = self.cluster_environment
        if environment is None:
            return
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        environment.set_world_size(self.num_nodes * self.num_processes)
        self.namespace.from_fabric("utilities.rank_zero", "rank_zero_only").rank = self.global_rank
        # Here, when the Trainer is made, no rank waits for another yet.
        self.layout = self.resolve_layout(self.num_nodes * self.num_processes)

    def _configure_launcher(self) -> None:
        self._launcher = launch.make_launcher(self.namespace, self, self.start_method)

    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        assert self.layout is not None
        device = self.root_device
        backend = self.process_group_backend or dist.Backend.default_device_backend_map.get(device.type, "gloo")
        private.init_process_group(self.namespace, self.cluster_environment, backend, self.timeout, device)
        self._groups = make_groups(self.layout, self.timeout or timedelta(minutes=30))
        # Not Lightning's `reset_seed`: the first rank's generators stand where one device's would.
        generators.share(self.groups.world)

    # ---- setup ----

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None and self.model is not None
        fitting = trainer.state.fn.value == "fit"
        self._run, self._met_after_exception, self._evaluated = next(_runs), False, 0
        self.accelerator.setup(trainer)
        refuse_batch_size_finder(trainer.callbacks, self.groups.world, self.namespace)
        write_predictions_once(trainer.callbacks, self.groups.replica, self.namespace)
        make_held_whole([self.model, *trainer.callbacks])  # a run that an exception ended left its shards
        equalize(self.model, self.groups.world, self.root_device)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if fitting:
            self._sync_batch_norm()
        self._shard_model(trainer)
        self._close_gradients()
        if fitting:
            self._gradients = GradientSync(self.model, self.groups.data)
            self.setup_optimizers(trainer)
            self._adopt_optimizers()
        self.setup_precision_plugin()
        if fitting:
            private.move_optimizers(self.namespace, self.optimizers, self.root_device)
        self._share_metrics()
        if self.groups.data.size == 1:
            quiet_sync_advice()

    def setup_optimizers(self, trainer: Any) -> None:
        self.optimizers, self.lr_scheduler_configs = [], []  # those of an earlier fit hold that fit's parameters
        super().setup_optimizers(trainer)

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        precision.adapt(self.precision_plugin, self.groups.replica)

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def _sync_batch_norm(self) -> None:
        assert self.model is not None
        layers = [name for name, m in self.model.named_modules() if isinstance(m, _BATCH_NORMS)]
        if self._layer_sync is None or not layers or self.groups.data.size == 1:
            return
        if not isinstance(self._layer_sync, self.namespace.from_pytorch("plugins", "TorchSyncBatchNorm")):
            self.model = self._layer_sync.apply(self.model)
        elif self.root_device.type == "cpu":
            raise ValueError(
                f"sync_batchnorm=True: torch's SyncBatchNorm does not run on CPU, and {layers[0]!r} is a BatchNorm. "
                "Write Trainer(sync_batchnorm=False), or train on GPUs."
            )
        else:
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model, process_group=self.groups.data.group)
        self._synced_batch_norm = True

    def _share_metrics(self) -> None:
        if self.lightning_module is not None:
            gather_metrics_over(self.groups.data, self.lightning_module)
            if self.groups.tensor.size > 1:
                hand_metrics_whole_tensors(self.lightning_module)

    # Metrics may be made in a hook that runs after `setup`.

    def on_train_start(self) -> None:
        self._share_metrics()

    def on_validation_start(self) -> None:
        self._share_metrics()

    def on_test_start(self) -> None:
        self._share_metrics()

    def on_predict_start(self) -> None:
        self._share_metrics()

    # ---- a step ----

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

    def _step(self) -> AbstractContextManager[None]:
        """What all ranks run alike: sharded tensors talk without asking whether their peers are there."""
        return nullcontext() if self._meeting is None else self._meeting.step()

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._step():
            return super().backward(*args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step():
            return super().optimizer_step(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        with self._draws(self.lightning_module.trainer.fit_loop.total_batch_idx):
            return _whole(super().training_step(*args, **kwargs))

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._draws_of_evaluation():
            return _whole(super().validation_step(*args, **kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._draws_of_evaluation():
            return _whole(super().test_step(*args, **kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._draws_of_evaluation():
            return _whole(super().predict_step(*args, **kwargs))

    @contextmanager
    def _draws(self, step: int) -> Generator[None, None, None]:
        streams.begin_step(torch.initial_seed() + self.groups.data.rank, step)
        try:
            with self._step():
                yield
        finally:
            streams.end_step()

    def _draws_of_evaluation(self) -> AbstractContextManager[None]:
        self._evaluated += 1
        return self._draws(-self._evaluated)

    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._gradients is not None:
            self._gradients.before_backward()

    def post_backward(self, closure_loss: Tensor) -> None:
        if self._gradients is not None:
            self._gradients.after_backward()

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

    # ---- talking ----

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce ``tensor`` in place over ``group``, or over the data axis: ranks of one replica hold equal values."""
        if not isinstance(tensor, Tensor):
            return tensor
        self._meet_after_exception()
        if group is not None:
            return reduce_over_group(tensor, group, reduce_op)
        return reduce_over_axis(tensor, self.groups.data, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """``tensor`` of every replica, stacked along a new first dim; unchanged where there is one replica."""
        if group is None and self.groups.data.size == 1:
            return tensor
        return super().all_gather(tensor, group=group or self.groups.data.group, sync_grads=sync_grads)

    def barrier(self, name: str | None = None) -> None:
        if dist.is_available() and dist.is_initialized():
            dist.barrier(device_ids=[self.root_device.index] if dist.get_backend() == "nccl" else None)

    def broadcast(self, obj: T, src: int = 0) -> T:
        if not (dist.is_available() and dist.is_initialized()):
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks (any rank, with ``all=False``) say yes."""
        if self._groups is None:
            return decision
        self._meet_after_exception()
        flag = torch.tensor(int(decision), device=self.root_device)
        return bool(self.groups.world.all_reduce_(flag, "decision", "min" if all else "max"))

    # ---- state ----

    @property
    def checkpoint_io(self) -> Any:
        """The user's plugin, else ours; a wrapping plugin of the user's is given ours to wrap."""
        if self._checkpoint_io is None:
            self._checkpoint_io = self._default_checkpoint_io()
        elif getattr(self._checkpoint_io, "checkpoint_io", self) is None:
            setattr(self._checkpoint_io, "checkpoint_io", self._default_checkpoint_io())  # noqa: B010
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io

    def _default_checkpoint_io(self) -> Any:
        from lightning_par.checkpoint_io import make_checkpoint_io

        return make_checkpoint_io(self.namespace.pytorch)  # type: ignore[arg-type]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights as one device writes them."""
        self._meet_after_exception()
        return state.whole_model_state(super().lightning_module_state_dict(), keep=self.is_global_zero)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state as one device writes it."""
        return state.whole_optimizer_state(optimizer, super().optimizer_state(optimizer), keep=self.is_global_zero)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._adopt_optimizers()  # the state is whole; one without hooks for loading has noticed nothing

    def _meet_after_exception(self) -> None:
        """Before anything waits for the other ranks once the run was interrupted: see `state.meet_after_exception`."""
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        if trainer is None or trainer.state.status.value != "interrupted" or self._met_after_exception:
            return
        progress = f"{trainer.global_step} {trainer.fit_loop.total_batch_idx}"
        state.meet_after_exception(self.groups.world, f"{self._run}", progress)
        self._met_after_exception = True

    # ---- the end ----

    def teardown(self) -> None:
        module = self.lightning_module
        self._close_gradients()
        if self._meeting is not None:
            self._meeting = self.groups.tensor.guard = None
        if module is not None:
            restore_metrics(module)
            trainer: Any = module._trainer
            if trainer is not None:
                restore_writers(trainer.callbacks)
            # After an exception on one rank the others may be gone: nothing that waits for them.
            if trainer is not None and trainer.state.status.value != "interrupted" and self._groups is not None:
                self._unshard_model()
        if self._synced_batch_norm and self._layer_sync is not None and self.model is not None:
            self.model = self._layer_sync.revert(self.model)
            self._synced_batch_norm = False
        precision.restore(self.precision_plugin)
        super().teardown()

    def _close_gradients(self) -> None:
        if self._gradients is not None:
            self._gradients.close()
        self._gradients = None


def _whole(output: Any) -> Any:
    """What leaves a step is plain: callbacks and loops know nothing of shards."""
    return apply_to_collection(output, ShardedTensor, full)


class TensorParallelMixin(StrategyMixin):
    """Splits every layer's weights over the devices; what is left of the devices becomes data parallel.

    Args:
        tensor_parallel_size: Ranks that share one copy of the model. ``"auto"`` takes all that ``data_parallel_size``
            leaves.
        data_parallel_size: Copies of the model, each trained on its own batches. ``"auto"`` takes the devices that
            ``tensor_parallel_size`` leaves, or 1 if that is ``"auto"``, too.
        plan: How to split modules by name, where the plan found by itself is not wanted: patterns such as
            ``"blocks.*.mlp.up"`` to ``"colwise"``, ``"rowwise"`` or ``"replicate"``.
        process_group_backend: ``"gloo"``, ``"nccl"``, ...; by default the one for the accelerator.
        timeout: How long a rank waits for another before it gives up. ``None`` takes torch's own default.
        start_method: How processes are started where no launcher (torchrun, SLURM) did: ``"popen"`` runs the script
            again, ``"spawn"``, ``"fork"`` and ``"forkserver"`` go through ``multiprocessing``. ``"auto"`` is
            ``"popen"`` for scripts and ``"fork"`` in notebooks.

    Raises:
        ValueError: at once for a style or a start method that is unknown; when the Trainer is made, if the sizes don't
            multiply to ``devices * num_nodes``.

    Example::

        Trainer(strategy=TensorParallelStrategy(tensor_parallel_size=2), devices=4)
    """

    def __init__(
        self,
        tensor_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_size: int | Literal["auto"] = "auto",
        plan: dict[str, str] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        start_method: StartMethod = "auto",
    ) -> None:
        check_styles(plan)
        super().__init__(process_group_backend, timeout, start_method)
        self.tensor_parallel_size: Size = tensor_parallel_size
        self.data_parallel_size: Size = data_parallel_size
        self.plan = plan

    def resolve_layout(self, world_size: int) -> Layout:
        return Layout.resolve(world_size, own="tensor", data=self.data_parallel_size, tensor=self.tensor_parallel_size)
