"""What a placement can't do is refused before training, on all ranks alike, with the user's own names and numbers.

Without processes, in `test_plan`: arguments, names, sizes, amounts of memory.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch.cli
import pytest
import pytorch_lightning
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_par
from lightning_par import LayerPlacementStrategy
from tests.helpers.pool import Pool
from tests.helpers.slow import long


class Net(LightningModule):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), norm(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.norm(self.up(x))))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Branches(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if h.sum() > 0:  # before another device's layers
            h = 2 * h
        return self.down(self.norm(h))


class Alias(Net):
    """Two names for one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.also = self.down


class Within(nn.Module):
    """Reads a value between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x / float(x.detach().abs().max()))


class Closed(Net):
    def __init__(self) -> None:
        super().__init__(lambda _: Within())


class Eats(nn.Module):
    """Writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x += 1.0
        return self.linear(x)


class Torn(Net):
    """Writes into a view on one device, and another view of the same tensor goes to that device, too."""

    def __init__(self) -> None:
        super().__init__()
        self.eats = Eats()

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        left, middle = h[:, :8], h[:, 4:12]
        z = self.eats(left)
        return self.down(self.norm(torch.cat([middle, z], 1)))


class WritesGiven(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        x += 1.0  # `up` was given it
        return self.down(self.norm(h)) + x


HALVES = {"up": 0, "norm": 1, "down": 1}


def line(function: Callable[..., Any], text: str) -> str:
    """``file:line`` of the line of ``function`` that holds ``text``."""
    lines, first = inspect.getsourcelines(function)
    return f"test_input.py:{first + next(i for i, one in enumerate(lines) if text in one)}"


def by_rank(name: str, module: nn.Module) -> int | None:
    return dist.get_rank() if name == "up" else 0


def _world() -> int:
    # Lightning takes WORLD_SIZE away at the end of a run; the process group stays.
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def run(module: Callable[[], LightningModule], **options: Any) -> tuple[str, list[str]]:
    """What was raised, and what was warned of."""
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer = Trainer(
                accelerator="cpu",
                devices=_world(),
                strategy=LayerPlacementStrategy(**options),
                max_steps=2,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(module(), DataLoader(torch.randn(8, 8), batch_size=4))  # type: ignore[arg-type]
            assert trainer.global_step == 2
        except Exception as found:
            error = f"{type(found).__name__}: {found}"
    return error, [str(w.message) for w in caught if "placement" in str(w.message)]


REFUSED: dict[str, tuple[Callable[[], LightningModule], dict[str, Any], list[str]]] = {
    "sizes": (
        Net,
        dict(placement={"up": 0, "down": 2}),
        [
            "placement['down'] = 2 is the largest index, so a copy of the model takes 3 devices (0 to 2)",
            "the 2 processes that the Trainer starts",
        ],
    ),
    "a name that matches nothing": (
        Net,
        dict(placement={"uqp": 0, "[nd]*": 1}),
        ["placement names 'uqp', which matches no module of Net. Did you mean 'up'?"],
    ),
    "two devices for one module": (
        Net,
        dict(placement={"up": 0, "*own": 1, "down": 0}),
        ["placement gives 'down' two devices: placement['*own'] = 1 and placement['down'] = 0"],
    ),
    "two devices for one module with two names": (
        Alias,
        dict(placement={"up": 0, "down": 0, "also": 1}),
        ["'down' and 'also' are the same object, but placement['down'] = 0 and placement['also'] = 1"],
    ),
    "a part of what can't be taken apart": (
        Closed,
        dict(placement={"up": 0, "norm.second": 1}),
        ["puts 'norm.second' on device 1, apart from 'norm'", line(Within.forward, "float("), "Place 'norm' as a"],
    ),
    "an index of a function's": (
        Net,
        dict(placement=len),
        ["TypeError: ", "takes exactly one argument"],
    ),
    "another placement on each rank": (
        Net,
        dict(placement=by_rank),
        ["placed in another way on rank 1 than on rank 0", "device 0: up, norm, down", "must not depend on the rank"],
    ),
    "too little memory": (
        Net,
        dict(placement="balanced", max_memory={0: 100, 1: "1kB"}),
        ["Net does not fit into max_memory: its 3 layers take", "device 0: 100 B, device 1: 1.0 KB"],
    ),
    "too little memory where the user says": (
        Net,
        dict(placement=HALVES, max_memory={1: "500 B"}),
        ["max_memory[1] = 500 B, but device 1 would hold", "672 B of parameters and buffers"],
    ),
    "samples mix": (
        Normed,
        dict(placement=HALVES, microbatches=2),
        ["microbatches=2: the samples of a batch need one another", "Write microbatches=1, or allow_batch_coupling"],
    ),
    "manual optimization": (
        Manual,
        dict(placement=HALVES, microbatches=2),
        ["microbatches=2: Manual optimizes by hand", "Or write microbatches=1"],
    ),
    "writes that another device would have to see": (
        Torn,
        dict(placement={"up": 0, "eats": 1, "norm": 1, "down": 0}, microbatches=2),
        [line(Torn.forward, "self.eats(left)"), "a value from another device is written into here", "x = x + y"],
    ),
    "writes into what a module was given": (
        WritesGiven,
        dict(placement=HALVES, microbatches=2),
        [line(WritesGiven.forward, "x += 1.0"), "writes into a tensor that a module was given before, or"],
    ),
}  # fmt: skip


def _refused() -> dict[str, tuple[str, list[str]]]:
    return {name: run(module, **options) for name, (module, options, _) in REFUSED.items()}


@pytest.fixture(scope="module")
def answers(pool: Pool) -> list[dict[str, tuple[str, list[str]]]]:
    """Of both ranks, one case after another: a run that was refused leaves the next one as it was."""
    return pool.run(2, _refused)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cant_be_is_refused_alike_on_all_ranks_at_once(name: str, answers: Any) -> None:
    (first, _), (second, _) = (answer[name] for answer in answers)
    assert first == second and first.startswith(("ValueError: ", "TypeError: ", "NotImplementedError: "))
    for part in REFUSED[name][2]:
        assert part in first


def _allowed() -> dict[str, tuple[str, list[str]]]:
    return {
        "coupled": run(Normed, placement=HALVES, microbatches=2, allow_batch_coupling=True),
        "whole": run(Normed, placement=HALVES),
        "function": run(Net, placement=_by_name, microbatches=3),
        "room": run(Net, placement="balanced", max_memory={0: "1MB", 1: "2 KiB"}),
        "tied": run(Tied, placement={"up": 0, "down": 1}),
        "empty": run(Net, placement={"up": 1}),
        "branches": run(Branches, placement=HALVES),
    }


def _by_name(name: str, module: nn.Module) -> int | None:
    return {"up": 1, "down": 0}.get(name)


class Tied(Net):
    """A weight of two layers on two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(16, 8)
        self.up = nn.Linear(8, 16)
        self.down.weight = nn.Parameter(torch.zeros(8, 16))
        self.also = nn.Linear(16, 8)
        self.also.weight = self.down.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.also(self.norm(self.up(self.down(self.up(x)))))


@long()
def test_what_may_be_trains(pool: Pool) -> None:
    for answer in pool.run(2, _allowed):
        assert {name: error for name, (error, _) in answer.items()} == dict.fromkeys(answer, "")


def test_an_empty_device_is_warned_of_once(pool: Pool) -> None:
    first, second = pool.run(2, run, Net, placement={"up": 1})
    assert (first[0], second[0]) == ("", "")
    assert first[1] == ["The placement leaves device 0 empty: no layer runs there."] and second[1] == []


def _one_device() -> list[str]:
    return [
        run(Net, placement={"upp": 0})[0],
        run(Net, placement="balanced", max_memory={0: 100})[0],
        run(Net, placement={"up": 0})[0],
    ]


def test_one_device_is_checked_too(pool: Pool) -> None:
    ((name, memory, fine),) = pool.run(1, _one_device)
    assert "Did you mean 'up'?" in name and "max_memory[0] = 100 B, but device 0 would hold" in memory and not fine


def _from_yaml(folder: Path) -> Any:
    (folder / "config.yaml").write_text("""
trainer:
  accelerator: cpu
  devices: 2
  strategy:
    class_path: lightning_par.LayerPlacementStrategy
    init_args:
      placement: {layer: 1, "*": 1}
      max_memory: {0: 2GB, 1: 4000}
      microbatches: 2
""")
    cli = lightning.pytorch.cli.LightningCLI(
        BoringModel, run=False, args=["--config", str(folder / "config.yaml")], save_config_callback=None
    )
    settings = cli.trainer.strategy.settings  # type: ignore[attr-defined]
    return type(cli.trainer.strategy).__name__, settings.placement, settings.limits, settings.microbatches


def test_a_placement_can_be_yaml(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(2, _from_yaml, tmp_path):
        assert found == ("LayerPlacementStrategy", {"layer": 1, "*": 1}, {0: 2_000_000_000, 1: 4000}, 2)


def _by_string() -> tuple[str, str, str]:
    here = Trainer(accelerator="cpu", devices=2, strategy="layer_placement", logger=False).strategy
    there = pytorch_lightning.Trainer(accelerator="cpu", devices=2, strategy="layer_placement", logger=False).strategy
    return type(here).__module__, type(there).__module__, here.settings.placement  # type: ignore[attr-defined]


def test_its_name_makes_a_balanced_one_in_both_namespaces(pool: Pool) -> None:
    for found in pool.run(2, _by_string):
        assert found == ("lightning_par.strategies.lightning", "lightning_par.pl", "balanced")
    assert lightning_par.LayerPlacementStrategy is LayerPlacementStrategy
