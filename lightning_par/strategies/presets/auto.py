"""The strategy that chooses its layout as a run starts."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

from lightning_par.checkpoint.outline import OWN
from lightning_par.mesh.layout import AxisName, Layout, make_groups
from lightning_par.pipeline.check_run import check_run
from lightning_par.pipeline.plan.settings import Settings
from lightning_par.private.trainer import checkpoint_of_run
from lightning_par.sharded.random_streams import Draws
from lightning_par.strategies.grace import GracePeriod
from lightning_par.strategies.launch import StartMethod
from lightning_par.strategies.presets.hybrid import HybridParallelMixin
from lightning_par.strategies.ranks import DEFAULT_TIMEOUT
from lightning_par.strategies.startup_table import show_table
from lightning_par.trial.first_batch import peek_batch
from lightning_par.trial.first_step import FirstStep

KEPT = "auto_parallel"
"""Of a checkpoint's own entry: the choice."""


class AutoParallelMixin(HybridParallelMixin):
    """Chooses the layout as ``fit`` starts: the one that `lightning_par.plan` predicts to be the fastest that fits.

    Results are those of that layout named by hand. A step of the optimizer is on the same batches whatever is chosen:
    those of one device, so that layouts have one replica; or ``global_batch`` samples, which replicas share. The choice
    is kept in checkpoints, and taken again by a run that goes on from one with as many devices. ``validate``, ``test``
    and ``predict`` run under the last choice, and split weights over all devices where there is none.

    Args:
        machine: What the layouts are predicted for: a preset such as ``"H100"``, a YAML, or ``"measure"``, which probes
            this machine for a minute or so; see `docs/planning.md`. ``"auto"`` takes the preset of the GPUs at
            hand, and a probe where there is none.
        global_batch: Samples of one step of the optimizer, a multiple of the DataLoader's ``batch_size``. The Trainer's
            ``accumulate_grad_batches`` is set to what the chosen number of replicas leaves. ``None``: a step is on what
            one device's would be, and there is one replica.
        allow_batch_coupling: Train microbatches as batches of their own where samples need one another.
        verify: Run the first batch cut and whole, and compare, where a pipeline is chosen.
        draws: What random numbers of a step are, such as dropout's masks. ``"per_shard"``: tensors that all ranks hold
            have one device's, and parts of tensors numbers of their own. ``"one_device"``: all are one device's, with
            the same seed, in every layout, so that the choice can't change them.
        save_distributed_checkpoint: Save checkpoints as directories to which each rank writes what it holds, which any
            layout loads. ``"async"`` writes them while training goes on, from a copy in the host's memory. Otherwise
            they are single files, as one device writes them.
        process_group_backend: ``"gloo"``, ``"nccl"``, ...; by default the one for the accelerator.
        timeout: How long a rank waits for another before it gives up. ``None`` takes torch's own default.
        hang_report_after: How long a rank waits for others until a report says which rank holds up the run, and where:
            seconds or a timedelta shorter than ``timeout``. ``"auto"`` takes 5 minutes, or half of ``timeout`` where
            that is shorter; ``None`` reports nothing.
        grace_period: How long a job has to save and end after SIGTERM, Ctrl-C, or SLURM's signal to be queued again,
            in seconds. ``"auto"``: what SLURM says, where it is known, and 30 seconds.
        start_method: How processes are started where no launcher (torchrun, SLURM) did: ``"popen"`` runs the script
            again, ``"spawn"``, ``"fork"`` and ``"forkserver"`` go through ``multiprocessing``. ``"auto"`` is
            ``"popen"`` for scripts and ``"fork"`` in notebooks.

    Raises:
        ValueError: at once for a machine, a batch or a start method that is none; as ``fit`` starts, where
            ``global_batch`` can't be had.

    Example::

        Trainer(strategy=AutoParallelStrategy(global_batch=256), devices=8)
    """

    own_axis: AxisName = "tensor"
    _decided: Any = None  # the choice, from a fit's start
    _of_fit = False  # whether it is of the run that goes on
    _path: tuple[Any] | None = None  # of the checkpoint of that run
    _first_batch: tuple[Any] | None = None  # until its step is recorded
    _asked_accumulate: int | None = None  # the user's own, where the run has another

    def __init__(
        self,
        machine: str = "auto",
        global_batch: int | None = None,
        allow_batch_coupling: bool = False,
        verify: bool = True,
        draws: Draws = "per_shard",
        save_distributed_checkpoint: bool | Literal["async"] = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        hang_report_after: timedelta | float | Literal["auto"] | None = "auto",
        grace_period: GracePeriod = "auto",
        start_method: StartMethod = "auto",
    ) -> None:
        _check_machine(machine)
        if global_batch is not None and (type(global_batch) is not int or global_batch < 1):
            raise ValueError(f"global_batch must be a positive int or None, got {global_batch!r}.")
        super().__init__(
            tensor_parallel_size="auto",
            allow_batch_coupling=allow_batch_coupling,
            verify=verify,
            draws=draws,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
            hang_report_after=hang_report_after,
            grace_period=grace_period,
            start_method=start_method,
        )
        self.machine, self.global_batch, self.allow_batch_coupling = machine, global_batch, allow_batch_coupling

    def resolve_layout(self, world_size: int) -> Layout:
        if self._decided is None or self._decided.devices != world_size:
            self._decided = None
            self._lay_out({"tensor_parallel_size": "auto"})
        return super().resolve_layout(world_size)

    def _lay_out(self, arguments: dict[str, Any]) -> None:
        """Take ``arguments`` as if they had been given to `HybridParallelStrategy`."""
        for axis in Layout.axes():
            setattr(self, f"{axis}_parallel_size", arguments.get(f"{axis}_parallel_size", 1))
        self.data_parallel = arguments.get("data_parallel", "ddp")
        self.attention = arguments.get("attention", "auto")
        self.shard_residual = bool(arguments.get("shard_residual", False))
        # Where samples turn out to need one another a batch is left whole.
        schedule, count = arguments.get("schedule", "1f1b"), arguments.get("microbatches")
        self.settings = Settings(schedule, "auto", None, self.allow_batch_coupling, type(self).__name__, count)

    def setup_environment(self) -> None:
        self._of_fit, self._path, self._first_batch = False, None, None
        super().setup_environment()

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        if self._groups is not None and self._fits:  # what is built here follows from the layout
            self._chosen(*checkpoint_of_run(self._trainer))
        with super().model_sharded_context():
            yield

    @property
    def _fits(self) -> bool:
        return self.lightning_module is not None and self._trainer.state.fn.value == "fit"

    def _chosen(self, path: Any, weights_only: bool | None) -> Any:
        """Called when the checkpoint of a fit is known, before it is loaded."""
        if self._path is None:
            self._path = (super()._chosen(path, weights_only),)
        if self._fits and not self._of_fit:
            self._decide(self._path[0], weights_only)
        return self._path[0]

    def setup(self, trainer: Any) -> None:
        if self._fits and not self._of_fit:  # a Trainer of the user's own that restores in another way
            self._decide(None, None)
        super().setup(trainer)

    def _decide(self, path: Any, weights_only: bool | None) -> None:
        """Choose on the first rank, for all. All ranks must call it."""
        trainer, world = self._trainer, self.groups.world
        self._of_fit = True
        if world.size == 1 and self.global_batch is None:
            return
        choice: Any = self.broadcast(self._kept_choice(path, weights_only) if world.rank == 0 else None)
        if choice is None:
            hindrance = None if self.global_batch is None else self._hindrance()
            if hindrance is not None:
                raise ValueError(f"global_batch={self.global_batch}: {hindrance.split(' Resume with')[0]}")
            self._first_batch = (peek_batch(trainer, self.lightning_module, resuming=path is not None),)
            choice = self.broadcast(self._planned(self._first_batch[0]) if world.rank == 0 else None)
        if isinstance(choice, str):
            raise ValueError(choice)
        self._decided = choice
        self._lay_out(dict(choice.arguments))
        self.layout = self.resolve_layout(world.size)
        self._groups = make_groups(self.layout, self.timeout or DEFAULT_TIMEOUT)
        if self.global_batch is not None and trainer.accumulate_grad_batches != choice.accumulated:
            self._asked_accumulate = trainer.accumulate_grad_batches
            trainer.accumulate_grad_batches = choice.accumulated
        if world.rank == 0 and world.size > 1:
            self._show(choice)

    def _kept_choice(self, path: Any, weights_only: bool | None) -> Any:
        """That of the checkpoint at ``path``."""
        from lightning_par.planner.at_launch import Choice

        if path is None:
            return None
        try:
            kept = self.load_checkpoint(path, weights_only).get(OWN, {}).get(KEPT)
            choice = Choice.of_saved(kept, self.groups.world.size, self.global_batch)
        except Exception:  # all ranks are about to load it, and will say what is wrong
            return None
        return choice

    def _planned(self, batch: Any) -> Any:
        """A choice, or what is wrong."""
        from lightning_par.planner.at_launch import choose, machine_at_hand
        from lightning_par.planner.messages.clipped import read_clip

        trainer, module = self._trainer, self.lightning_module
        try:
            pipelines = True
            try:
                check_run(trainer, module, self.namespace, type(self).__name__)
            except ValueError:
                pipelines = False
            world, precision = self.groups.world.size, str(trainer.precision)
            accumulate = trainer.accumulate_grad_batches
            asked = self.machine if world > 1 else "H100"  # nothing is planned for one
            machine = machine_at_hand(asked, self.root_device, self.num_processes)
            clip = read_clip(trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
            return choose(module, batch, machine, world, precision, accumulate, self.global_batch, pipelines, clip)
        except Exception as error:  # the others wait for an answer
            return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"

    def _show(self, choice: Any) -> None:
        from lightning_par.planner.at_launch import HEADER

        arguments = ", ".join(f"{k}={v!r}" for k, v in choice.arguments.items() if not (k.endswith("_size") and v == 1))
        accumulate = self._trainer.accumulate_grad_batches
        footer = [f"HybridParallelStrategy({arguments}), accumulate_grad_batches={accumulate}", *choice.notes]
        rows = choice.rows or (("chosen", str(self.layout), "", "", ""),)
        show_table(choice.title, HEADER, rows, footer, wraps=1)

    def _first_step(self, trainer: Any) -> FirstStep:
        first = super()._first_step(trainer)
        if self._first_batch is not None:
            (first.batch,) = self._first_batch
            self._first_batch = None
        return first

    def _kept_for_resume(self, checkpoint: dict[str, Any], path: str) -> dict[str, Any]:
        kept = super()._kept_for_resume(checkpoint, path)
        return kept if self._decided is None else {**kept, KEPT: self._decided.saved()}

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if self._asked_accumulate is not None:
                self._trainer.accumulate_grad_batches = self._asked_accumulate
            self._asked_accumulate = self._first_batch = None


def _check_machine(machine: Any) -> None:
    """
    Raises:
        ValueError: there is none of that name.
    """
    if not isinstance(machine, str):
        raise ValueError(f"machine must be a name or the path of a YAML, got {machine!r}.")
    if machine not in ("auto", "measure"):
        from lightning_par.planner.machine.machines import read_machine

        read_machine(machine)
