"""Which module is called on which stage: balanced, or as the user says, or refused with a reason."""

from __future__ import annotations

import random
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn

from lightning_par.mesh.layout import Layout
from lightning_par.pipeline.plan.balance_time import UnitCall, costs_of, split
from lightning_par.pipeline.plan.schedule import make_forward_schedule, make_schedule
from lightning_par.pipeline.plan.stage_plan import StagePlan, make_stage_plan
from lightning_par.pipeline.plan.table import show_stages, stage_footer, stage_rows
from lightning_par.pipeline.plan.units import ModuleCall, choose_units, list_names
from lightning_par.pipeline.plan.user_stages import check_wishes
from lightning_par.strategies import startup_table


def leaf(path: str, flops: float = 1.0, numel: int = 1) -> ModuleCall:
    return ModuleCall(path, flops, numel)


def box(path: str, *children: ModuleCall, own: float = 0.0, closed: str | None = None) -> ModuleCall:
    numel = sum({child.path: child.numel for child in children}.values())
    return ModuleCall(path, own + sum(child.flops for child in children), numel, children, closed)


def block(path: str, closed: str | None = None) -> ModuleCall:
    parts = (leaf(f"{path}.norm", 0.0), leaf(f"{path}.attn", 4.0, 4), leaf(f"{path}.drop", 0.0, 0))
    return box(path, *parts, leaf(f"{path}.mlp", 8.0, 8), closed=closed)


def gpt(layers: int, head: float = 6.0, closed: str | None = None) -> ModuleCall:
    blocks = [block(f"net.blocks.{i}", closed) for i in range(layers)]
    return box("", box("net", leaf("net.tok", 0.0, 6), *blocks, leaf("net.head", head, 6)), leaf("loss", 0.1, 0))


def placed(plan: StagePlan) -> list[str]:
    return [list_names(stage.units) for stage in plan.stages]


# --- balanced ---


def test_a_gpt_is_cut_between_its_blocks() -> None:
    plan = make_stage_plan(gpt(8), 4)
    assert placed(plan) == [f"net.{names}" for names in ("tok, net.blocks.0-1", "blocks.2-3", "blocks.4-5")] + [
        "net.blocks.6-7, net.head"
    ]
    assert sum(stage.share for stage in plan.stages) == pytest.approx(1)
    assert plan.stages[0].numel == 6 + 2 * 13
    assert [stage for _, stage in plan.calls] == [0, 0, 0, 1, 1, 2, 2, 3, 3, 3]


def test_one_stage_is_the_whole_model() -> None:
    assert placed(make_stage_plan(gpt(3), 1)) == ["net"]


def test_a_costly_head_gets_a_stage_of_its_own() -> None:
    plan = make_stage_plan(gpt(6, head=40.0), 3)
    assert placed(plan) == ["net.tok, net.blocks.0-2", "net.blocks.3-5", "net.head"]


def test_blocks_that_do_not_divide_are_opened_where_that_helps() -> None:
    plan = make_stage_plan(gpt(3, head=0.0), 2)
    slowest = max(stage.share for stage in plan.stages)
    assert "net.blocks.1.attn" in plan.stages[0].units and slowest < 0.6
    assert "net.blocks.0" in plan.stages[0].units and "net.blocks.2" in plan.stages[1].units
    (closed,) = {max(s.share for s in make_stage_plan(gpt(3, 0.0, closed="reads a value"), 2).stages)}
    assert closed > 0.65


def test_equal_blocks_are_opened_together_where_several_stages_are_slowest() -> None:
    plan = make_stage_plan(gpt(6, head=0.0), 4)
    assert max(stage.share for stage in plan.stages) * 4 < 1.3


def test_a_unit_is_opened_until_there_are_as_many_as_stages() -> None:
    deep = box("", box("a", box("a.b", leaf("a.b.x"), leaf("a.b.y"), leaf("a.b.z"))))
    assert choose_units(deep, 1) == ("a",)
    assert choose_units(deep, 3) == ("a.b.x", "a.b.y", "a.b.z")


def test_a_u_net_is_cut_in_execution_order() -> None:
    names = ["down.0", "down.1", "mid", "up.1", "up.0", "out"]
    net = box("", box("unet", *(leaf(f"unet.{name}", 4.0) for name in names[:-1]), leaf("unet.out", 1.0)))
    plan = make_stage_plan(net, 3)
    assert placed(plan) == ["unet.down.0-1", "unet.mid, unet.up.1", "unet.up.0, unet.out"]


def test_a_module_called_twice_is_one_unit_and_may_be_on_two_stages() -> None:
    tied = leaf("tok", 4.0, 100)
    plan = make_stage_plan(box("", tied, leaf("a", 4.0), leaf("b", 4.0), tied), 2)
    assert plan.calls == (("tok", 0), ("a", 0), ("b", 1), ("tok", 1))
    assert [stage.units for stage in plan.stages] == [("tok", "a"), ("b", "tok")]
    assert plan.homes == {"tok": (0, 1), "a": (0,), "b": (1,)}


def test_no_unit_holds_another() -> None:
    inner = leaf("net.embed", 1.0)
    assert choose_units(box("", inner, box("net", inner, leaf("net.fc"))), 1) == ("net.embed", "net.fc")
    elsewhere = box("", box("a", leaf("a.x"), leaf("shared")), leaf("shared"))
    assert choose_units(elsewhere, 1) == ("a.x", "shared")


def test_what_is_opened_may_leave_nothing_that_opening_a_block_gives() -> None:
    block = box("block", leaf("block.up", 44.0), leaf("block.down", 44.0))
    root = box("", leaf("a", 3.0), box("s", leaf("s.weight")), block, leaf("head", 3.0))
    assert choose_units(root, 2, opened=["a", "s", "block.up", "block.down", "head"]) == ("s.weight", "block")


def test_what_is_opened_may_leave_nothing_that_could_begin_a_stage() -> None:
    root = box("", leaf("a"), box("b", leaf("b.weight")))
    with pytest.raises(ValueError, match="stages names 'b', of which nothing could begin a stage"):
        make_stage_plan(root, 2, ["b"], opened=["b", "b.weight"])


def test_code_between_units_counts_for_the_one_before() -> None:
    plan = make_stage_plan(box("", leaf("a", 2.0), leaf("softmax", 5.0, 0), leaf("b", 2.0), own=3.0), 2)
    assert [stage.share * 12 for stage in plan.stages] == pytest.approx([7.0, 5.0])


def test_no_other_cut_is_faster_or_as_fast_and_more_even() -> None:
    draw = random.Random(0)
    for _ in range(60):
        count, stages = draw.randint(3, 9), draw.randint(1, 3)
        calls = [UnitCall(str(draw.randint(0, 6)), draw.choice([0, 1, 2, 5]), 3) for _ in range(count)]
        costs = costs_of(calls)

        def value(starts: tuple[int, ...], calls: Any = calls, costs: Any = costs) -> tuple[int, ...]:
            runs = [range(a, b) for a, b in zip(starts, [*starts[1:], len(calls)])]
            sums = [sum(costs[i] for i in run) for run in runs]
            held = [sum({calls[i].path: calls[i].numel for i in run}.values()) for run in runs]
            return max(sums), sum(x**2 for x in sums), sum(x**2 for x in held)

        every = [(0, *cuts) for cuts in combinations(range(1, count), stages - 1)]
        assert value(split(calls, stages)) == min(map(value, every))


def test_thousands_of_calls_are_cut_quickly() -> None:
    calls = [UnitCall(str(i % 7), 1.0 + i % 3, 1) for i in range(4000)]
    starts = split(calls, 8)
    assert len(starts) == 8 and max(b - a for a, b in zip(starts, starts[1:])) <= 502


# --- the user's stages ---


def test_patterns_give_stages() -> None:
    wishes = {"net.tok": 0, "net.blocks.[01]": 0, "net.blocks.[23]": 1, "net.head": 1}
    assert placed(make_stage_plan(gpt(4), 2, wishes)) == ["net.tok, net.blocks.0-1", "net.blocks.2-3, net.head"]


def test_a_name_may_be_a_container_or_a_list_that_is_never_called() -> None:
    net = box("", box("enc", leaf("enc.a"), leaf("enc.b")), leaf("dec.0"), leaf("dec.1"))
    assert placed(make_stage_plan(net, 2, {"enc": 0, "dec": 1})) == ["enc", "dec.0-1"]
    assert placed(make_stage_plan(net, 2, {"enc": 0, "enc.?": 0, "dec.*": 1})) == ["enc.a, enc.b", "dec.0-1"]
    assert placed(make_stage_plan(net, 2, ["dec"])) == ["enc", "dec.0-1"]


def test_cut_points_begin_stages_and_open_what_is_around_them() -> None:
    plan = make_stage_plan(gpt(3), 3, ["net.blocks.1", "net.blocks.2.mlp"])
    assert placed(plan) == [
        "net.tok, net.blocks.0",
        "net.blocks.1, net.blocks.2.norm, net.blocks.2.attn",
        "net.blocks.2.mlp, net.head",
    ]


def test_a_cut_point_lets_a_tied_module_be_on_two_stages() -> None:
    tied = leaf("tok")
    plan = make_stage_plan(box("", tied, leaf("a"), leaf("b"), tied), 2, ["b"])
    assert plan.calls == (("tok", 0), ("a", 0), ("b", 1), ("tok", 1))


@pytest.mark.parametrize(
    "wishes, error, message",
    [
        ("net.head", TypeError, "must be a dict of module names or patterns to stages, or a list"),
        (3, TypeError, "got int"),
        ({}, ValueError, "names no module. Leave it out"),
        ({0: 1}, TypeError, "must be a str, not int"),
        ([1], TypeError, "a module name must be a str, not int"),
        ({"a": "0"}, TypeError, r"stages\['a'\] must be the index of a stage, an int, not '0'"),
        ({"a": True}, TypeError, "not True"),
        ({"a": -1}, ValueError, r"stages\['a'\] = -1 is negative"),
        (["a", "a"], ValueError, "names 'a' twice"),
    ],
)
def test_wishes_of_a_wrong_type_are_refused_at_once(wishes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_wishes(wishes)


ALL = {"net.tok": 0, "net.blocks.*": 0, "net.head": 1}


@pytest.mark.parametrize(
    "wishes, message",
    [
        ({**ALL, "net.heed": 1}, r"'net.heed', which matches no module that the step of GPT calls. Did.*'net.head'"),
        ({**ALL, "zzz": 1}, r"'zzz', which matches no module .* It calls net, net.tok, net.blocks.0-2"),
        ({"net.tok": 0, "net.head": 1}, r"gives 'net.blocks.0' no stage: it names 'net.tok': 0, 'net.head': 1. Add"),
        ({**ALL, "net.*": 1}, r"'net.tok' to two stages: stages\['net.tok'\] = 0 and stages\['net.\*'\] = 1"),
        ({**ALL, "net.head": 2}, r"stages\['net.head'\] = 2, but Pipe has the stages 0 to 1. Write one of these"),
        ({"net": 0}, "stage 1 would be empty: no module is given to it"),
        ({"net": 0, "loss": 1}, "stage 1 would be empty: 'loss' has no parameters"),
        (
            {"net.tok": 1, "net.blocks.*": 0, "net.head": 1},
            r"puts 'net.tok' on stage 1 and 'net.blocks.0' on stage 0, but the step calls 'net.blocks.0' after "
            r"'net.tok', .*Write stages\['net.blocks.\*'\] = 1 or more, or stages\['net.tok'\] = 0 or less",
        ),
        (["net.blocks.1", "net.head"], r"begins 3 stages, but Pipe needs 2: .* 1 in all"),
        (["net.tok"], "calls 'net.tok' first of all: stage 0 would be empty"),
        (["net"], "calls 'net' first of all"),
        (["net.blocks.0.drop"], r"'net.blocks.0.drop', which has no parameters. Name .* e.g. 'net.blocks.0.mlp'"),
        (["loss"], r"'loss', which has no parameters. Name a module that has some\.$"),
        (["net.blocks.9"], "Did you mean 'net.blocks."),
    ],
)
def test_wishes_that_do_not_fit_are_refused(wishes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_stage_plan(gpt(3), 2, wishes, asker="Pipe", module="GPT")


def test_cut_points_out_of_order_are_refused() -> None:
    with pytest.raises(
        ValueError, match="names 'net.blocks.0' after 'net.head', but .* in the order in which the step"
    ):
        make_stage_plan(gpt(3), 3, ["net.head", "net.blocks.0"])


def test_a_pattern_for_a_module_called_twice_points_to_cut_points() -> None:
    tied = leaf("tok")
    with pytest.raises(ValueError, match=r"'tok' is called several times.*stages=\['b'\]"):
        make_stage_plan(box("", tied, leaf("a"), leaf("b"), tied), 2, {"tok": 0, "a": 0, "b": 1})


def test_a_name_within_a_closed_module_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="'net.blocks.0.mlp', which is called by .*: reads a value. Write"):
        make_stage_plan(gpt(2, closed="reads a value"), 2, ["net.blocks.0.mlp"])


def test_more_stages_than_modules_are_refused() -> None:
    asker = "PipelineParallelStrategy over 4 ranks with schedule 'interleaved_1f1b'"
    with pytest.raises(ValueError) as caught:
        make_stage_plan(gpt(2, closed="reads a value"), 8, asker=asker, module="GPT")
    assert str(caught.value) == (
        f"{asker} needs 8 stages, but GPT has only 4 modules with parameters to place: net.tok, "
        "net.blocks.0-1, net.head. "
        "What can't be taken apart: net.blocks.0-1 (reads a value). "
        "Use fewer devices, or a schedule with fewer stages a rank."
    )
    with pytest.raises(ValueError, match="calls no module with parameters"):
        make_stage_plan(leaf("", 1.0, 3), 2)
    with pytest.raises(ValueError, match="at least 1"):
        make_stage_plan(gpt(2), 0)


# --- what is shown ---


def test_names_of_a_list_are_drawn_together() -> None:
    names = ["tok", "blocks.0", "blocks.1", "blocks.3", "h.0.attn", "h.1.attn", "0", "1"]
    assert list_names(names) == "tok, blocks.0-1, blocks.3, h.0-1.attn, 0-1"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.tok.weight
        self.scale = nn.Parameter(torch.ones(5))


HOLDERS = {"tok.weight": (0, 1), "scale": (1,)} | {
    f"blocks.{i}.{kind}": (i // 2,) for i in range(4) for kind in ("weight", "bias")
}


@pytest.fixture
def tied() -> StagePlan:
    blocks = [leaf(f"blocks.{i}", 8.0, 20) for i in range(4)]
    return make_stage_plan(box("", leaf("tok", 0.0, 40), *blocks, leaf("head", 1.0, 40)), 2)


def test_the_rows_and_the_footer(tied: StagePlan) -> None:
    assert stage_rows(tied, (0, 1), Tied()) == [
        ("0", "0", "tok, blocks.0-1", "80 (320 B)", "48.6%"),
        ("1", "1", "blocks.2-3, head", "80 (320 B)", "51.4%"),
    ]
    assert stage_footer(tied, make_schedule("1f1b", 2, 1), "bn mixes samples", HOLDERS, Tied()) == [
        "Schedule 1f1b, 1 microbatch: bn mixes samples.",
        "Predicted bubble: 50.0% of a step.",
        "Parameters held: rank 0: 320 B, rank 1: 340 B.",
        "Outside these modules: scale (20 B, rank 1).",
        "On several ranks, their gradients summed once a step: tok.weight = head.weight (ranks 0 and 1).",
    ]


def test_the_slowest_stage_counts_in_the_predicted_bubble() -> None:
    plan = make_stage_plan(box("", leaf("a", 3.0, 1), leaf("b", 1.0, 1)), 2)
    module = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})
    holders = {"a.weight": (0,), "a.bias": (0,), "b.weight": (1,), "b.bias": (1,)}
    lines = stage_footer(plan, make_forward_schedule((0, 1), 1), None, holders, module)
    assert lines[0] == "Forwards only, 1 microbatch."
    lines = stage_footer(plan, make_schedule("1f1b", 2, 7), None, holders, module)
    # Rank 0 never waits, rank 1 works for a third of its time.
    assert lines[1] == "Predicted bubble: 33.3% of a step, 12.5% were all stages equal."


@pytest.mark.parametrize("rich", [True, False])
def test_the_table_is_printed_with_and_without_rich(
    tied: StagePlan, rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not rich:
        monkeypatch.setattr(startup_table, "find_spec", lambda name: None)
    show_stages(tied, make_schedule("1f1b", 2, 8), None, HOLDERS, Tied(), Layout(pipeline=2), 0.25)
    printed = capsys.readouterr().out
    assert "Pipeline parallel over 2 ranks (pipeline 2), planned in 0.2 s" in printed
    assert "blocks.2-3, head" in printed and "80 (320 B)" in printed
    assert "Schedule 1f1b, 8 microbatches." in printed and "11.1% were all stages equal." in printed


def test_the_plan_prints_itself(tied: StagePlan) -> None:
    assert str(tied).splitlines()[0] == "stage 0: tok, blocks.0-1 (48.6% of the cost, 80 parameters)"


def test_all_calls_of_a_module_may_be_asked_for_in_one_stage() -> None:
    view = (leaf("conv", 4.0, 4), leaf("norm", 1.0, 2), leaf("head", 3.0, 8))
    twice = box("", *view, *view)
    assert make_stage_plan(twice, 2).homes == {"conv": (0, 1), "norm": (0, 1), "head": (0, 1)}
    plan = make_stage_plan(twice, 2, once=True)
    assert plan.homes == {"conv": (0, 0), "norm": (1, 1), "head": (1, 1)}
    assert [stage.share for stage in plan.stages] == [0.5, 0.5]
