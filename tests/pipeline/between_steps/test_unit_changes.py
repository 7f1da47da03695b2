"""What layers set, and hooks on them keep, as they are called outside a schedule: all ranks have it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_par import HybridParallelStrategy
from lightning_par.mesh.known_objects import Known
from lightning_par.pipeline.between_steps.units.unit_changes import UnitChanges
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.helpers.surface import Net, check, loader, trained


class Remembers(nn.Linear):
    """What it was given last, how often it was called, and what can't be sent."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.calls, self.last = 0, torch.zeros(())
        self.seen: dict[str, list[Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last, self.lock = x.detach().square().mean(), threading.Lock()
        self.seen.setdefault("all", []).append(self.last)
        return x + super().forward(x)


class Loops(Net):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.layers = where, nn.ModuleList(Remembers() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return super().forward(x)

    def tell(self) -> None:
        self.log("last", sum((layer.last for layer in self.layers), torch.zeros(())))
        self.log("calls", float(sum(layer.calls for layer in self.layers)))
        self.log("seen", torch.stack([x for layer in self.layers for x in layer.seen["all"][-3:]]).sum())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0]
        while x.square().mean().item() < 3 + batch_idx:  # the model tells how often
            for layer in self.layers:
                x = layer(x)
        self.log("val", x.mean())
        if self.where == "in a step":
            self.tell()

    def on_validation_epoch_end(self) -> None:
        if self.where == "in a hook":
            self(torch.ones(2, 6, dtype=torch.float64))
            self.tell()


def _fit(where: str, layout: dict[str, Any]) -> Any:
    module = Loops(where)
    module.val_dataloader = lambda: loader(8, 3)  # type: ignore[method-assign]
    return trained(module, loader(), partial(HybridParallelStrategy, **layout), max_epochs=2)


@long()
@slow("in a hook")
@pytest.mark.parametrize("where", ["in a step", "in a hook"])
def test_what_layers_keep_as_they_are_called_one_by_one_is_on_all_ranks(where: str, pool: Pool) -> None:
    check(pool, _fit, where, {"pipeline_parallel_size": 2})


class Seen:
    """Keeps what its layers return."""

    def __init__(self) -> None:
        self.outputs: dict[str, Tensor] = {}

    def of(self, name: str) -> Any:
        def hook(layer: nn.Module, given: Any, output: Tensor) -> None:
            self.outputs[name] = output.detach()

        return hook


class Captures(Net):
    """Looks into layers by hooks, between steps, as for a picture of what they return."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.kept = how, [torch.zeros((), dtype=torch.float64)]
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)), nn.Linear(6, 8))

    def keep(self, layer: nn.Module, given: Any, output: Tensor) -> None:
        self.kept.append(output.detach().square().sum())

    def seen(self) -> list[Tensor]:
        """What they return for a batch of ones."""
        found: list[Tensor] = []
        seen, total = Seen(), torch.zeros((), dtype=torch.float64)
        ways: dict[str, Callable[[str], Any]] = {
            "a list": lambda _: lambda layer, given, output: found.append(output.detach()),
            "an object": seen.of,
            "a method of the module": lambda _: self.keep,
            "a tensor": lambda _: lambda layer, given, output: total.add_(output.detach().sum()) and None,
            "inputs": lambda _: lambda layer, given, output: found.append(given[0].detach()),
        }
        if self.how == "a forward of its own":
            self._wrap(self.net[1][0], found)
        elif self.how == "once":
            self._once(found)
        else:
            layers = [layer for name, layer in self.net.named_modules() if isinstance(layer, nn.Linear)]
            handles = [x.register_forward_hook(ways[self.how](f"{n}")) for n, x in enumerate(layers)]
        with torch.no_grad():
            self(torch.ones(2, 6, dtype=torch.float64))
        if self.how == "a forward of its own":
            del self.net[1][0].forward
        elif self.how != "once":
            for handle in handles:
                handle.remove()
        return [*found, *seen.outputs.values(), *self.kept, total]

    def _wrap(self, layer: nn.Module, found: list[Tensor]) -> None:
        as_ever = layer.forward

        def forward(x: Tensor) -> Tensor:
            found.append(as_ever(x).detach())
            return as_ever(x)

        layer.forward = forward

    def _once(self, found: list[Tensor]) -> None:
        for layer in self.net:

            def hook(layer: nn.Module, given: Any, output: Tensor, taken: list[Any]) -> None:
                found.append(output.detach())
                taken.pop().remove()

            taken: list[Any] = []
            taken.append(layer.register_forward_hook(partial(hook, taken=taken)))

    def on_train_epoch_end(self) -> None:
        for _ in range(2):
            seen = self.seen()
            self.log(f"seen {self.kept[0]}", torch.stack([x.sum() for x in seen]).sum() + len(seen))


HOW = ["a list", "an object", "a method of the module", "a tensor", "inputs", "a forward of its own", "once"]


def _capture(how: str, layout: dict[str, Any]) -> Any:
    return trained(Captures(how), loader(), partial(HybridParallelStrategy, **layout), max_epochs=1)


@long("a list")
@slow(*HOW[1:-1])
@pytest.mark.parametrize("how", HOW)
def test_what_hooks_within_layers_keep_between_steps_is_on_all_ranks(how: str, pool: Pool) -> None:
    check(pool, _capture, how, {"pipeline_parallel_size": 2})


@slow(*HOW)
@pytest.mark.parametrize("how", HOW)
def test_of_layers_in_parts_it_is_whole(how: str, pool: Pool) -> None:
    check(pool, _capture, how, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, world=4)


class Direct(Captures):
    """Calls the forward of layers itself, between calls of others, with hooks that run code of torch's around them."""

    def on_train_epoch_end(self) -> None:
        for layer in self.net.children():
            layer.register_forward_hook(self.keep)
        x = torch.ones(2, 6, dtype=torch.float64)
        with torch.no_grad():
            first, second = self.net.forward(x), self.head.forward(self.net(x))
        self.log("first", first.sum())
        self.log("second", second.square().sum())
        self.log("kept", torch.stack(self.kept).sum() + len(self.kept))


def _direct(layout: dict[str, Any]) -> Any:
    return trained(Direct(""), loader(), partial(HybridParallelStrategy, **layout), max_epochs=1)


@slow("cut")
@pytest.mark.parametrize(
    "layout", [{"placement": {"net": 0, "head": 1}}, {"pipeline_parallel_size": 2}], ids=["placed", "cut"]
)
def test_forwards_of_layers_that_user_code_calls_are_one_devices(layout: dict[str, Any], pool: Pool) -> None:
    check(pool, _direct, layout)


class Interrupted(Captures):
    """Ends a call by an exception of its own, once a layer within has returned."""

    def seen(self) -> list[Tensor]:
        class EnoughError(Exception):
            pass

        kept: list[Tensor] = []

        def hook(layer: nn.Module, given: Any, output: Tensor) -> None:
            kept.append(output.detach())
            raise EnoughError(output.detach()) if self.how == "own" else ValueError("enough")

        handle = self.net[1][0].register_forward_hook(hook)
        with torch.no_grad(), pytest.raises(EnoughError if self.how == "own" else ValueError) as raised:
            self(torch.ones(2, 6, dtype=torch.float64))
        handle.remove()
        return [*kept, *[x for x in raised.value.args if isinstance(x, Tensor)], *self.kept]


def _interrupt(how: str, layout: dict[str, Any]) -> Any:
    return trained(Interrupted(how), loader(8), partial(HybridParallelStrategy, **layout), max_epochs=1)


@slow("torch's")
@pytest.mark.parametrize("how", ["own", "torch's"])
def test_what_hooks_raise_between_steps_is_raised_on_all_ranks_and_what_they_kept_is_there(
    how: str, pool: Pool
) -> None:
    check(pool, _interrupt, how, {"pipeline_parallel_size": 2})


class Refused(Captures):
    def seen(self) -> list[Tensor]:
        kept: list[Any] = []
        if self.how == "can't be sent":
            self.net[0][0].register_forward_hook(lambda *_: kept.append(threading.Lock()))
        elif self.trainer.is_global_zero:
            self.net[4].register_forward_hook(lambda *_: kept.append(1))
        self(torch.ones(2, 6, dtype=torch.float64))
        return kept


def _refused(how: str) -> str:
    layout = partial(HybridParallelStrategy, pipeline_parallel_size=2)
    with pytest.raises((RuntimeError, TypeError)) as error:
        trained(Refused(how), loader(), layout, max_epochs=1)
    return str(error.value)


@long("on one rank-Hooks on 'net.4' and what is in it are on pipeline rank 1 nowhere, and on rank 0 on net.4\\\\.")
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("can't be sent", r"hook of 'net.0' or its own code stores in hook 0 of net.0.0.kept.* can't be sent to the"),
        ("on one rank", r"Hooks on 'net.4' and what is in it are on pipeline rank 1 nowhere, and on rank 0 on net.4\."),
    ],
)
def test_hooks_of_one_rank_and_what_cannot_be_sent_are_refused(how: str, why: str, pool: Pool) -> None:
    told = pool.run(2, _refused, how)
    assert any(re.search(why, x) for x in told), told


def test_weights_buffers_and_modules_are_not_told() -> None:
    def made() -> tuple[nn.Module, UnitChanges]:
        unit = nn.Sequential(Remembers(), nn.BatchNorm1d(6))
        return unit, UnitChanges("unit", unit, {}, frozenset())

    (unit, changes), device = made(), torch.device("cpu")
    changes.look()
    unit(torch.ones(2, 6))
    unit[0].weight = nn.Parameter(torch.ones(6, 6))
    unit[1].running_mean = torch.ones(6)
    unit.more = nn.Linear(1, 1)
    left = changes.left(changes.known(Known()), device)
    assert left.changed.own.keys() == {"unit.0", "unit.0.seen"}
    assert left.changed.own["unit.0"].entries.keys() == {"calls", "last"}  # a lock stays where it is
    other, there = made()
    there.put(left, rank=1, source=0)
    assert other[0].calls == 1
