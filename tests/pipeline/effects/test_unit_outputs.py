"""Under a pipeline, what layers and hooks on them log, print and give to loggers is one device's."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.helpers.stages import trainer
from tests.helpers.surface import Net, compare, kept, loader, metrics, weights


class Board(Logger):
    """A logger whose experiment keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    name, version = "board", 0  # type: ignore[assignment]

    @property
    def experiment(self) -> Any:
        return self

    def add(self, name: str, value: Any) -> None:
        self.given.append((name, kept(value)))

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.given.append((step, [*metrics], {name: kept(x) for name, x in metrics.items()}))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


class Hooked(Net):
    """Hooks log on each layer; how, says the subclass."""

    board: type[Board] = Board

    def __init__(self) -> None:
        super().__init__()
        for name, m in [*self.net.named_children(), ("head", self.head)]:
            m.register_forward_hook(lambda m, args, output, name=name: self.heard(name, m, args[0], output))

    def heard(self, name: str, layer: nn.Module, x: Tensor, output: Tensor) -> None: ...

    def loss(self, batch: Any) -> Tensor:
        self.log("before", batch[0].sum())
        loss = super().loss(batch)
        self.log("after", loss)
        return loss


class Sums(Hooked):
    """Sums and means over samples."""

    def heard(self, name: str, layer: nn.Module, x: Tensor, output: Tensor) -> None:
        self.log(f"mean {name}", output.exp().mean(), on_step=True, on_epoch=True)
        self.log_dict({f"sum {name}": (output > 0).double().sum(), f"rows {name}": output.detach().norm(dim=-1).mean()})


class Alike(Hooked):
    """What no samples are in, and how many there are."""

    def heard(self, name: str, layer: nn.Module, x: Tensor, output: Tensor) -> None:
        self.log(f"number {name}", 3.0, prog_bar=True)
        self.log(f"samples {name}", float(x.shape[0]), reduce_fx="sum", on_step=False, on_epoch=True)
        if isinstance(layer, nn.Linear):
            self.log(f"weight {name}", layer.weight.detach().norm(), reduce_fx=torch.max, on_epoch=True)
            self.log(f"bias {name}", layer.bias.abs().max())
        self.print("layer", name, tuple(x.shape))


class Whole(Hooked):
    """What needs the batch whole."""

    def heard(self, name: str, layer: nn.Module, x: Tensor, output: Tensor) -> None:
        self.log(f"norm {name}", output.norm())
        self.log(f"largest {name}", float(output.max()), on_step=False, on_epoch=True)


class Given(Hooked):
    """Loggers are given values, samples among them."""

    def heard(self, name: str, layer: nn.Module, x: Tensor, output: Tensor) -> None:
        self.logger.experiment.add(f"{name} samples", output.detach())
        self.logger.experiment.add(f"{name} mean", output.exp().mean())
        self.logger.experiment.add(f"{name} all", output.shape[0])


class Third(Hooked):
    """The last but one layer says something at each third step alone, by the trainer's number of it."""

    def heard(self, name: str, layer: nn.Module, x: Tensor, output: Tensor) -> None:
        if name == "3" and self.global_step % 3 == 2:
            self.log("third", output.norm(), on_step=True, on_epoch=True)
            self.print("layer", name, self.global_step)


class Later(Hooked):
    """By a method of the module's, where a value is large, which no trial meets."""

    def heard(self, name: str, layer: nn.Module, x: Tensor, output: Tensor) -> None:
        if name == "0" and output.detach().abs().max() > 2.5:
            self.tell(output)

    def tell(self, output: Tensor) -> None:
        self.log("large", output.detach().abs().max(), on_epoch=True)


class Texts(Hooked):
    """Texts with values of the batch in them."""

    def heard(self, name: str, layer: nn.Module, x: Tensor, output: Tensor) -> None:
        self.print("layer", name, output.detach().exp().mean())
        self.print(f"layer {name} {output.sum():.4f}", output.detach()[:, 0])


class Writes(Hooked):
    """A layer, and the step, print means over samples."""

    def heard(self, name: str, layer: nn.Module, x: Tensor, output: Tensor) -> None:
        self.print("layer", name, output.detach().exp().mean())

    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)
        self.print("layers", x.detach().mean())
        return self.head(x)


class Tries(Hooked):
    """A function that needs the samples together, in a `try`: in layers, and in the step itself."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.net(x)
        self.heard("net", self.net, x, hidden)
        return self.head(hidden)

    def heard(self, name: str, layer: nn.Module, x: Tensor, output: Tensor) -> None:
        try:
            self.log(f"quantile {name}", torch.quantile(output.detach().flatten(), 0.9))
        except Exception:
            self.log(f"quantile {name}", -1.0)


class Twice(Hooked):
    """A layer is called twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)
        return self.head(self.net[3](x))

    def heard(self, name: str, layer: nn.Module, x: Tensor, output: Tensor) -> None:
        self.log(f"mean {name}", output.abs().mean(), on_step=True, on_epoch=True)
        self.print("layer", name)


class Held(Hooked):
    """A hook holds the logger itself."""

    def on_fit_start(self) -> None:
        logger = self.logger
        self.net[0].register_forward_hook(lambda m, args, output: logger.log_metrics({"norm": float(output.norm())}))


class Service(Board):
    """A logger whose experiment is on the first rank alone, as Lightning's are."""

    def __init__(self) -> None:
        super().__init__()
        self.client = Client(self.given)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return self.client


class Client:
    """Keeps what it is given."""

    def __init__(self, given: list[Any]) -> None:
        self.given = given

    def add(self, name: str, value: Any) -> None:
        self.given.append((name, kept(value)))


class HeldExperiment(Hooked):
    """Hooks hold the logger's experiment."""

    board = Service

    def on_fit_start(self) -> None:
        self.held = self.logger.experiment.add if isinstance(self, HeldMethod) else self.logger.experiment

    def heard(self, name: str, layer: nn.Module, x: Tensor, output: Tensor) -> None:
        self.held.add(name, output.detach().exp().mean())


class HeldMethod(HeldExperiment):
    """Hooks hold a method of it."""

    def heard(self, name: str, layer: nn.Module, x: Tensor, output: Tensor) -> None:
        self.held(name, output.detach().exp().mean())


class HeldLate(HeldExperiment):
    """They call it in a late step alone, which no trial meets, and read by the module's logger before."""

    def heard(self, name: str, layer: nn.Module, x: Tensor, output: Tensor) -> None:
        self.logger.experiment.add(name, output.detach().exp().mean())
        if self.global_step == 3 and name == "0":
            super().heard(name, layer, x, output)


class HeldLateElsewhere(HeldExperiment):
    """Likewise, on the stage whose rank logs nothing."""

    def heard(self, name: str, layer: nn.Module, x: Tensor, output: Tensor) -> None:
        if self.global_step == 3 and name == "head":
            super().heard(name, layer, x, output)


def _fit(kind: type[Hooked], microbatches: Any, all_stages: bool = False) -> Any:
    printed, board = io.StringIO(), kind.board()
    t = trainer(
        microbatches=microbatches,
        logger=board,
        max_epochs=2 if kind is Third else 1,
        num_sanity_val_steps=1,
        log_every_n_steps=1,
    )
    module = kind()
    with contextlib.redirect_stdout(printed):
        t.fit(module, loader(18 if all_stages else 20), loader(8, 1))  # the last batch may be smaller
        validated = t.validate(module, loader(7, 2), verbose=False) if all_stages else None
        if all_stages:
            t.test(module, loader(8, 2), verbose=False)
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("layer")]
    bar = {name: float(x) for name, x in t.progress_bar_metrics.items()}
    return {"metrics": metrics(t), "bar": bar, "validated": validated, "weights": weights(module)}, board.given, lines


def _compared(pool: Pool, kind: type[Hooked], microbatches: Any, all_stages: bool) -> None:
    ((found, given, lines),) = pool.run(1, _fit, kind, microbatches, all_stages)
    ranks = pool.run(2, _fit, kind, microbatches, all_stages)
    for seen, _, _ in ranks:
        assert not compare(found, seen, 1e-7)  # Lightning keeps means in float32
    assert given and not compare(given, ranks[0][1], 1e-9)
    assert lines == ranks[0][2] and not any(said or text for _, said, text in ranks[1:])


@long()
@slow(but=["3-Sums"])
@pytest.mark.parametrize("kind", [Sums, Alike, Given, Twice], ids=lambda x: x.__name__)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_what_layers_log_is_one_devices(pool: Pool, kind: type[Hooked], microbatches: int) -> None:
    _compared(pool, kind, microbatches, kind is Sums)


@slow("1")
@pytest.mark.parametrize("microbatches", ["auto", 1])
def test_what_needs_the_batch_whole_has_it_whole(pool: Pool, microbatches: Any) -> None:
    _compared(pool, Whole, microbatches, False)


@long("Writes")
@slow("Third", "Texts", "Tries")
@pytest.mark.parametrize("kind", [Third, Later, Texts, Writes, Tries], ids=lambda x: x.__name__)
def test_what_layers_say_at_some_steps_or_write_is_one_devices(pool: Pool, kind: type[Hooked]) -> None:
    _compared(pool, kind, "auto", kind is Third)  # in each epoch it is another step


def _refused(kind: type[Hooked]) -> str:
    try:
        _fit(kind, 1)
    except (NotImplementedError, RuntimeError) as error:
        return str(error)
    return ""


@slow("HeldLateElsewhere")
@pytest.mark.parametrize("kind", [HeldLate, HeldLateElsewhere], ids=lambda x: x.__name__)
def test_a_logger_that_a_layer_holds_itself_is_refused_in_a_late_step(pool: Pool, kind: type[Hooked]) -> None:
    messages = pool.run(2, _refused, kind)
    assert messages[kind is HeldLateElsewhere].count("Write `self.logger`") == 1 and all(messages), messages


def _uncut(kind: type[Hooked]) -> str:
    with pytest.raises(ValueError) as caught:
        _fit(kind, 2)
    return str(caught.value)


@pytest.mark.parametrize("kind", [Whole, Tries], ids=lambda x: x.__name__)
def test_what_a_layer_needs_the_batch_whole_for_is_refused_with_its_line(pool: Pool, kind: type[Hooked]) -> None:
    """In a `try` of the user's, too."""
    for message in pool.run(2, _uncut, kind):
        assert f"{'norm' if kind is Whole else 'quantile'}`" in message and "test_unit_outputs.py:" in message, message


@pytest.mark.parametrize("kind", [Held, HeldExperiment, HeldMethod], ids=lambda x: x.__name__)
def test_a_logger_that_a_layer_holds_itself_is_refused(pool: Pool, kind: type[Hooked]) -> None:
    for message in pool.run(2, _refused, kind):
        assert "test_unit_outputs.py" in message and "Write `self.logger`" in message, message


class Printing(Hooked):
    """Layers print by themselves, and hold nothing by which they could log."""

    def __init__(self) -> None:
        super().__init__()
        for m in [*self.net, self.head]:
            m.register_forward_hook(_print)


def _print(layer: nn.Module, args: Any, output: Tensor) -> None:
    print("layer of", type(layer).__name__, tuple(output.shape)[1:])


def test_what_layers_print_themselves_is_printed_once(pool: Pool) -> None:
    ((_, _, lines),) = pool.run(1, _fit, Printing, 1)
    ranks = pool.run(2, _fit, Printing, 1)
    assert sorted(lines) == sorted(line for *_, printed in ranks for line in printed)
