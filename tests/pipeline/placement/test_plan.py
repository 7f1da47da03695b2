"""Which module is on which device, how a step is cut there, and in which order devices run: no process is started."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_par import LayerPlacementStrategy
from lightning_par.pipeline.placement.balance_memory import balance, split_within
from lightning_par.pipeline.placement.cut import Flow, Value
from lightning_par.pipeline.placement.device_order import make_order
from lightning_par.pipeline.placement.memory_sizes import parse_bytes, parse_limits
from lightning_par.pipeline.placement.plan import make_placement_plan
from lightning_par.pipeline.placement.settings import PlacementSettings
from lightning_par.pipeline.placement.user_placement import wishes_of
from lightning_par.pipeline.plan.schedules import Action
from lightning_par.pipeline.plan.stage_ranges import Cut
from lightning_par.pipeline.plan.units import ModuleCall
from lightning_par.pipeline.program.routes import direct
from lightning_par.pipeline.program.shared_storage import SharedStorage


def leaf(path: str, numel: int = 1, nbytes: float = 0.0) -> ModuleCall:
    return ModuleCall(path, 1.0, numel, nbytes=nbytes)


def box(path: str, *children: ModuleCall, closed: str | None = None) -> ModuleCall:
    return ModuleCall(
        path,
        sum(child.flops for child in children),
        sum({child.path: child.numel for child in children}.values()),
        children,
        closed,
        sum(child.nbytes for child in children),
    )


NET = box("", *(leaf(f"fc{i}") for i in (1, 2, 3, 4)))


def gpt(closed: str | None = None) -> ModuleCall:
    blocks = [box(f"net.blocks.{i}", leaf(f"net.blocks.{i}.attn"), leaf(f"net.blocks.{i}.mlp")) for i in (0, 1)]
    return box("", box("net", leaf("net.tok"), *blocks, leaf("net.drop", 0), leaf("net.head"), closed=closed))


# --- who is where ---


def test_back_and_forth() -> None:
    plan = make_placement_plan(NET, {"fc1": 0, "fc2": 1, "fc3": 1, "fc4": 0}, 2)
    assert plan.calls == (("fc1", 0), ("fc2", 1), ("fc3", 1), ("fc4", 0))
    assert [stage.units for stage in plan.stages] == [("fc1", "fc4"), ("fc2", "fc3")]


@pytest.mark.parametrize(
    "wishes, places",
    [
        ({"fc2": 1}, [1, 1, 1, 1]),  # the first go with the first that is named
        ({"fc1": 0, "fc3": 1}, [0, 0, 1, 1]),  # others with the one before
        ({"fc1": 2, "fc4": 0}, [2, 2, 2, 0]),
        ({}, [0, 0, 0, 0]),
    ],
)
def test_who_is_not_named_follows_the_layer_before(wishes: dict[str, int], places: list[int]) -> None:
    assert [place for _, place in make_placement_plan(NET, wishes, 3).calls] == places


def test_who_is_not_named_follows_the_module_around_it() -> None:
    plan = make_placement_plan(gpt(), {"net": 1, "net.blocks.1": 0}, 2)
    assert plan.calls == (("net.tok", 1), ("net.blocks.0", 1), ("net.blocks.1", 0), ("net.head", 1))
    plan = make_placement_plan(gpt(), {"net.blocks": 1, "net.blocks.0.mlp": 0, "net.head": 0}, 2)
    assert plan.calls == (
        ("net.tok", 1), ("net.blocks.0.attn", 1), ("net.blocks.0.mlp", 0), ("net.blocks.1", 1), ("net.head", 0),
    )  # fmt: skip


def test_what_is_on_one_device_is_called_as_a_whole() -> None:
    assert make_placement_plan(gpt(), {"net": 1}, 2).calls == (("net", 1),)
    assert make_placement_plan(gpt(), {"net": 1, "net.head": 1, "net.blocks.*": 1}, 2).calls == (("net", 1),)
    opened = make_placement_plan(gpt(), {"net": 1}, 2, opened=["net"])
    assert [path for path, _ in opened.calls] == ["net.tok", "net.blocks.0", "net.blocks.1", "net.head"]


def test_a_module_without_parameters_is_called_apart_where_it_moves() -> None:
    here = make_placement_plan(gpt(), {"net": 0, "net.drop": 0, "net.head": 1}, 2)
    assert "net.drop" not in here.homes
    there = make_placement_plan(gpt(), {"net": 0, "net.drop": 1, "net.head": 1}, 2)
    assert there.calls[-2:] == (("net.drop", 1), ("net.head", 1))


def test_a_module_with_two_names_follows_its_caller() -> None:
    shared = leaf("enc.embed", 5)
    root = box("", box("enc", shared, leaf("enc.a")), box("dec", shared, leaf("dec.b")))
    plan = make_placement_plan(root, {"enc": 0, "dec": 1}, 2, shared={"enc.embed"})
    assert plan.calls == (("enc", 0), ("dec", 1))
    apart = make_placement_plan(root, {"enc": 0, "dec": 1, "enc.embed": 0}, 2, shared={"enc.embed"})
    assert apart.calls == (("enc.embed", 0), ("enc.a", 0), ("enc.embed", 0), ("dec.b", 1))


def test_a_module_that_cant_be_taken_apart_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="puts 'net.head' on device 1, apart from 'net', which calls it and can't be "):
        make_placement_plan(gpt(closed="it reads a value"), {"net": 0, "net.head": 1}, 2)


def test_an_empty_device_is_known() -> None:
    assert make_placement_plan(NET, {"fc1": 0, "fc2": 2}, 3).stages[1].units == ()


# --- what the user names ---


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(2, 2), nn.Linear(2, 2)
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.alias = self.fc2
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.fc1.weight
        self.scale = nn.Parameter(torch.ones(2))
        self.accuracy = MulticlassAccuracy(3)


@pytest.mark.parametrize(
    "placement, found",
    [
        ({"fc1": 0, "fc2": 1}, {"fc1": 0, "fc2": 1}),
        ({"fc?": 1}, {"fc1": 1, "fc2": 1}),
        ({"blocks.[02]": 1, "blocks.1": 0}, {"blocks.0": 1, "blocks.2": 1, "blocks.1": 0}),
        ({"alias": 1}, {"fc2": 1}),
        ({"fc2": 1, "alias": 1}, {"fc2": 1}),
        ({"fc1": 0, "tied": 1}, {"fc1": 0, "tied": 1}),  # a weight that two layers share
        ({"blocks": 0, "blocks.1": 1}, {"blocks": 0, "blocks.1": 1}),
        ({"fc1": 0, "acc*": 1, "*1": 0}, {"fc1": 0, "blocks.1": 0}),
        (lambda name, m: len(name) - 3 if name.startswith("fc") else None, {"fc1": 0, "fc2": 0}),
    ],
)
def test_names_patterns_and_functions(placement: Any, found: dict[str, int]) -> None:
    assert wishes_of(Net(), placement, 2) == found


@pytest.mark.parametrize(
    "placement, error, message",
    [
        ({"fc3": 0}, ValueError, r"names 'fc3', which matches no module of Net. Did you mean 'fc2', 'fc1'\?"),
        ({"zzz": 0}, ValueError, "matches no module of Net. It has 'fc1', 'fc2'"),
        (
            {"fc1.weight": 0},
            ValueError,
            "names 'fc1.weight', a parameter, but modules are placed; place its module 'fc1'",
        ),
        ({"scale": 0}, ValueError, "a parameter, .* it goes where the step uses it: leave it out"),
        ({"accuracy": 0}, ValueError, "names 'accuracy', a metric: metrics are updated where the step ends"),
        (
            {"blocks.*": 0, "blocks.1": 1},
            ValueError,
            r"gives 'blocks.1' two devices: placement\['blocks.\*'\] = 0 and placement\['blocks.1'\] = 1. Write",
        ),
        (
            {"fc2": 0, "alias": 1},
            ValueError,
            r"puts one module on two devices: 'fc2' and 'alias' are the same object, but placement\['fc2'\] = 0 and "
            r"placement\['alias'\] = 1",
        ),
        (lambda name, m: 2, ValueError, r"placement\('fc1', ...\) = 2, but a copy of the model has the devices 0 to 1"),
        (lambda name, m: -1, ValueError, r"placement\('fc1', ...\) = -1 is negative"),
        (lambda name, m: "0", TypeError, "must be the index of a device, an int, not '0'"),
        (lambda name, m: True, TypeError, "not True"),
    ],
)
def test_names_that_do_not_fit_are_refused(placement: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        wishes_of(Net(), placement, 2)


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(placement="balance"), ValueError, "placement='balance' is unknown. Write e.g. placement={"),
        (dict(placement={}), ValueError, "names no module"),
        (dict(placement=3), TypeError, "must be 'balanced', a dict or a function, got int"),
        (dict(placement={0: 1}), TypeError, "a module name must be a str, not 0"),
        (dict(placement={"a": "0"}), TypeError, r"placement\['a'\] must be the index of a device, an int, not '0'"),
        (dict(placement={"a": True}), TypeError, "not True"),
        (dict(placement={"a": 1.0}), TypeError, "not 1.0"),
        (dict(placement={"a": -1}), ValueError, r"placement\['a'\] = -1 is negative: devices count from 0"),
        (dict(microbatches=0), ValueError, "microbatches must be a positive int or 'auto', got 0"),
        (dict(microbatches="many"), ValueError, "a positive int or 'auto', got 'many'"),
        (dict(max_memory=5), TypeError, "max_memory must map devices to amounts"),
        (dict(max_memory={"0": 5}), TypeError, "a device must be its index, an int, not '0'"),
        (dict(max_memory={-1: 5}), ValueError, "names device -1, which is negative"),
        (dict(max_memory={0: "2 gallons"}), ValueError, r"max_memory\[0\] = '2 gallons' is no amount of memory"),
        (dict(max_memory={0: 0}), ValueError, r"max_memory\[0\] = 0 leaves no memory"),
        (dict(max_memory={0: 1.5}), TypeError, r"max_memory\[0\] must be a number of bytes or a str"),
        (dict(start_method="magic"), ValueError, "start_method='magic' is unknown"),
    ],
)
def test_arguments_are_checked_when_the_strategy_is_made(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LayerPlacementStrategy(**options)


def test_amounts_of_memory() -> None:
    assert [parse_bytes(text, "") for text in ("2GB", "1.5 kB", ".5 MiB", "7", "3 gib", 9)] == [
        2_000_000_000, 1500, 1 << 19, 7, 3 << 30, 9,
    ]  # fmt: skip
    assert parse_limits({0: "1KB", 2: 5}) == {0: 1000, 2: 5} and parse_limits(None) == {}


@pytest.mark.parametrize(
    "placement, world, data, expected",
    [
        ({"a": 0, "b": 1}, 2, "auto", (1, 2)),
        ({"a": 0, "b": 1}, 6, "auto", (3, 2)),
        ({"a": 2}, 6, 2, (2, 3)),
        ("balanced", 4, "auto", (1, 4)),
        ("balanced", 4, 2, (2, 2)),
        ({"a": 0}, 3, "auto", (3, 1)),
    ],
)
def test_left_over_devices_are_data_parallel(placement: Any, world: int, data: Any, expected: tuple[int, int]) -> None:
    layout = PlacementSettings(placement).resolve(world, data)
    assert (layout.data, layout.pipeline) == expected


@pytest.mark.parametrize(
    "placement, world, data, limits, message",
    [
        (
            {"a": 0, "b.*": 2},
            4,
            "auto",
            None,
            r"placement\['b.\*'\] = 2 is the largest index, so a copy of the model takes 3 devices \(0 to 2\): 3 does "
            r"not fit the 4 processes .* Set devices \* num_nodes to a multiple of 3",
        ),
        ({"a": 5}, 2, "auto", None, "takes 6 devices .* the 2 processes"),
        ({"a": 0, "b": 1}, 4, 4, None, r"data_parallel_size=4 \* 2 = 8 does not fit the 4 processes.* num_nodes to 8"),
        (
            "balanced",
            4,
            3,
            None,
            "data_parallel_size=3, but the Trainer starts 4 .* no multiple of 3. Write a data_par",
        ),
        ("balanced", 4, 0, None, "`data_parallel_size` must be a positive int or 'auto', got 0"),
        ("balanced", 2, "auto", {2: 5}, "max_memory has a limit for device 2, but a copy .* has the devices 0 to 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(placement: Any, world: int, data: Any, limits: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlacementSettings(placement, max_memory=limits).resolve(world, data)


# --- balanced ---

EQUAL = {f"fc{i}": 100 for i in (1, 2, 3, 4)}


def test_bytes_are_balanced() -> None:
    assert balance(NET, EQUAL, 2, {}) == {"fc1": 0, "fc2": 0, "fc3": 1, "fc4": 1}
    heavy = box("", leaf("fc1", 1, 500.0), *(leaf(f"fc{i}") for i in (2, 3, 4)))
    assert balance(heavy, EQUAL, 2, {}) == {"fc1": 0, "fc2": 1, "fc3": 1, "fc4": 1}


def test_limits_are_kept() -> None:
    assert balance(NET, EQUAL, 2, {0: 150}) == {"fc1": 0, "fc2": 1, "fc3": 1, "fc4": 1}
    assert balance(NET, EQUAL, 3, {1: 100, 0: 100}) == {"fc1": 0, "fc2": 1, "fc3": 2, "fc4": 2}
    with pytest.raises(ValueError, match=r"Net does not fit into max_memory: its 4 layers take 400 B .*, the largest "):
        balance(NET, EQUAL, 2, {0: 150, 1: 150}, module="Net")


def test_modules_are_opened_where_limits_ask_for_it() -> None:
    sizes = {"net": 60, "net.tok": 10, "net.head": 10} | {f"net.blocks.{i}": 20 for i in (0, 1)}
    sizes |= {f"net.blocks.{i}.{part}": 10 for i in (0, 1) for part in ("attn", "mlp")}
    opened = balance(gpt(), sizes, 2, {0: 20, 1: 40})
    assert (opened["net.blocks.0.attn"], opened["net.blocks.0.mlp"]) == (0, 1)
    assert balance(gpt(), sizes, 2, {}) == {"net.tok": 0, "net.blocks.0": 0, "net.blocks.1": 1, "net.head": 1}


def test_more_devices_than_layers_stay_empty() -> None:
    found = balance(NET, EQUAL, 6, {})
    assert len(found) == 4 and max(found.values()) <= 5


def test_no_other_split_is_fuller_or_as_full_and_less_even() -> None:
    draw = random.Random(1)
    for _ in range(50):
        sizes = [draw.choice([0, 1, 2, 5]) for _ in range(draw.randint(1, 6))]
        limits = [draw.choice([None, None, 3, 6]) for _ in range(draw.randint(1, 3))]

        def value(starts: tuple[int, ...], sizes: Any = sizes, limits: Any = limits) -> Any:
            runs = [sum(sizes[a:b]) for a, b in zip(starts, [*starts[1:], len(sizes)])]
            fits = all(limit is None or run <= limit for run, limit in zip(runs, limits))
            return (max(runs), sum(run**2 for run in runs)) if fits else None

        cuts = [(0, *cut) for cut in combinations_with_replacement(range(len(sizes) + 1), len(limits) - 1)]
        every = [found for cut in cuts if (found := value(cut)) is not None]
        starts = split_within(sizes, limits)
        assert (starts is None) == (not every) and (starts is None or value(starts) == min(every))


# --- stages ---


def test_a_branch_does_not_wait_for_the_other() -> None:
    # left on 0; right, their sum and the head on 1: the sum begins a stage
    flow = Flow(needs=[[], [], [0, 1], [2], [3]], costs=[4.0, 4.0, 0.1, 1.0], located=range(4))
    assert flow.divided(Cut((0, 1), (0, 1)), latest=4) == Cut((0, 1, 2), (0, 1, 1))
    assert flow.divided(Cut((0, 1), (0, 1)), latest=1) == Cut((0, 1), (0, 1))


def test_what_others_wait_for_does_not_wait_for_a_branch() -> None:
    # trunk and left on 0, right on 1, the sum on 0
    flow = Flow(needs=[[], [0], [0], [1, 2], [3]], costs=[4.0, 4.0, 4.0, 0.1], located=range(4))
    assert flow.divided(Cut((0, 2, 3), (0, 1, 0)), latest=9) == Cut((0, 1, 2, 3), (0, 0, 1, 0))


def test_skips_make_no_stages() -> None:
    # down, down, middle and up, up: the first and the second are needed again by the last two
    flow = Flow(needs=[[], [0], [1], [1, 2], [0, 3], [4]], costs=[1.0] * 5, located=range(5))
    assert flow.divided(Cut((0, 2, 3), (0, 1, 0)), latest=9) == Cut((0, 2, 3), (0, 1, 0))
    assert flow.divided(Cut((0, 3), (0, 1)), latest=9) == Cut((0, 3), (0, 1))


def test_what_costs_next_to_nothing_makes_no_stage() -> None:
    # positions of no cost on 1 before the sum with tokens of 0
    flow = Flow(needs=[[], [], [0, 1], [2], [3]], costs=[1.0, 0.001, 0.0, 9.0], located=range(4))
    assert flow.divided(Cut((0, 1), (0, 1)), latest=9) == Cut((0, 1), (0, 1))


def test_functions_run_where_the_fewest_bytes_cross() -> None:
    # left on 0, right on 1, their concatenation, the head on 0
    values = [Value(0, 8, (2,)), Value(1, 8, (2,)), Value(2, 16, (3,)), Value(3, 4, (4,))]
    flow = Flow([[], [], [0, 1], [2], [3]], [1.0] * 4, range(4), values)
    assert flow.with_fewest_bytes(Cut((0, 1, 3), (0, 1, 0)), units=[0, 1, 3]) == Cut((0, 1, 2), (0, 1, 0))
    # a layer on 0, its mean and a function as large as that, the head on 1
    values = [Value(0, 64, (1,)), Value(1, 2, (2,)), Value(2, 2, (3,)), Value(3, 2, (4,))]
    flow = Flow([[], [0], [1], [2], [3]], [1.0] * 4, range(4), values)
    assert flow.with_fewest_bytes(Cut((0, 3), (0, 1)), units=[0, 3]) == Cut((0, 3), (0, 1))


def test_a_value_goes_straight_to_each_stage_that_takes_it() -> None:
    uses = [((0, 0), 1.0), ((0, 0), 2.0), ((1, 0), 2.0), ((2, 0), float("inf"))]
    routes = direct(uses, starts=(0, 1, 2), tail=3, rewritten={})
    assert routes.coming == ((), (((0, 0), 0),), (((0, 0), 0), ((1, 0), 1)))
    assert routes.leaving == ({(0, 0): (1, 2)}, {(1, 0): (2,)}, {})


def test_what_a_stage_writes_into_comes_from_it() -> None:
    # made by event 0, written into by event 1, taken by event 2
    uses = [((0, 0), 1.0), ((0, 0), 2.0)]
    routes = direct(uses, starts=(0, 1, 2), tail=3, rewritten={(0, 0): [1]})
    assert routes.coming == ((), (((0, 0), 0),), (((0, 0), 1),))
    assert routes.written == (frozenset(), frozenset({(0, 0)}), frozenset())


def test_writes_into_shared_memory_are_noticed() -> None:
    memory = SharedStorage()
    with memory:
        x = torch.ones(3, 2)
        memory.made((0, 0), x)
        view = x[:1]
        memory.made((1, 0), view)
        memory.settle(1)
        other = x * 2
        memory.made((2, 0), other)
        torch.relu_(view)
        memory.settle(3)
        torch.add(x, 1, out=other)
        memory.settle(4)
    assert memory.written == {(0, 0): [3], (1, 0): [3], (2, 0): [4]}


# --- the order ---


@dataclass(frozen=True)
class Part:
    at: tuple[int, ...]
    after: tuple[tuple[int, ...], ...]
    costs: tuple[float, ...]


SEED = Part((0, 1, 0), ((), (0,), (1,)), (1.0, 2.0, 1.0))
BRANCHES = Part((0, 1, 1), ((), (), (0, 1)), (4.0, 4.0, 0.1))


def text(order: tuple[Action, ...]) -> str:
    return " ".join(map(str, order))


def test_one_microbatch_goes_there_and_back() -> None:
    schedule = make_order([SEED], 2, trains=True)
    assert list(map(text, schedule.actions)) == ["F0.0 F2.0 B2.0 B0.0", "F1.0 B1.0"]
    assert schedule.placement == (0, 1, 0) and schedule.ranks == 2
    assert list(map(text, make_order([SEED], 3, trains=False).actions)) == ["F0.0 F2.0", "F1.0", ""]


def test_branches_run_at_the_same_time() -> None:
    assert list(map(text, make_order([BRANCHES], 2, trains=True).actions)) == ["F0.0 B0.0", "F1.0 F2.0 B2.0 B1.0"]


def test_microbatches_overlap_and_backwards_come_first() -> None:
    first, second = make_order([SEED] * 4, 2, trains=True).actions
    assert text(second).startswith("F1.0 F1.1 F1.2 B1.0 B1.1")
    assert text(first).startswith("F0.0 F0.1 F0.2 F2.0 B2.0")


def test_of_two_branches_on_one_device_the_one_that_others_wait_for_runs_first() -> None:
    # a short branch on 0, a long one that goes on to 1 from 0
    part = Part((0, 0, 1, 0), ((), (), (1,), (0, 2)), (1.0, 1.0, 5.0, 1.0))
    assert text(make_order([part], 2, trains=False).actions[0]) == "F1.0 F0.0 F3.0"


def test_any_order_can_be_run() -> None:
    draw = random.Random(0)
    for _ in range(60):
        stages, ranks, m = draw.randint(1, 7), draw.randint(1, 4), draw.randint(1, 4)
        at = tuple(draw.randrange(ranks) for _ in range(stages))
        after = tuple(tuple(s for s in range(t) if draw.random() < 0.4) for t in range(stages))
        part = Part(at, after, tuple(draw.choice([0.0, 1.0, 3.0]) for _ in range(stages)))
        schedule = make_order([part] * m, ranks, trains=draw.random() < 0.7)
        done: set[Action] = set()
        queues = [list(order) for order in schedule.actions]
        while any(queues):
            ready = [queue for queue in queues if queue and _can_run(queue[0], part, done)]
            assert ready, "the devices wait for each other"
            done |= {queue.pop(0) for queue in ready}
        assert len(done) == stages * m * (2 if schedule.trains else 1)
        assert all(at[a.stage] == rank for rank, order in enumerate(schedule.actions) for a in order)


def _can_run(action: Action, part: Part, done: set[Action]) -> bool:
    op, stage, i = action.op, action.stage, action.microbatch
    if op == "F":
        return all(Action("F", other, i) in done for other in part.after[stage])
    later = [other for other, before in enumerate(part.after) if stage in before]
    return Action("F", stage, i) in done and all(Action("B", other, i) in done for other in later)


def test_the_example_of_the_docs() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x: Tensor = layers(torch.ones(1, 2))
    assert x.shape == (1, 2) and wishes_of(layers, {"0": 1, "1": 0}, places=2) == {"0": 1, "1": 0}
