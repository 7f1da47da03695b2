"""What rules once misjudged is one device's, under every layout that once did otherwise; see `tests.law.found`."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_par import HybridParallelStrategy
from lightning_par.pipeline.part import StagesPart
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import long, slow
from tests.law.found import (
    FOUND,
    MEMORY,
    REFUSED,
    AverageOfParts,
    C,
    CountsKinds,
    CyclesLayers,
    HookThatLeavesLate,
    RegistersInLayer,
    RegistersOnItself,
    RenewsCodebook,
    RoutesAndCounts,
    RunsALayerAgain,
    TakesFromHooks,
    TeacherAndDecision,
    TooManyKinds,
    WritesWhatIsGiven,
)
from tests.law.strange import (
    STRANGE,
    CountsAtPlaces,
    CountsInPlace,
    CountsInViews,
    DoesWithoutLater,
    FillsAgain,
    GivesItsWeights,
    KeepsWhatNoneCanMake,
    LooksAtViews,
    OnPoints,
    ReversesItself,
    UpdatesAndComputes,
)

STEPS = 3
CUT = (
    "CallsAgainLater",
    "Scaled",
    "CountsRows",
    "Numbered",
    "CountsCalls",
    "CriterionOverBatch",
    "Teacher",
    "TypeAs",
    "Guarded",
    "LogsAMetric",
    "LossOfRows",
    "TurnsSums",
)
"""Those that stay cut into microbatches: it is safe, and faster."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"pipeline_parallel_size": 2},
    "placement": {"placement": {"a": 0, "b": 1}},
    "tensor": {"tensor_parallel_size": 2},
}
MEMORY_LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "residual": {"tensor_parallel_size": 2, "shard_residual": True},
    "sequence": {"sequence_parallel_size": 2, "sequence_dim": 1},
    "fsdp x sequence": {"data_parallel": "fsdp", "sequence_parallel_size": 2, "sequence_dim": 1},
}

BY_THEMSELVES = {
    kind.__name__: kind
    for kind in (
        AverageOfParts,
        CountsAtPlaces,
        CountsInPlace,
        CountsInViews,
        CountsKinds,
        CyclesLayers,
        DoesWithoutLater,
        FillsAgain,
        GivesItsWeights,
        HookThatLeavesLate,
        KeepsWhatNoneCanMake,
        LooksAtViews,
        OnPoints,
        RegistersInLayer,
        RegistersOnItself,
        RenewsCodebook,
        ReversesItself,
        RoutesAndCounts,
        RunsALayerAgain,
        TakesFromHooks,
        TeacherAndDecision,
        TooManyKinds,
        UpdatesAndComputes,
        WritesWhatIsGiven,
    )
}


class _Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.microbatches = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        parts = getattr(trainer.strategy, "parts", None)
        stages = None if parts is None else parts.of(StagesPart)
        self.microbatches = 0 if stages is None else stages.spread.microbatches


class Batches:
    """Made anew for each epoch, since a step may change what it is given."""

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Any:
        return iter(_batches())


def _batches() -> list[Any]:
    g = torch.Generator().manual_seed(1)
    return [
        [torch.randn(4, 6, C, generator=g, dtype=torch.float64), torch.randint(0, 4, (4,), generator=g)]
        for _ in range(STEPS)
    ]


def _fit(
    name: str, layout: dict[str, Any] | None, ranks: int = 2
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], int]:
    """Losses, weights and logged values, and into how many microbatches the last batch was cut."""
    seed_everything(0, verbose=False)
    module, losses = (FOUND | MEMORY | REFUSED | STRANGE | BY_THEMSELVES)[name](), _Losses()
    if layout is not None and "placement" in layout:
        places = {"a": 0, "b": 1}
        others = {name: 1 for name, child in module.named_children() if any(True for _ in child.parameters())}
        layout = {"placement": {**others, **places}}
    devices: Any = (
        {"devices": 1} if layout is None else {"devices": ranks, "strategy": HybridParallelStrategy(**layout)}
    )
    trainer = Trainer(
        accelerator="cpu", precision="64-true", max_epochs=1, callbacks=[losses], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, **devices,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, Batches(), Batches() if is_overridden("validation_step", module) else None)
    metrics = {key: value.detach().double() for key, value in trainer.callback_metrics.items()}
    metrics |= {"python": torch.tensor(random.random()), "numpy": torch.tensor(np.random.random())}
    weights = {key: value.detach().clone() for key, value in module.state_dict().items()}
    return losses.losses, weights, metrics, losses.microbatches


def _fit_all(names: list[str], layout: dict[str, Any] | None, ranks: int = 2) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = _fit(name, layout, ranks)
        except (ValueError, NotImplementedError) as error:  # a refusal before training, on all ranks
            found[name] = str(error)
    return found


def _differences(one: Any, other: Any) -> list[str]:
    found = []
    for a, b in zip(one[0], other[0], strict=True):
        if abs(a - b) > 1e-9 * max(1.0, abs(a)):
            found.append(f"losses {one[0]} != {other[0]}")
            break
    for what in (1, 2):
        found += [key for key in one[what] if not torch.allclose(one[what][key], other[what][key], rtol=0, atol=1e-9)]
    return found


def _wrong(
    pool: Pool, names: list[str], layout: dict[str, Any], ranks: int = 2
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What differs from one device, or was refused, by name; and what each rank found."""
    (reference,) = pool.run(1, _fit_all, names, None)
    results = pool.run(ranks, _fit_all, names, layout, ranks)
    wrong = {
        name: result[name] if isinstance(result[name], str) else found
        for result in results
        for name in names
        if isinstance(result[name], str) or (found := _differences(reference[name], result[name]))
    }
    return wrong, results


PARTS = 4  # jobs for the rows of `FOUND`, each with a time of its own on a slow machine


@slow(but=["tensor-2"])
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_misjudged_is_one_devices(pool: Pool, layout: str, part: int) -> None:
    names = list(FOUND)[part::PARTS]
    wrong, results = _wrong(pool, names, LAYOUTS[layout])
    assert not wrong, list(wrong)
    if layout == "pipeline":
        assert [name for name in CUT if name in names and results[0][name][3] < 2] == []


@long()
@slow("pipeline")
@pytest.mark.parametrize("layout", ["pipeline", "placement"])
def test_what_public_packages_do_is_one_devices(pool: Pool, layout: str) -> None:
    assert _wrong(pool, list(STRANGE), LAYOUTS[layout])[0] == {}


@slow("pipeline", "sequence", "fsdp")
@pytest.mark.parametrize("layout", ["tensor", "placement", "pipeline", "sequence", "fsdp"])
def test_objects_that_hold_tensors_and_run_functions_on_them_are_followed(pool: Pool, layout: str) -> None:
    layouts = {**MEMORY_LAYOUTS, **LAYOUTS, "fsdp": {"data_parallel": "fsdp"}}
    assert _wrong(pool, ["OnPoints"], layouts[layout])[0] == {}


@long("pipeline")
@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_modules_that_update_and_compute_are_no_metrics_for_that(pool: Pool, layout: str) -> None:
    assert _wrong(pool, ["UpdatesAndComputes"], LAYOUTS[layout])[0] == {}


def test_what_layers_keep_may_be_such_that_no_other_rank_can_make_it(pool: Pool) -> None:
    assert _wrong(pool, ["KeepsWhatNoneCanMake"], {"pipeline_parallel_size": 2, "microbatches": 1})[0] == {}


@long()
def test_a_tables_views_at_places_that_the_model_tells_are_written_layer_by_layer_alone(pool: Pool) -> None:
    names = ["CountsAtPlaces", "CountsInPlace", "CountsInViews", "LooksAtViews"]
    assert _wrong(pool, names, LAYOUTS["pipeline"])[0] == {}
    wrong, _ = _wrong(pool, names[2:], {**LAYOUTS["pipeline"], "microbatches": 2})
    assert list(wrong) == names[2:]
    assert "`__setitem__` writes a value that depends on the model into a tensor that" in wrong["LooksAtViews"]
    assert "`add_` writes into a part of a tensor that all stages of the pipeline have" in wrong["CountsInViews"]


@long()
@slow("residual", "fsdp x sequence", "tensor")
@pytest.mark.parametrize("layout", MEMORY_LAYOUTS)
def test_what_shares_memory_on_one_device_is_one_devices(pool: Pool, layout: str) -> None:
    assert not _wrong(pool, list(MEMORY), MEMORY_LAYOUTS[layout])[0]


def test_a_teacher_that_takes_the_memory_of_what_is_made_of_parts_is_one_devices(pool: Pool) -> None:
    assert _wrong(pool, ["MovesATeacher"], MEMORY_LAYOUTS["tensor"])[0] == {}


@pytest.mark.parametrize("name", REFUSED)
def test_one_memory_split_along_two_dims_is_refused_once_both_are_written(pool: Pool, name: str) -> None:
    wrong, _ = _wrong(pool, [name], LAYOUTS["tensor"])
    assert "were made one memory" in wrong[name] and "shapes (4, 8) and (8, 4)" in wrong[name]


def test_what_was_refused_without_need_is_one_devices(pool: Pool) -> None:
    names = ["AverageOfParts", "CountsKinds", "FillsAgain", "MatchesTargets", "RemembersATable", "RemembersByObject"]
    assert _wrong(pool, [*names, "RenewsCodebook", "RoutesTokens"], LAYOUTS["pipeline"])[0] == {}


def test_what_a_later_batch_is_told_and_its_code_catches_is_an_error(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match="need one another, which none of the first batch did"):
        pool.run(2, _fit, "DoesWithoutLater", LAYOUTS["pipeline"])


@slow()
def test_a_layer_that_hands_out_a_loss_and_counts_is_one_devices(pool: Pool) -> None:
    assert _wrong(pool, ["RoutesAndCounts"], LAYOUTS["pipeline"])[0] == {}


@pytest.mark.parametrize("layout", ["pipeline", "placement"])
def test_a_step_whose_backward_calls_layers_of_two_stages_again_is_refused(pool: Pool, layout: str) -> None:
    wrong, _ = _wrong(pool, ["ReversesItself"], LAYOUTS[layout])
    assert "it calls 'a' and 'b' in a torch.autograd.Function, whose backward may call both" in wrong["ReversesItself"]
    assert "TensorParallelStrategy" in wrong["ReversesItself"]


def test_layers_that_a_backward_adds_gradients_to_are_refused_where_those_are_shares(pool: Pool) -> None:
    wrong, _ = _wrong(pool, ["RunsALayerAgain"], MEMORY_LAYOUTS["sequence"])
    assert "_Again is given a Linear, to whose weights its backward may add" in wrong["RunsALayerAgain"]
    assert _wrong(pool, ["RunsALayerAgain"], LAYOUTS["tensor"])[0] == {}


@pytest.mark.parametrize("layout", [LAYOUTS["tensor"], {"data_parallel": "fsdp"}], ids=["tensor", "fsdp"])
def test_functions_that_are_given_a_layers_weights_train_these(pool: Pool, layout: dict[str, Any]) -> None:
    assert _wrong(pool, ["GivesItsWeights"], layout)[0] == {}


@slow()
@pytest.mark.parametrize("other", [LAYOUTS["tensor"], {"data_parallel": "fsdp"}], ids=["tensor", "fsdp"])
def test_functions_of_microbatches_are_given_whole_weights(pool: Pool, other: dict[str, Any]) -> None:
    assert _wrong(pool, ["GivesItsWeights"], {**LAYOUTS["pipeline"], **other}, ranks=4)[0] == {}


def test_more_kinds_than_a_count_says_are_refused_where_other_stages_go_by_it(pool: Pool) -> None:
    with pytest.raises(RanksFailedError, match="minlength=2 says that there are 2 kinds"):
        pool.run(2, _fit, "TooManyKinds", LAYOUTS["pipeline"])


class BadBatches(Batches):
    def __iter__(self) -> Any:
        batches = _batches()
        batches[1][0][0, 0, 0] = float("nan")
        return iter(batches)


def _fit_a_guarded(layout: dict[str, Any] | None) -> tuple[str, int]:
    devices: Any = {"devices": 1} if layout is None else {"devices": 2, "strategy": HybridParallelStrategy(**layout)}
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, precision="64-true", **devices,
    )  # fmt: skip
    with pytest.raises(ArithmeticError) as caught:
        trainer.fit(FOUND["Guarded"](), BadBatches())  # type: ignore[arg-type]
    return str(caught.value), trainer.global_step


@long()
@slow(but=["pipeline"])
@pytest.mark.parametrize("layout", ["pipeline", "placement"])
def test_a_guard_raises_on_all_ranks_what_it_raises_on_one_device(pool: Pool, layout: str) -> None:
    layouts = {**LAYOUTS, "placement": {"placement": {"a": 0, "b": 1}, "microbatches": 2}}
    assert pool.run(1, _fit_a_guarded, None) == [("Loss is NaN, training stopped.", 1)]
    assert pool.run(2, _fit_a_guarded, layouts[layout]) == [("Loss is NaN, training stopped.", 1)] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_that_an_iterator_gives_are_refused(pool: Pool, layout: str) -> None:
    wrong, _ = _wrong(pool, ["CyclesLayers"], LAYOUTS[layout])
    assert "self.turns gives a Linear" in wrong["CyclesLayers"]


@long()
@slow("placement")
@pytest.mark.parametrize("layout", ["pipeline", "placement"])
def test_hooks_that_a_model_registers_as_it_runs_are_on_all_ranks(pool: Pool, layout: str) -> None:
    assert _wrong(pool, ["RegistersInLayer", "TakesFromHooks"], LAYOUTS[layout])[0] == {}


def test_a_hook_that_a_layer_registers_on_itself_as_it_runs_is_refused_by_name(pool: Pool) -> None:
    wrong, _ = _wrong(pool, ["RegistersOnItself"], LAYOUTS["pipeline"])
    assert "A hook on self.b is registered as 'b' runs" in wrong["RegistersOnItself"]


@long("placement")
@pytest.mark.parametrize("layout", ["placement", "tensor"])
def test_a_weight_that_the_step_moves_is_moved_behind_its_use(pool: Pool, layout: str) -> None:
    assert _wrong(pool, ["TeacherAndDecision"], LAYOUTS[layout])[0] == {}


def test_what_is_first_looked_at_without_gradients_trains(pool: Pool) -> None:
    assert _wrong(pool, ["MeasuredFirst"], MEMORY_LAYOUTS["residual"])[0] == {}


@long("pipeline")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_that_an_iterator_gives_again_is_written_or_refused(pool: Pool, layout: str) -> None:
    wrong, _ = _wrong(pool, ["WritesWhatIsGiven"], LAYOUTS[layout])
    assert not wrong or "in place, which an iterator gave it" in wrong["WritesWhatIsGiven"]


@long()
def test_a_hook_that_leaves_in_a_later_step_is_one_devices_or_refused(pool: Pool) -> None:
    assert _wrong(pool, ["HookThatLeavesLate"], LAYOUTS["placement"])[0] == {}
    with pytest.raises(RanksFailedError, match="A hook on self.b is removed as 'b' runs on a microbatch"):
        pool.run(2, _fit_all, ["HookThatLeavesLate"], LAYOUTS["pipeline"])
