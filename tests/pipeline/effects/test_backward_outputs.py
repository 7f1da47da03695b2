"""Under a pipeline, what hooks in backward see of gradients, log, print and give to loggers is one device's."""

from __future__ import annotations

import contextlib
import functools
import io
from typing import Any

import pytest
from torch import Tensor, nn

from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.helpers.stages import trainer
from tests.helpers.surface import Net, compare, loader, metrics, weights
from tests.pipeline.effects.test_unit_outputs import Board


class Hooked(Net):
    """Hooks on layers, on what they give, and on weights; what they do, says the subclass."""

    def __init__(self, on: str) -> None:
        super().__init__()
        self.on = on
        self.layers = {"0": self.net[0], "2": self.net[2], "head": self.head}
        self.seen: list[Any] = []

    def on_fit_start(self) -> None:
        for name, layer in self.layers.items():
            act = functools.partial(self.act, name, layer)
            if self.on == "modules":
                layer.register_full_backward_hook(lambda m, into, out, act=act: act(out[0]))
            elif self.on == "before":
                layer.register_full_backward_pre_hook(lambda m, out, act=act: act(out[0]))
            elif self.on == "outputs":
                layer.register_forward_hook(functools.partial(_on_output, act))
            elif self.on == "weights":
                layer.weight.register_hook(act)
            else:
                layer.weight.register_post_accumulate_grad_hook(lambda p, act=act: act(p.grad))

    def act(self, name: str, layer: nn.Module, grad: Tensor) -> None: ...


def _on_output(act: Any, layer: nn.Module, args: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(act)


class Says(Hooked):
    """Gradients are logged, printed and given to loggers."""

    def act(self, name: str, layer: nn.Module, grad: Tensor) -> None:
        self.log(f"norm {name}", grad.norm(), on_step=True, on_epoch=True, prog_bar=True)
        self.log("train", grad.norm())  # which the step logs, too
        self.print("layer", name, round(float(grad.norm()), 9))
        self.logger.experiment.add(name, grad.norm())
        if self.global_step == 1:
            self.log_dict({f"late {name}": grad.sum(), f"later {name}": 1.0})


class Looks(Hooked):
    """The accumulated gradient of the layer's own weight is kept and logged."""

    def act(self, name: str, layer: nn.Module, grad: Tensor) -> None:
        held: Any = layer.weight.grad
        self.seen.append((name, None if held is None else held.norm()))
        self.log(f"grad {name}", -1.0 if held is None else held.norm())


class Writes(Hooked):
    """It is changed, in place and by another one."""

    def act(self, name: str, layer: nn.Module, grad: Tensor) -> None:
        weight: Any = layer.weight
        if weight.grad is not None:
            weight.grad.mul_(0.5)
            weight.grad = weight.grad * 0.9


class Removed(Looks):
    """Hooks are gone in mid-window."""

    def on_fit_start(self) -> None:
        self.handles = [
            m.register_full_backward_hook(functools.partial(self.see, name)) for name, m in self.layers.items()
        ]

    def see(self, name: str, layer: nn.Module, into: Any, out: Any) -> None:
        self.act(name, layer, out[0])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            for handle in self.handles:
                handle.remove()


def _fit(kind: type[Hooked], on: str, schedule: str = "1f1b") -> Any:
    printed, board, module = io.StringIO(), Board(), kind(on)
    t = trainer(
        microbatches=1, schedule=schedule, logger=board, max_epochs=2, log_every_n_steps=1, accumulate_grad_batches=3
    )
    with contextlib.redirect_stdout(printed):
        t.fit(module, loader(28))
    bar = {name: float(x) for name, x in t.progress_bar_metrics.items()}
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("layer")]
    seen = {f"{n} {name}": x for n, (name, x) in enumerate(module.seen) if x is not None}
    return {"metrics": metrics(t), "bar": bar, "seen": seen, "weights": weights(module)}, board.given, lines


KINDS: list[type[Hooked]] = [Says, Looks, Writes]
ROWS: dict[str, tuple[type[Hooked], str, str]] = {
    f"{kind.__name__}-{on}-{schedule}": (kind, on, schedule)
    for kind in KINDS
    for on in ("modules", "before", "outputs", "weights", "after")
    for schedule in ("1f1b", "interleaved_1f1b", "zbv")
} | {"Removed": (Removed, "", "1f1b")}


@long("Looks-modules-zbv")
@slow(but=["Looks-modules-zbv", "Removed"])
@pytest.mark.parametrize("row", ROWS)
def test_what_hooks_in_backward_see_and_say_is_one_devices(pool: Pool, row: str) -> None:
    kind, on, schedule = ROWS[row]
    ((found, given, lines),) = pool.run(1, _fit, kind, on)
    ranks = pool.run(2, _fit, kind, on, schedule)
    assert not any(compare(found, seen, 1e-7) for seen, *_ in ranks)  # Lightning keeps means in float32
    assert not compare(given, ranks[0][1], 1e-9)
    assert lines == ranks[0][2] and not any(said or text for _, said, text in ranks[1:])


class Holds(Hooked):
    """A logger that was kept is called in a late step."""

    def on_fit_start(self) -> None:
        self.held: Any = self.logger
        super().on_fit_start()

    def act(self, name: str, layer: nn.Module, grad: Tensor) -> None:
        if self.global_step == 1 and name == "head":
            self.held.log_metrics({"norm": float(grad.norm())})


class Elsewhere(Hooked):
    """A hook looks at the gradient of a weight of another stage, in a late step."""

    def act(self, name: str, layer: nn.Module, grad: Tensor) -> None:
        if self.global_step == 1 and name == "head":
            self.seen.append(self.net[0].weight.grad)


class Raises(Hooked):
    """A hook on one stage raises."""

    def act(self, name: str, layer: nn.Module, grad: Tensor) -> None:
        if self.global_step == 1 and name == "2":
            raise ArithmeticError("of a hook")


def _refused(kind: type[Hooked], on: str) -> str:
    try:
        _fit(kind, on)
    except (NotImplementedError, ArithmeticError) as error:
        return str(error)
    return ""


REFUSED: dict[str, tuple[type[Hooked], str, tuple[str, ...]]] = {
    "holds": (Holds, "modules", ("test_backward_outputs.py:", "Write `self.logger`")),
    "holds, on a weight": (Holds, "after", ("test_backward_outputs.py:", "Write `self.logger`")),
    "elsewhere": (Elsewhere, "modules", ("test_backward_outputs.py:", "'net.0.weight'", "on_after_backward")),
    "elsewhere, on a weight": (Elsewhere, "weights", ("'net.0.weight'", "on_after_backward")),
    "raises": (Raises, "modules", ("of a hook",)),
    "raises, on a weight": (Raises, "weights", ("of a hook",)),
}


@slow(but=["elsewhere, on a weight", "raises"])
@pytest.mark.parametrize("row", REFUSED)
def test_what_hooks_in_backward_cannot_do_is_refused_on_all_ranks(pool: Pool, row: str) -> None:
    kind, on, words = REFUSED[row]
    for message in pool.run(2, _refused, kind, on):
        assert all(word in message for word in words), message
