"""A module recorded once, priced under any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from lightning_par.pipeline.check_run import refuse_fetching
from lightning_par.pipeline.plan.no_schedule import by_hand
from lightning_par.pipeline.plan.units import walk
from lightning_par.planner.layouts.candidate import Candidate, read_candidate
from lightning_par.planner.layouts.stage_trial import ASKER, Staged, StageTrial
from lightning_par.planner.machine.machines import Machine
from lightning_par.planner.machine.precisions import read_precision
from lightning_par.planner.memory.weight_copies import sharing_stages
from lightning_par.planner.messages.clipped import Clip, read_clip
from lightning_par.planner.messages.dried import Alike, DryRuns
from lightning_par.planner.messages.stored_parts import stored_part
from lightning_par.planner.predict import predict
from lightning_par.planner.prediction import ModuleUses, PlannedRun, Prediction
from lightning_par.planner.recording.batch_sizes import count_tokens, first_samples
from lightning_par.planner.recording.build import build_module, build_with_values
from lightning_par.planner.recording.by_hand import optimizes_by_hand, refuse_of_trainer
from lightning_par.planner.recording.given_batch import Given
from lightning_par.planner.recording.held_values import record_with_held
from lightning_par.planner.recording.islands import with_islands_apart
from lightning_par.planner.recording.make_profile import make_profile
from lightning_par.planner.recording.optimizer_state import optimizer_state
from lightning_par.planner.recording.profile import Profile
from lightning_par.planner.recording.record import record
from lightning_par.planner.recording.recorded import RecordedStep, casting
from lightning_par.planner.recording.stages import StageCut, cut_stages
from lightning_par.planner.replay.place import Place
from lightning_par.planner.replay.replay import replay
from lightning_par.planner.replay.stage_replay import StageReplay
from lightning_par.planner.replay.storage import Storage
from lightning_par.planner.times.local_work import Recompute
from lightning_par.planner.unknowns import unknowns, unreckoned, weights_alone
from lightning_par.private.pytree import tree_map
from lightning_par.tensor.plan import deal


class Planner:
    """A module's step, recorded once without memory, and what layouts of it cost.

    Args:
        module: a LightningModule, its class, or a function that makes one.
        batch: one batch, as one replica's training step gets it; or as a Trainer loads it.
        machine: that it is to run on.
        precision: as `read_precision` takes it.
        recompute: what backward computes again.
        fused: whether functions that walk over memory are fused, as by torch.compile.
        clip: of gradients.
        asynchronous: whether a tensor axis moves tokens beside products, in chunks, where that pays; engines that do
            not are predicted without.

    Raises:
        ValueError: the module can't be built, its step can't be run without values, or it takes no such clip.
    """

    def __init__(
        self,
        module: Any,
        batch: Any,
        machine: Machine,
        precision: str | int = "32-true",
        recompute: Recompute = "none",
        fused: bool = True,
        clip: Clip = "",
        asynchronous: bool = True,
    ) -> None:
        self.machine, self.precision, self.clip = machine, read_precision(precision), clip
        self.asynchronous = asynchronous
        given = batch if isinstance(batch, Given) else None
        loaded = batch if given is None else given.batch
        built: nn.Module = build_module(module, loaded)
        refuse_of_trainer(built, clip)
        self.name = type(built).__name__
        self.optimizer = optimizer_state(built)
        built = built.to(self.precision.dtype)
        source, batch = module, tree_map(self._cast, loaded)

        def with_values() -> nn.Module:
            if isinstance(source, nn.Module):
                return built
            return build_with_values(source, loaded).to(self.precision.dtype)

        self.untransferred = ""
        self.batch = batch = batch if given is None else self._transferred(given, built, with_values, batch)

        def recorded(module: nn.Module) -> RecordedStep:
            return record(module, batch, self.precision.autocast, fused, machine.gpu)

        try:
            built, self.step = record_with_held(built, with_values, recorded)
        except ValueError as error:
            raise ValueError(f"{error} {weights_alone(built, self.precision, self.optimizer)}") from error
        self.trial = StageTrial(with_values, batch, partial(casting, self.precision.autocast), self.step.seen)
        self.step, self._dealt = with_islands_apart(self.step)
        tokens = count_tokens(batch) / self.step.samples
        self.recompute, self.fused, self.tokens = recompute, fused, tokens
        calls = tuple(call.path for call in self.step.calls)
        step = self.step
        norms = sum(read_clip(*clip) == "norm" for clip in step.recording.heard.clips)
        self.tree = ModuleUses(built, calls, step.uses, step.backwards, step.trained, step.hooked_again, norms)
        self._profiles: dict[Any, Profile] = {}
        self._cuts: dict[Any, StageCut] = {}
        self._steps: dict[int, RecordedStep] = {}
        self._sent: dict[Any, tuple[StageReplay, ...]] = {}
        self.staged: list[Staged] = []
        self.told: dict[Candidate, None] = {}  # layouts of which it was asked what ranks send
        self.dry_runs = DryRuns(
            source, Given(loaded) if given is None else given, step.samples, precision, clip, machine.devices,
            len(step.events),
        )  # fmt: skip

    def _transferred(self, given: Given, built: nn.Module, with_values: Callable[[], nn.Module], batch: Any) -> Any:
        """What hooks around a batch's transfer make of ``batch``; itself where there are none, or none that can run."""
        hooks = given.hooks(built)
        try:
            return given.transferred(with_values, hooks, batch) if hooks else batch
        except ValueError as error:
            self.untransferred = f"{' and '.join(hooks)} of the batch, which {error}"
            return batch

    @property
    def own_functions(self) -> list[str]:
        """The user's autograd functions that were counted as those that they call, on whatever part of the batch."""
        return [*dict.fromkeys(x for step in (self.step, *self._steps.values()) for x in step.own_functions)]

    @property
    def notes(self) -> list[str]:
        """What is assumed, and what is not known."""
        return unknowns(self)

    @property
    def by_hand(self) -> bool:
        """Whether the step runs backward and the optimizers itself."""
        return optimizes_by_hand(self.tree.module)

    @property
    def replays(self) -> bool:
        """Whether live tensors are counted in replays of the step, as where its functions run one by one."""
        return not self.fused and self.recompute == "none"

    def like(self, recompute: Recompute) -> Planner:
        """As this one, but for what backward computes again."""
        other = copy(self)
        other.recompute = recompute
        return other

    def with_precision(self, precision: str) -> Planner:
        """As this one, but for the precision: the step is recorded anew."""
        return Planner(
            self.tree.module, self.batch, self.machine, precision, self.recompute, self.fused, self.clip,
            self.asynchronous,
        )  # fmt: skip

    def step_of(self, micro: float) -> RecordedStep:
        """The step on the first ``micro`` samples of the batch."""
        count = round(micro)
        if count >= self.step.samples or count < 1:
            return self.step
        if count not in self._steps:
            batch = first_samples(self.batch, count, self.step.samples)
            autocast, gpu = self.precision.autocast, self.machine.gpu
            step = record(self.tree.module, batch, autocast, self.fused, gpu)
            self._steps[count] = step if self.step.folds else step.unfolded()
        return self._steps[count]

    def sent(self, one: Candidate, count: int, asked: Any, tensor: int, sequence: int) -> tuple[StageReplay, ...]:
        """What one microbatch is to a rank in each stage, run by the rules."""
        layout, step = one.layout, self.step_of(one.micro)
        if not one.shard_residual or self._divides(layout.tensor):  # else ranks that hold as much may have more tokens
            tensor = self.profile(layout.tensor, count, asked).alike[tensor]
        if self._divides(2 * layout.sequence):
            sequence = 0  # all have as many tokens
        place = Place(
            (layout.tensor, tensor),
            (layout.sequence, sequence),
            one.shard_residual,
            one.attention,
            not self.fused,
            one.splits_backward and not self.fused,
            () if self.fused else tuple(sorted(sharing_stages(one, self._run(0)))),
            self.machine.gpu,
            one.microbatches > 1,
            self._looked_at(one, count, asked),
        )
        storage = None
        if one.stored and not self.fused and layout.pipeline == 1 and layout.data * layout.sequence > 1:
            held = self.profile(layout.tensor, count, asked).stages.held([0])
            storage = Storage(self.tree.module, held, layout.data * layout.sequence, not one.reshard)
        key = place, step.samples, count, str(asked), storage and (storage.ranks, storage.keep)
        if key not in self._sent:
            dealt = self._dealt[layout.tensor] if step is self.step else deal(step.folded, layout.tensor)
            cut = cut_stages(self.tree.module, step, count, asked, self._cut(count, asked))
            self._sent[key] = replay(step, dealt, cut, place, storage)
        return self._sent[key]

    def _looked_at(self, one: Candidate, count: int, asked: Any) -> frozenset[str]:
        """Parameters whose hooks meet sums over the axes: of one stored in parts, ranks have parts of the sum."""
        held = self.profile(one.layout.tensor, count, asked).stages.held(range(count))
        ranks = one.layout.data * one.layout.sequence
        hooked = (stored_part(x, 0, ranks, 0, one.stored) for x in held if x.name in self.tree.hooked)
        return frozenset(part.parameter.name for part in hooked if not part.message)

    def _divides(self, ranks: int) -> bool:
        """Whether ``ranks`` have as many tokens each, as far as that is known."""
        return bool(self.sequences) and all(length % ranks == 0 for length in self.sequences)

    def profile(self, ranks: int, count: int = 1, asked: Any = None) -> Profile:
        """Over ``ranks`` ranks of the tensor axis, in ``count`` stages, which begin where ``asked`` says.

        Raises:
            ValueError: the step can't be cut so.
        """
        key = count, str(asked)
        if ranks not in self._dealt:
            self._dealt[ranks] = deal(self.step.folded, ranks)
        if (ranks, key) not in self._profiles:
            made = make_profile(self.step, self._dealt[ranks], ranks, self._cut(count, asked))
            self._profiles[ranks, key] = made
        return self._profiles[ranks, key]

    def _cut(self, count: int, asked: Any) -> StageCut:
        key = count, str(asked)
        if key not in self._cuts:
            self._cuts[key] = cut_stages(self.tree.module, self.step, count, asked)
        return self._cuts[key]

    def evaluate(self, layout: Mapping[str, Any], devices: int, samples: int | None = None) -> Prediction:
        """What a layout costs, given as `HybridParallelStrategy`'s arguments.

        Raises:
            ValueError: the layout can't be; the message says why.
        """
        asked = {key: value for key, value in layout.items() if key != "stages"}
        one = read_candidate(asked, devices, self.step.samples, samples)
        if one.layout.pipeline > 1 and self.no_pipeline:
            raise ValueError(self.no_pipeline)
        refuse_of_trainer(self.tree.module, accumulated=one.accumulated)
        return self.price(one, devices, layout.get("stages"))

    def as_run(self, layout: Mapping[str, Any], devices: int, samples: int | None = None) -> Mapping[str, Any]:
        """``layout`` as a run would have it, which leaves a batch whole whose samples need one another.

        Args:
            layout: `HybridParallelStrategy`'s arguments.
            devices: processes.
            samples: of one step of the optimizer, over all replicas.

        Raises:
            ValueError: a run would not start; the message is the run's.
        """
        one = read_candidate({k: v for k, v in layout.items() if k != "stages"}, devices, self.step.samples, samples)
        if one.layout.pipeline == 1:
            return layout
        asked = "auto" if "micro_batch_size" in layout else layout.get("microbatches", "auto")
        found = self.ask(one, asked, layout.get("stages"), bool(layout.get("allow_batch_coupling", False)))
        if found.refused:
            raise ValueError(found.refused)
        rest = {key: value for key, value in layout.items() if key != "micro_batch_size"}
        return {**rest, "microbatches": 1} if found.whole else layout

    def ask(self, one: Candidate, asked: Any = "auto", stages: Any = None, coupled: bool = False) -> Staged:
        """See `StageTrial.ask`; what it finds is in `notes`."""
        found = self.trial.ask(one, asked, stages, coupled)
        self.staged.append(found)
        return found

    @cached_property
    def no_pipeline(self) -> str:
        """Why there can be no pipeline, as far as that is seen without a trial; empty where there can."""
        module = self.tree.module
        if optimizes_by_hand(module):  # for steps that run layer by layer nothing is planned
            return by_hand(module)
        try:
            refuse_fetching(module, "training_step", ASKER)
        except ValueError as error:
            return str(error)
        return ""

    def no_sequence(self, ranks: int) -> str:
        """Why the sequence axis can't have that many ranks; empty where it can."""
        lengths = self.sequences
        if not lengths:
            return "the step calls no scaled_dot_product_attention"
        short = min(lengths)
        return "" if short % (2 * ranks) == 0 else f"{short} tokens are no multiple of {2 * ranks}"

    @cached_property
    def sequences(self) -> frozenset[int]:
        """Tokens that attention runs over."""
        operations = [op for unit in self.profile(1).kinds for op in unit.operations]
        return frozenset(op.product.m for op in operations if op.kind == "attention" and op.product is not None)

    @cached_property
    def layers(self) -> int:
        """What can be placed on stages of its own."""
        root = self.step.root
        return 0 if root is None else sum(not any(x.numel for x in call.children) for call in walk(root) if call.numel)

    def price(self, one: Candidate, devices: int, stages: Any = None, rough: bool = False) -> Prediction:
        """What ``one`` costs; a ``rough`` price goes by formulas for the schedule.

        Raises:
            ValueError: it can't be; the message says why.
        """
        profile, sent = self.profile(one.layout.tensor, one.stages, stages), partial(self.sent, one, one.stages, stages)
        return predict(profile, one, self._run(devices), sent, rough, partial(self._dried, one, stages))

    def _dried(self, one: Candidate, stages: Any, *place: int) -> Mapping[str, float] | None:
        """What the rank at a place sends, by a dry run, if formulas don't say all of it."""
        self.told[one] = None
        if one.layout.world_size == 1 or self.recompute != "none" or not any(x.of(one) for x in unreckoned(self)):
            return None
        even = not one.shard_residual or self._divides(one.layout.tensor), self._divides(2 * one.layout.sequence)
        alike = Alike(self.profile(one.layout.tensor, one.stages, stages), one, *even)
        return self.dry_runs.sent(one, stages, alike, *place)

    def _run(self, devices: int) -> PlannedRun:
        return PlannedRun(
            self.machine, devices, self.precision, self.optimizer, self.recompute, self.fused, self.tokens, self.tree,
            self.step.casts_once, self.clip, self.asynchronous,
        )  # fmt: skip

    def _cast(self, x: Any) -> Any:
        return x.to(self.precision.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
