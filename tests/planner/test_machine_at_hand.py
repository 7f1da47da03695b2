"""The machine at hand: what a probe finds, as a YAML, and what its processors and Python mean for a prediction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from lightning_par.pipeline.plan.schedule import make_schedule
from lightning_par.pipeline.simulate import UNIT_COST, simulate
from lightning_par.planner.machine.machines import Link, Machine, machine_yaml, read_machine
from lightning_par.planner.machine.overheads import Overhead, Overheads
from lightning_par.planner.machine.probe import measure
from lightning_par.planner.planner import Planner
from lightning_par.planner.times.shared_cores import simulate_shared
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.planner.marked import CASES, compare

LINK = Link(6e8, 2e-4, 0.0)
CPUS = Machine(
    "four ranks on two cores", {"float32": 2e10, "float64": 1e10}, 4e9, 5e9, 1, 4, LINK, LINK, 1.0, (0.8, 0.8), ramp=0,
    bandwidth_share=0.5, update_share=0.3, launch=0.0, gpu=False, contention=1.0, tiles=(16, 16), cores=2.0,
    context=4e8, overheads=Overheads(Overhead(5e-3, 2e-5), tensor=Overhead(0.0, 1e-4), pipeline=Overhead(1e-3, 3e-3)),
)  # fmt: skip
"""About what the probe finds on a quiet machine."""


def test_a_machine_comes_back_from_its_yaml(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(machine_yaml(CPUS))
    assert read_machine(str(file))[0] == CPUS


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zbv"])
def test_ranks_that_wait_leave_their_cores_to_others(name: str) -> None:
    schedule = make_schedule(name, 4, 8)
    costs = [UNIT_COST] * schedule.stages
    crowded = max(span.end for span in simulate(schedule, costs))
    shared, alone = (max(span.end for span in simulate_shared(schedule, costs, cores)) for cores in (2, 4))
    work = sum(cost["F"] + cost["B"] for cost in costs) * 8 / 4
    assert alone == pytest.approx(crowded)
    assert work <= shared < crowded


@long()
def test_python_of_each_axis_is_in_the_prediction() -> None:
    case = CASES["gpt"]
    planner = Planner(case.module, next(iter(DataLoader(case.data(), 8))), CPUS, fused=False)
    seconds = {}
    for name, overheads in (("none", Overheads()), ("all", CPUS.overheads)):
        planner.machine = replace(CPUS, overheads=overheads)
        for axis in ("data", "tensor", "pipeline"):
            seconds[name, axis] = planner.evaluate({f"{axis}_parallel_size": 4}, 4, 32).seconds
    more = {axis: seconds["all", axis] - seconds["none", axis] for axis in ("data", "tensor", "pipeline")}
    assert more["data"] > 5e-3  # of a training step
    assert more["tensor"] > 4 * more["data"]  # of four training steps, each with functions that take longer
    assert more["pipeline"] > 8 * 3e-3  # of microbatches


@long()
def test_layouts_are_trained_in_turns(pool: Pool, tmp_path: Path) -> None:
    file = tmp_path / "cpus.yaml"
    file.write_text(machine_yaml(replace(CPUS, devices=2)))
    found = compare(pool, "mlp_deep", str(file), ranks=2, most=3, rounds=1, steps=3, shown=False)
    assert len(found.measured) == 3 and min(found.measured) > 0
    assert found.ratio < 3  # the bar itself is for a quiet machine: python -m tests.planner.marked


@slow()
def test_this_machine_is_measured(tmp_path: Path) -> None:
    machine = measure(2)
    assert machine.devices == 2 and machine.peak["float32"] > 1e8 and machine.memory > machine.context > 0
    assert machine.link.latency > 0 and (machine.gpu or machine.overheads.plain.step > 0)
    file = tmp_path / "mine.yaml"
    file.write_text(machine_yaml(machine))
    assert read_machine(str(file))[0] == machine
