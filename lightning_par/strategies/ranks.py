"""The ranks of a strategy: laid out, started, connected."""

from __future__ import annotations

import contextlib
import sys
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.hang_report.settings import Asked
from lightning_par.mesh.layout import Groups, Layout, make_groups
from lightning_par.mesh.network import Joined, meet
from lightning_par.mesh.rendezvous import Address, uses_agent_store
from lightning_par.mesh.replicas import of_all_replicas
from lightning_par.optim.gradient_sync import GradientSync
from lightning_par.pipeline.effects.all_gather import all_gather, reduced
from lightning_par.pipeline.run.located import Run
from lightning_par.private.compiler import Compiler
from lightning_par.private.lightning_modules import trainer_of, uncompile
from lightning_par.private.process_groups import init_process_group
from lightning_par.private.strategies import given_anew, launched_by, takes_module
from lightning_par.private.trainer import about_to_begin_batch, met_a_skipped_step
from lightning_par.python_state import generators
from lightning_par.sharded import patches
from lightning_par.sharded.run_state import RunState
from lightning_par.strategies import end_of_run, launch
from lightning_par.strategies.device_counts import DeviceCountsMixin
from lightning_par.strategies.grace import GracePeriod, check_grace_period
from lightning_par.strategies.hang_watch import HangWatchMixin
from lightning_par.strategies.launch import StartMethod
from lightning_par.strategies.logging import op_name, reduce_over_axis, reduce_over_group
from lightning_par.strategies.namespace import OTHER, Namespace
from lightning_par.strategies.parts import Parts, Wanted
from lightning_par.strategies.preemption import Preemption
from lightning_par.strategies.rank_numbers import Count, RankInStep
from lightning_par.strategies.samplers import share_by_replicas
from lightning_par.strategies.startup_table import show_hosts

T = TypeVar("T")
DEFAULT_TIMEOUT = timedelta(minutes=30)
_WITHOUT_STORE = ("fake", "mpi")  # backends whose ranks don't meet at a store


@given_anew
@takes_module(lambda strategy, module: strategy._take(module))
@launched_by(lambda strategy: launch.make_launcher(strategy.namespace, strategy, strategy.start_method))
class RanksMixin(DeviceCountsMixin, HangWatchMixin):
    """Who the ranks are: their layout and groups, how they are started, and how they talk outside a step."""

    namespace: Namespace

    def __init__(
        self,
        process_group_backend: str | None,
        timeout: timedelta | None,
        hang_report_after: Asked,
        grace_period: GracePeriod,
        start_method: StartMethod,
    ) -> None:
        launch.check_start_method(start_method)
        self._take_report_time(hang_report_after, timeout)
        super().__init__()
        self.process_group_backend = process_group_backend
        self.timeout = timeout
        self.grace_period = check_grace_period(grace_period)
        self.start_method = start_method
        self.num_nodes = 1
        self.layout: Layout | None = None
        self._groups: Groups | None = None
        self._gradients: GradientSync | None = None
        self.parts = Parts()
        """What is laid out over the ranks, while a run goes on."""
        self._synced_batch_norm = False
        self.compiler: Compiler | None = None
        """What the user compiled the LightningModule by, if at all; it runs as written, its layers compiled."""
        self._state = RunState()
        self._run = 0
        self._met_after_exception = False
        self._preemption: Preemption | None = None
        self._evaluated = 0  # steps without training since `setup`

    def __repr__(self) -> str:
        # Lightning prints this where a Trainer of the other namespace is given the object.
        other, name = OTHER[self.namespace], type(self).__name__
        return (
            f"<{name}: this strategy belongs to {self.namespace.pytorch}; with {other.pytorch} use {other.ours}.{name}>"
        )

    def resolve_layout(self, world_size: int) -> Layout:
        """The axis sizes for ``world_size`` ranks.

        Raises:
            ValueError: the sizes that the user gave don't fit.
        """
        raise NotImplementedError

    def wanted(self) -> Wanted:
        """What the user asked for, beside the sizes."""
        raise NotImplementedError

    def _take(self, module: Any) -> None:
        """Called with the module that a Trainer is to run, again and again.

        No graph goes across the messages that a step sends: Lightning compiles steps as a whole, and is not let.
        """
        compiler = uncompile(module, self.namespace)
        if compiler is not None or module is not self.lightning_module:
            self.compiler = compiler

    @property
    def groups(self) -> Groups:
        """The mesh axes through this rank."""
        if self._groups is None:
            raise RuntimeError("The mesh axes are known once the Trainer has started its processes.")
        return self._groups

    @property
    def stores_parts(self) -> bool:
        """Whether ranks that use the same weights store a part of them each."""
        fsdp = self.wanted().data_parallel == "fsdp"
        return fsdp and self._groups is not None and self._groups.gradients.size > 1

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def global_rank(self) -> int:
        """This process's number; where it goes into results see `rank_numbers`: in the user's hooks `Count`, within a
        step that the ranks of a replica share `RankInStep`."""
        rank = self._process_rank
        if Run.current is not None and self._groups is not None:
            return RankInStep(self.groups.data.rank, self.groups.replica.ranks[0], dist.get_rank())
        return Count(self.groups.data.rank, rank) if self._are_replicas_meant() else rank

    @property
    def _process_rank(self) -> int:
        """By the process group, which may number ranks in another order than their launcher; see `mesh.hosts`."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else super().global_rank

    @property
    def world_size(self) -> int:
        """How many processes there are; in the user's hooks, where it goes into results, see `rank_numbers.Count`."""
        size = super().world_size
        if about_to_begin_batch(sys._getframe(1)):
            self._come("training batch", "came to the next batch")
            if self._preemption is not None:
                self._preemption.before_batch()
        if self._groups is not None and met_a_skipped_step(sys._getframe(1)):
            return self.groups.data.size
        return Count(self.groups.data.size, size) if self._are_replicas_meant() else size

    @property
    def is_global_zero(self) -> bool:
        return (self._process_rank if Run.current is None else self.global_rank) == 0

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning shards samplers and syncs logged values: only where there are several replicas."""
        return self.layout is not None and self.layout.data > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.groups.data.size, "rank": self.groups.data.rank}

    def process_dataloader(self, dataloader: Any) -> Any:
        share_by_replicas(dataloader, self.groups.world, **self.distributed_sampler_kwargs)
        return dataloader

    def set_world_ranks(self) -> None:
        environment = self.cluster_environment
        if environment is None:
            return
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        environment.set_world_size(self.num_nodes * self.num_processes)
        self.namespace.from_fabric("utilities.rank_zero", "rank_zero_only").rank = self.global_rank
        # Here, when the Trainer is made, no rank waits for another yet.
        self.layout = self.resolve_layout(self.num_nodes * self.num_processes)

    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        assert self.layout is not None
        self._heed_signals()
        device = self.root_device
        backend = self.process_group_backend or dist.Backend.default_device_backend_map.get(device.type, "gloo")
        self._connect(backend, device)
        self._begin_progress()
        self._groups = make_groups(self.layout, self.timeout or DEFAULT_TIMEOUT)
        if self.groups.replica.size > 1:
            patches.replica_counts(self.namespace).hold(self)
            RunState.current.counted_processes = None  # as hooks from now on may
        if self.groups.world.size > 1:
            patches.COLLECTIVES.hold(self)
        self._begin_watch(self.groups.world)
        # Not Lightning's `reset_seed`: the first rank's generators stand where one device's would.
        generators.share(self.groups.world)
        if self._preemption is not None:
            self._preemption.connect(self.groups.world)

    def _heed_signals(self) -> None:
        if self._preemption is not None:
            self._preemption.close()  # of a run that was not torn down
        trainer = None if self.lightning_module is None else trainer_of(self.lightning_module)
        if trainer is not None:
            environment = self.cluster_environment
            self._preemption = Preemption(trainer, self.namespace, self.grace_period, environment, self.launcher)

    def _connect(self, backend: str, device: torch.device) -> None:
        """Make the process group of all ranks, unless there is one."""
        assert self.layout is not None and self.cluster_environment is not None
        met: Joined | None = None
        several = self.layout.world_size > 1 or uses_agent_store()  # where there were several before a restart
        if several and not dist.is_initialized() and backend not in _WITHOUT_STORE:
            environment = self.cluster_environment
            address = Address(environment.main_address, environment.main_port)
            timeout = self.timeout or DEFAULT_TIMEOUT
            met = meet(address, environment.global_rank(), self.layout, environment.node_rank(), backend, timeout)
        rank, store = (None, None) if met is None else (met.rank, met.store)
        init_process_group(self.namespace, self.cluster_environment, backend, self.timeout, device, rank, store)
        self.namespace.from_fabric("utilities.rank_zero", "rank_zero_only").rank = self._process_rank
        if met is not None and met.rank == 0 and len({*met.grid.hosts}) > 1:
            show_hosts(met.grid)

    def _come(self, kind: str, doing: str) -> None:
        """Let other ranks know that this one comes to what all ranks come to."""
        if self._groups is not None:
            self._state.whereabouts.come(kind, self._groups.world.ranks, doing)

    def on_exception(self, exception: BaseException) -> None:
        if self._groups is not None:
            with contextlib.suppress(RuntimeError):  # torch's errors of a store that is gone
                self._state.whereabouts.end(self._groups.world.ranks, exception)
        super().on_exception(exception)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce ``tensor`` in place over ``group``, or over the data axis: ranks of one replica hold equal values."""
        if not isinstance(tensor, Tensor):
            return tensor
        self._meet_after_exception()
        if Run.current is not None and group is None:  # within a step of a pipeline
            return reduced(tensor, op_name(reduce_op).replace("avg", "mean"))
        if group is not None:
            return reduce_over_group(tensor, group, reduce_op)
        return reduce_over_axis(tensor, self.groups.data, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """``tensor`` of every replica, stacked along a new first dim; unchanged where there is one replica.

        `LightningModule.all_gather` names the group of all processes where the user names none.
        """
        if group is None or group is dist.group.WORLD:
            if Run.current is not None:  # within a step of a pipeline
                return all_gather(tensor, sync_grads)
            return tensor if self.groups.data.size == 1 else of_all_replicas(tensor, self.groups.data, sync_grads)
        return super().all_gather(tensor, group=group, sync_grads=sync_grads)

    def barrier(self, name: str | None = None) -> None:
        if dist.is_available() and dist.is_initialized():
            self._come("barrier", "came to a barrier")
            dist.barrier(device_ids=[self.root_device.index] if dist.get_backend() == "nccl" else None)
            if self._preemption is not None:
                self._preemption.at_start_up()

    def broadcast(self, obj: T, src: int = 0) -> T:
        if not (dist.is_available() and dist.is_initialized()):
            return obj
        self._come("broadcast", "came to a broadcast of the Trainer's")
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks (any rank, with ``all=False``) say yes."""
        if self._groups is None:
            return decision
        self._meet_after_exception()
        self._come("decision", "came to a decision of the Trainer's")
        flag = torch.tensor(int(decision), device=self.root_device)
        return bool(self.groups.world.all_reduce_(flag, "decision", "min" if all else "max"))

    def _meet_after_exception(self) -> None:
        """Before anything waits for other ranks once a run was interrupted; see `end_of_run.meet_after_exception`."""
        trainer = None if self.lightning_module is None else trainer_of(self.lightning_module)
        if trainer is None or trainer.state.status.value != "interrupted" or self._met_after_exception:
            return
        progress = f"{trainer.global_step} {trainer.fit_loop.total_batch_idx}"
        patience = 0.0 if self._preemption is None else self._preemption.seconds_left
        end_of_run.meet_after_exception(self.groups.world, f"{self._run}", progress, patience)
        self._met_after_exception = True
