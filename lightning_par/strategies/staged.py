"""What strategies share whose ranks each hold a part of the model's layers."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.fsdp.apply import unstore
from lightning_par.fsdp.prefetch import use_throughout
from lightning_par.mesh.handshake import Meeting
from lightning_par.optim.value_places import StagePlaces
from lightning_par.pipeline.between_steps.module_calls import Outside
from lightning_par.pipeline.between_steps.released_gradients import spent_gradients
from lightning_par.pipeline.between_steps.send_away import Once, agree_on_buffers, bring_back
from lightning_par.pipeline.program.step import Step
from lightning_par.pipeline.run.engine import Engine
from lightning_par.pipeline.run.located import Run
from lightning_par.pipeline.run.verification import agreed, verify
from lightning_par.pipeline.stages import Spread
from lightning_par.private.compiler import is_compiled_wrapper
from lightning_par.sharded.tensor import leaf
from lightning_par.strategies.base import StrategyMixin
from lightning_par.strategies.entry_points import STEPS, fetches_itself
from lightning_par.strategies.launch import StartMethod
from lightning_par.strategies.namespace import Namespace
from lightning_par.strategies.rank_numbers import RankInStep


class StagedMixin(StrategyMixin):
    """Runs the steps of a module whose layers are spread over the ranks of the pipeline axis.

    Subclasses say how they are spread: `make_spread`.
    """

    def __init__(self, process_group_backend: str | None, timeout: timedelta | None, start_method: StartMethod) -> None:
        super().__init__(process_group_backend, timeout, start_method)
        self._spread: Spread | None = None
        self._engine: Engine | None = None
        self._outside: Outside | None = None
        self._unverified = False
        self.verify = True

    def make_spread(self, timeout: timedelta) -> Spread:
        """How the module of this run is to be spread; ``timeout`` is that of process groups."""
        raise NotImplementedError

    @property
    def axis_name(self) -> str:
        """What the ranks along the pipeline axis are called, in messages and in the ledger."""
        return "pipeline"

    @property
    def engine(self) -> Engine | None:
        """What runs the steps; None before a run has spread the model, and where there is one stage."""
        return self._engine

    # --------------------------------------------------------------------------------------------------- around a run

    def setup(self, trainer: Any) -> None:
        module = self.lightning_module
        assert module is not None
        if self.groups.pipeline.size > 1 and trainer.state.fn.value == "fit" and not module.automatic_optimization:
            raise ValueError(
                f"{type(module).__name__} optimizes by hand (automatic_optimization = False): {type(self).__name__} "
                "runs the backwards before the step returns, so there is nothing for manual_backward to do. Use "
                "TensorParallelStrategy, or automatic optimization with one optimizer."
            )
        if self.groups.pipeline.size > 1:
            _refuse_compiled(module)
            _refuse_fetching(module, type(self).__name__)
            if trainer.state.fn.value == "fit":
                _refuse_pruning(trainer.callbacks, self.namespace, type(self).__name__)
        self._engine = None
        self.groups.pipeline.name = self.axis_name
        self._refuse_parts_without_room()
        unstore(module)
        bring_back(module, self.groups.pipeline)  # a run that an exception ended left its stages
        super().setup(trainer)

    def _shard_model(self, trainer: Any) -> None:
        super()._shard_model(trainer)
        if self.groups.pipeline.size > 1:
            assert self.lightning_module is not None
            timeout = self.timeout or timedelta(minutes=30)
            self._spread = self.make_spread(timeout)
            self._engine = self._spread.apply(trainer, self.lightning_module, self.root_device)
            self._engine.context = self.precision_plugin.forward_context
            self._engine.verify = self.verify
            # Where each microbatch gathers weights, replicas with other numbers of them would wait for one another.
            gathers = self._storing is not None and not self._storing.throughout
            self._unverified = self.verify and trainer.state.fn.value == "fit" and not gathers
            self._engine.inner = self.groups.stage_of_replica.size > 1
            if self._storing is not None and not self._storing.throughout:
                self._engine.agree = self._storing.agree
            axis = self.groups.pipeline
            meeting = Meeting(axis, self.timeout, "pipeline")
            self._outside = Outside(self.lightning_module, self._spread.placement, axis, self.root_device, meeting)

    @property
    def global_rank(self) -> int:
        """This process's number; within a step see `rank_numbers.RankInStep`."""
        rank = super().global_rank
        if Run.current is None or self._groups is None:
            return rank
        return RankInStep(self.groups.data.rank, self.groups.replica.ranks[0], dist.get_rank())

    @property
    def is_global_zero(self) -> bool:
        return super().is_global_zero if Run.current is None else self.global_rank == 0

    def _holding(self) -> StagePlaces | None:
        if self._spread is None or self.groups.pipeline.size == 1:
            return None
        assert self.lightning_module is not None
        axis, placement = self.groups.pipeline, self._spread.placement
        places = {id(p): placement.of(name, axis.size) for name, p in self.lightning_module.named_parameters()}
        return StagePlaces(
            axis, lambda p: place if len(place := places.get(id(p), ())) in range(1, axis.size) else None
        )

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

    def _counting(self) -> Once | None:
        if self._spread is None or self.lightning_module is None:
            return None
        return Once(self.lightning_module, self._spread.placement, self.groups.pipeline)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._spread is not None and self.lightning_module is not None:
            self._meet_after_exception()
            agree_on_buffers(self.lightning_module, self.groups.pipeline)
        return super().lightning_module_state_dict()

    def _unspread_model(self) -> None:
        if self._spread is not None and self.lightning_module is not None:
            trainer: Any = self.lightning_module.trainer
            self._engine = None  # what it watches may hold weights, as the weak references of an LSTM of one's own
            self._spread.undo(self.lightning_module, trainer.callbacks)
        self._spread = self._engine = None

    # ----------------------------------------------------------------------------------------------------------- steps

    @contextmanager
    def _draws(self, step: int) -> Generator[None, None, None]:
        with super()._draws(step), nullcontext() if self._outside is None else self._outside.step():
            yield

    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._outside is not None and closure_loss.requires_grad:
            closure_loss.register_hook(lambda _: self._forget_gradients())

    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._outside is not None:
            self._outside.end_backward()

    def _forget_gradients(self) -> None:
        if self._outside is not None:
            self._outside.forget_gradients()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._engine is None or self._spread is None:
            return super().training_step(*args, **kwargs)
        module: Any = self.lightning_module
        number = module.trainer.fit_loop.total_batch_idx
        scaler = getattr(self.precision_plugin, "scaler", None)
        # Lightning divides the loss before its backward: hooks on what the step made meet gradients of that.
        scale = (1.0 if scaler is None else scaler.get_scale()) / module.trainer.accumulate_grad_batches
        with self._draws(number):
            held = {n: p for n, p in module.named_parameters() if p.requires_grad and not is_elsewhere(p)}
            throughout = self._storing is not None and self._storing.throughout
            own = use_throughout([*held.values()]) if throughout else [leaf(p) for p in held.values()]
            step = self._make_step("training_step", args, kwargs)
            for p in spent_gradients(module, self.optimizers):
                p.grad = None
            named = dict(zip(held, own))
            if self._unverified:
                self._unverified = False
                self._verify(step, named, self._key(number))
            return self._engine.train(step, self._spread.microbatches, named, scale, self._key(number))

    def _verify(self, step: Step, named: Mapping[str, Tensor], key: tuple[int, ...]) -> None:
        """See `lightning_par.pipeline.run.verification`. All ranks must call it.

        Raises:
            RuntimeError: two runs of the step on one batch differ, or its gradients are not those of one device's
                parameters; on all ranks.
        """
        assert self._engine is not None and self._spread is not None
        wanted = 1 if self._spread.coupled else self._spread.microbatches
        verdict = agreed(
            self.groups.world.all_gather_object(verify(self._engine, step, wanted, named, key), "verification")
        )
        if verdict.moved is not None:
            raise RuntimeError(
                f"training_step gave something else in the second of two runs on the same batch: {verdict.moved}. "
                f"{type(self).__name__} runs it several times, and undoes what it changes in between, but something "
                "moves with each run that can't be seen: a generator, an iterator, a file, another library's state. "
                "Keep it in plain attributes, buffers or torch's generators, or use TensorParallelStrategy. "
                "verify=False trains all the same."
            )
        if verdict.unlike is not None:
            raise RuntimeError(verdict.unlike)
        if verdict.mixed is not None:
            self._spread.microbatches = 1
            _warn(
                f"Cut into microbatches, the first batch gave another value of {verdict.mixed} than whole: samples "
                "need one another in a way that was not seen. Batches are left whole (microbatches=1): slower.",
                self.global_rank,
            )

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
        if self._engine is not None and self._planning is not None:
            self._engine.tokens = self._planning.tokens(batch)
        return Step(module, name, batch, tuple(rest), context, name == "training_step", self.root_device, shared)

    def _key(self, number: int) -> tuple[int, int]:
        return torch.initial_seed() + self.groups.data.rank, number


def _warn(message: str, rank: int) -> None:
    if rank == 0:
        warnings.warn(message, stacklevel=2)


def _refuse_fetching(module: Any, strategy: str) -> None:
    for step in STEPS.values():
        if fetches_itself(getattr(module, step)):
            raise ValueError(
                f"{step} takes `dataloader_iter`, of which it fetches its batches itself. Ranks that share the layers "
                f"run a step several times on one batch, so {strategy} must have the batch before. Write `{step}(self, "
                "batch, batch_idx)`, or use TensorParallelStrategy."
            )


def _refuse_pruning(callbacks: Iterable[Any], namespace: Namespace, strategy: str) -> None:
    kind = namespace.from_pytorch("callbacks", "ModelPruning")
    if any(isinstance(callback, kind) for callback in callbacks):
        raise ValueError(
            "ModelPruning replaces weights by masked ones while it trains: parameters of other names, and masks that "
            f"each rank makes of its weights. Which rank holds which of them is settled before {strategy} trains. Use "
            "TensorParallelStrategy, or prune the trained model: torch.nn.utils.prune, after Trainer.fit."
        )


def _refuse_compiled(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if is_compiled_wrapper(child):
            raise ValueError(
                f"{name!r} is a wrapper that torch.compile made of a submodule. It holds on to weights, which can't go "
                f"to the ranks of other layers then. Compile in place: `self.{name}.compile()`."
            )
