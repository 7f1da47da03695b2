"""The start-up table says what was decided, and why the rest was not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_par.mesh.hosts import Host, HostGrid
from lightning_par.mesh.layout import Layout
from lightning_par.strategies import startup_table
from lightning_par.tensor.plan import TensorPlan, make_plan
from lightning_par.trial.trial_run import record_step
from tests.tensor.test_counts import Counted, V, b, s


@pytest.fixture
def plan() -> TensorPlan:
    module = Counted("swiglu")
    return make_plan(record_step(module, "training_step", torch.randint(0, V, (b, s))), 2)


def test_layers_of_a_list_share_a_row_and_reasons_are_given(plan: TensorPlan) -> None:
    rows = {row[0]: row[1:] for row in startup_table.plan_rows(plan)}
    assert rows["blocks.*.mlp.gate.weight (4)"] == ("172 x 64", "colwise", "86 x 64")
    assert rows["blocks.*.mlp.down.weight (4)"] == ("64 x 172", "rowwise", "64 x 86")
    (norms,) = [row for row in startup_table.plan_rows(plan) if "norm.weight" in row[0]]
    assert norms[2:] == ("replicated", "all of it: a vector outside the islands")


@pytest.mark.parametrize("rich", [True, False])
def test_it_is_printed_with_and_without_rich(
    plan: TensorPlan, rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not rich:
        monkeypatch.setattr(startup_table, "find_spec", lambda name: None)
    startup_table.show_plan(plan, Counted("swiglu"), Layout(tensor=2), 0.25, 1 if rich else 4)
    printed = capsys.readouterr().out
    assert ("Tokens go in up to 4 messages" in printed) == (not rich)
    assert "Tensor parallel over 2 ranks (tensor 2), planned in 0.2 s" in printed
    assert "tokens.weight" in printed and "48 x 64" in printed
    assert "Weights: 758.4 KB in all, 385.0 KB a rank at most" in " ".join(printed.split())


def test_reasons_stay_on_a_narrow_screen(
    plan: TensorPlan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Long names give way at their beginnings: layers differ in the ends."""
    monkeypatch.setenv("COLUMNS", "80")
    rows = [(f"{'a_module_of_a_long_name.' * 4}{row[0]}", *row[1:]) for row in startup_table.plan_rows(plan)]
    startup_table.show_table("title", ("parameters", "shape", "style", "a rank holds"), rows, [], wraps=3)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("gate.weight (4)" in line and "…" in line and "86 x 64" in line for line in lines)
    assert any("all of it: a vector" in line for line in lines)


def test_where_nothing_is_split_it_says_so() -> None:
    module: Any = torch.nn.LayerNorm(4)
    module.training_step = lambda batch: module(batch).sum()
    empty = make_plan(record_step(module, "training_step", torch.randn(2, 4)), 2)
    assert any("Nothing could be split" in line for line in startup_table.plan_footer(empty, module))


def test_it_shows_the_grid_by_host(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(startup_table, "find_spec", lambda name: None)
    one, other = Host("host0"), Host("host1")
    startup_table.show_hosts(HostGrid.arranged(Layout(pipeline=2, tensor=2), [one, other, one, other]))
    assert capsys.readouterr().out.splitlines() == [
        "4 ranks on 2 hosts (pipeline 2 x tensor 2)",
        "host   ranks  launcher's ranks  pipeline  tensor",
        "host0  0-1    0, 2              0         0-1",
        "host1  2-3    1, 3              1         0-1",
        "The tensor axis is within hosts.",
        "The pipeline goes across hosts in 2 of 2 groups.",
    ]


def test_it_says_what_goes_across_hosts_though_it_talks_in_each_layer() -> None:
    one, other = Host("host0"), Host("host1")
    (line,) = startup_table.host_footer(HostGrid.arranged(Layout(tensor=2, data=2), [one, one, one, other]))
    assert "in 1 of 2 groups of 2; hosts have 1 or 3 ranks." in line
    (_, line) = startup_table.host_footer(HostGrid.arranged(Layout(tensor=2, sequence=2), [one, other, one, other]))
    assert "let sequence_parallel_size * tensor_parallel_size divide the ranks of each host" in line


def test_many_hosts_are_counted() -> None:
    grid = HostGrid.arranged(Layout(data=40), [Host(f"{rank}") for rank in range(40)])
    header, rows = startup_table.host_rows(grid)
    assert header == ["host", "ranks", "data"] and len(rows) == 17 and rows[-1] == ["24 more", "", ""]
