"""The strategy of the pipeline axis."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_par.elementwise import refuse_joint_updates
from lightning_par.launch import StartMethod
from lightning_par.layout import Layout, Size
from lightning_par.meeting import Meeting
from lightning_par.pipeline.elsewhere import is_elsewhere
from lightning_par.pipeline.engine import Engine
from lightning_par.pipeline.outside import Outside
from lightning_par.pipeline.settings import Settings
from lightning_par.pipeline.spent import spent_gradients
from lightning_par.pipeline.spread import Spread
from lightning_par.pipeline.states import whole_where_held
from lightning_par.pipeline.step import Step
from lightning_par.pipeline.weights import Once, bring_back
from lightning_par.strategy import StrategyMixin

ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]


class PipelineParallelMixin(StrategyMixin):
    """Cuts the model into stages that work on one microbatch after another; left-over devices become data parallel.

    Args:
        pipeline_parallel_size: Ranks that share one copy of the model, layer by layer. ``"auto"`` takes all that
            ``data_parallel_size`` leaves.
        data_parallel_size: Copies of the model, each trained on its own batches. ``"auto"`` takes the devices that
            ``pipeline_parallel_size`` leaves, or 1 if that is ``"auto"``, too.
        schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved_1f1b"``, ``"interleaved_zero_bubble"`` or ``"zbv"``. The last
            three have two stages a rank, and so twice the messages for a smaller bubble.
        microbatches: Into how many parts each batch is cut. ``"auto"`` takes enough for a bubble of at most 10 percent,
            or 1 where samples need one another, as in BatchNorm.
        stages: Where the balanced cut is not wanted: module names or patterns to stages, as ``{"encoder.*": 0,
            "head": 1}``, or the names of the modules with which the stages after the first begin.
        allow_batch_coupling: Where samples need one another, train each of ``microbatches`` as a batch of its own,
            which is not what one device does: BatchNorm then sees a microbatch, an in-batch loss its samples alone.
        process_group_backend: ``"gloo"``, ``"nccl"``, ...; by default the one for the accelerator.
        timeout: How long a rank waits for another before it gives up. ``None`` takes torch's own default.
        start_method: How processes are started where no launcher (torchrun, SLURM) did: ``"popen"`` runs the script
            again, ``"spawn"``, ``"fork"`` and ``"forkserver"`` go through ``multiprocessing``. ``"auto"`` is
            ``"popen"`` for scripts and ``"fork"`` in notebooks.

    Raises:
        ValueError: at once for an unknown schedule or start method or a wrong count; when the Trainer is made, if the
            sizes don't multiply to ``devices * num_nodes`` or the schedule can't have so many stages.
        TypeError: ``stages`` is neither a dict nor a list.

    Example::

        Trainer(strategy=PipelineParallelStrategy(schedule="1f1b", microbatches=8), devices=4)
    """

    def __init__(
        self,
        pipeline_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_size: int | Literal["auto"] = "auto",
        schedule: ScheduleName = "1f1b",
        microbatches: int | Literal["auto"] = "auto",
        stages: dict[str, int] | list[str] | None = None,
        allow_batch_coupling: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        start_method: StartMethod = "auto",
    ) -> None:
        self.settings = Settings(schedule, microbatches, stages, allow_batch_coupling)
        super().__init__(process_group_backend, timeout, start_method)
        self.pipeline_parallel_size: Size = pipeline_parallel_size
        self.data_parallel_size: Size = data_parallel_size
        self._spread: Spread | None = None
        self._engine: Engine | None = None
        self._outside: Outside | None = None

    @property
    def engine(self) -> Engine | None:
        """What runs the steps; None before a run has spread the model, and where there is one stage."""
        return self._engine

    def resolve_layout(self, world_size: int) -> Layout:
        layout = Layout.resolve(
            world_size, own="pipeline", data=self.data_parallel_size, pipeline=self.pipeline_parallel_size
        )
        if layout.pipeline > 1:
            self.settings.stage_count(layout.pipeline)
        return layout

    # --------------------------------------------------------------------------------------------------- around a run

    def setup(self, trainer: Any) -> None:
        module = self.lightning_module
        assert module is not None
        if self.groups.pipeline.size > 1 and trainer.state.fn.value == "fit" and not module.automatic_optimization:
            raise ValueError(
                f"{type(module).__name__} optimizes by hand (automatic_optimization = False): a pipeline runs its "
                "backwards before the step returns, so there is nothing for manual_backward to do. Use "
                "TensorParallelStrategy, or automatic optimization with one optimizer."
            )
        self._engine = None
        bring_back(module, self.groups.pipeline)  # a run that an exception ended left its stages
        super().setup(trainer)

    def _shard_model(self, trainer: Any) -> None:
        super()._shard_model(trainer)
        if self.groups.pipeline.size > 1:
            assert self.lightning_module is not None
            timeout = self.timeout or timedelta(minutes=30)
            self._spread = Spread(self.groups, self.settings, timeout)
            self._engine = self._spread.apply(trainer, self.lightning_module, self.root_device)
            axis = self.groups.pipeline
            meeting = Meeting(axis, self.timeout, f"pipeline {self._run}")
            self._outside = Outside(self.lightning_module, self._spread.placement, axis, self.root_device, meeting)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers if self.groups.pipeline.size > 1 else ():
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ValueError(
                    "LBFGS runs the step several times for one update and looks at all gradients at once, which the "
                    "stages of a pipeline do not share. Use TensorParallelStrategy, or another optimizer."
                )
            refuse_joint_updates(optimizer)

    def _adopt_optimizers(self) -> None:
        super()._adopt_optimizers()
        if self._outside is not None:
            for optimizer in self.optimizers:
                self._outside.adopt(optimizer)

    def teardown(self) -> None:
        if self._outside is not None:
            self._outside.close()
        self._outside = None
        super().teardown()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        # Callbacks may have added copies of the module, of which this rank holds a part.
        if self._groups is not None:
            checkpoint = whole_where_held(checkpoint, self.is_global_zero, self.groups.pipeline)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _counting(self) -> Once | None:
        if self._spread is None or self.lightning_module is None:
            return None
        return Once(self.lightning_module, self._spread.placement, self.groups.pipeline)

    def _unspread_model(self) -> None:
        if self._spread is not None and self.lightning_module is not None:
            trainer: Any = self.lightning_module.trainer
            self._spread.undo(self.lightning_module, trainer.callbacks)
        self._spread = self._engine = None

    # ----------------------------------------------------------------------------------------------------------- steps

    @contextmanager
    def _draws(self, step: int) -> Generator[None, None, None]:
        with super()._draws(step), nullcontext() if self._outside is None else self._outside.step():
            yield

    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if closure_loss.requires_grad:
            closure_loss.register_hook(lambda _: self._forget_gradients())

    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        if self._outside is not None:
            self._outside.forget_gradients()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._engine is None or self._spread is None:
            return super().training_step(*args, **kwargs)
        module: Any = self.lightning_module
        number = module.trainer.fit_loop.total_batch_idx
        own = [p for p in module.parameters() if p.requires_grad and not is_elsewhere(p)]
        scaler = getattr(self.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        with self._draws(number):
            step = self._make_step("training_step", args, kwargs)
            for p in spent_gradients(module, self.optimizers):
                p.grad = None
            return self._engine.train(step, self._spread.microbatches, own, scale, self._key(number))

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation("predict_step", args, kwargs)

    def _evaluation(self, name: str, args: Any, kwargs: Any) -> Any:
        if self._engine is None or self._spread is None:
            return getattr(super(), name)(*args, **kwargs)
        with self._draws_of_evaluation():
            step = self._make_step(name, args, kwargs)
            return self._engine.evaluate(step, self._spread.microbatches, self._key(-self._evaluated))

    def _make_step(self, name: str, args: Any, kwargs: Any) -> Step:
        module: Any = self.lightning_module
        trainer = module.trainer
        shared = (trainer, self, *trainer.loggers, *trainer.callbacks)
        context = self.precision_plugin.forward_context
        given = [*args, *kwargs.values()]
        batch, rest = given[0], given[1:]
        return Step(module, name, batch, tuple(rest), context, name == "training_step", self.root_device, shared)

    def _key(self, number: int) -> tuple[int, int]:
        return torch.initial_seed() + self.groups.data.rank, number
