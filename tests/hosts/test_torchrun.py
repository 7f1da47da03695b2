"""Every strategy, and products of them, on two and three hosts under torchrun: results are those of one device."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import equality
from tests.helpers.equality import Result
from tests.helpers.slow import slow
from tests.hosts.network import hosts, left_behind, torchrun
from tests.law.test_equality import one_device as one_device  # a fixture

TP2, PP2, SP2, DP2 = (
    dict(tensor_parallel_size=2),
    dict(pipeline_parallel_size=2, microbatches=2),
    dict(sequence_parallel_size=2),
    dict(data_parallel_size=2),
)
HYBRID, FSDP = dict(hybrid=True), dict(data_parallel="fsdp", hybrid=True)
GPT = dict(placement={"tokens": 0, "positions": 1, "blocks.0": 0, "blocks.1": 1, "head": 0})
Rows = dict[str, tuple[str, dict[str, Any]]]
LAUNCHES: dict[str, tuple[list[int], Rows]] = {
    "2 hosts of 1": (
        [1, 1],
        {
            "tp2": ("gpt", TP2),
            "pp2": ("gpt_tied", PP2),
            "sp2": ("gpt", SP2),
            "sp2-ring": ("gpt_tied", SP2 | dict(attention="ring")),
            "placement": ("gpt_tied", GPT | dict(microbatches=2)),
            "dp2": ("gpt", DP2 | dict(tensor_parallel_size=1)),
            "fsdp": ("gpt", DP2 | FSDP),
        },
    ),
    "2 hosts of 2": (
        [2, 2],
        {
            "pp2-tp2": ("gpt_tied", PP2 | TP2 | HYBRID),
            "pp2-tp2-zbv": ("gpt_tied", PP2 | TP2 | dict(schedule="zbv") | HYBRID),
            "pp2-sp2": ("loss_ignore", PP2 | SP2 | HYBRID),
            "sp2-tp2": ("gpt", SP2 | TP2 | HYBRID),
            "sp4-ulysses-ring": ("gpt", dict(sequence_parallel_size=4, attention={"ulysses": 2, "ring": 2})),
            "tp4": ("gpt", dict(tensor_parallel_size=4)),
            "dp2-tp2-fsdp": ("gpt", DP2 | TP2 | FSDP),
            "placement-tp2": ("gpt_tied", PP2 | TP2 | GPT | HYBRID),
        },
    ),
    "3 hosts of 1": (
        [1, 1, 1],
        {
            "tp3": ("gpt", dict(tensor_parallel_size=3)),
            "pp3": ("gpt", dict(pipeline_parallel_size=3, microbatches=2)),
            "sp3": ("gpt", dict(sequence_parallel_size=3)),
        },
    ),
    "3 and 1": (  # hosts of unlike sizes
        [3, 1],
        {"pp2-tp2": ("gpt_tied", PP2 | TP2 | HYBRID), "dp2-tp2": ("gpt", DP2 | TP2)},
    ),
}
ROWS = [(launch, row) for launch, (_, rows) in LAUNCHES.items() for row in rows]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Path, str]]]:
    """The folder of a launch's results, and what its ranks printed."""
    known: dict[str, tuple[Path, str]] = {}

    def get(name: str) -> tuple[Path, str]:
        if name not in known:
            counts, rows = LAUNCHES[name]
            folder = tmp_path_factory.mktemp("hosts")
            with hosts(len(counts), named=name != "3 hosts of 1") as made:
                command = ["-m", "tests.hosts.train", "rows", str(folder), json.dumps([*rows.values()])]
                codes = [process.wait(280) for process in torchrun(made, counts, command, folder)]
                left = left_behind(made)
            said = "\n".join((folder / f"output-{index}").read_text() for index in range(len(counts)))
            assert not any(codes) and not left, said
            known[name] = folder, said
        return known[name]

    yield get


@slow()
@pytest.mark.parametrize(("launch", "row"), ROWS)
def test_a_layout_on_hosts_never_changes_results(
    launch: str, row: str, launched: Callable[[str], tuple[Path, str]], one_device: Callable[..., Result]
) -> None:
    folder, _ = launched(launch)
    rows = LAUNCHES[launch][1]
    case, layout = rows[row]
    data_size = layout.get("data_parallel_size", 1)
    reference = one_device(case, data_size=data_size)
    for rank in range(sum(LAUNCHES[launch][0])):
        result = torch.load(folder / f"{[*rows].index(row)}" / f"result-{rank}.pt", weights_only=False)
        assert not equality.compare(reference, result, data_size), f"rank {rank}"
    assert prod(size for name, size in layout.items() if name.endswith("_size")) <= sum(LAUNCHES[launch][0])


@slow()
def test_the_start_up_table_shows_the_grid_by_host(launched: Callable[[str], tuple[Path, str]]) -> None:
    _, said = launched("2 hosts of 2")
    assert "4 ranks on 2 hosts (pipeline 2 x tensor 2)" in said and "The tensor axis is within hosts." in said
    assert "The tensor axis goes across hosts in 1 of 1 groups of 4; hosts have 2 ranks." in " ".join(said.split())
    _, said = launched("3 and 1")
    assert "The tensor axis goes across hosts in 1 of 2 groups of 2; hosts have 1 or 3 ranks." in " ".join(said.split())
