"""Gradients of what a module of a pipeline returns between steps: one device's on all ranks, or an error on all."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn.functional import cross_entropy, linear, relu
from torch.utils.checkpoint import checkpoint

from lightning_par import HybridParallelStrategy
from tests.helpers import surface
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.helpers.surface import CLASSES, Net, check, loader, metrics, weights

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
Y = torch.tensor([1, 0, 7, 3])
LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"pipeline_parallel_size": 2},
    "placement": {"placement": {"net": 0, "head": 1}},
    "interleaved": {"pipeline_parallel_size": 2, "schedule": "zbv", "stages": ["net.1", "net.3", "head"]},
    "tensor": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "residual": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "shard_residual": True},
    "fsdp": {"pipeline_parallel_size": 2, "data_parallel": "fsdp"},
    "alone": {"tensor_parallel_size": 2, "shard_residual": True},
}


class Layer(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(inputs, outputs), nn.Tanh()
        self.penalty: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x))  # type: ignore[no-any-return]


class Several(Layer):
    """Takes tensors in containers, one of which it writes into, and gives what it goes on with."""

    def forward(self, xs: list[Tensor], scale: dict[str, Tensor]) -> Any:  # type: ignore[override]
        hidden = self.linear(relu(xs[0], inplace=True) + xs[1]) * scale["by"]
        self.penalty = hidden.square().mean()
        return {"x": self.act(hidden) + xs[1], "hidden": (hidden, hidden.chunk(2, 1)), "same": xs[1]}


class Probed(Net):
    """Between steps ``probe`` sees its layers' gradients, and what that gives is kept in ``seen``."""

    def __init__(self, probe: Callable[[Probed], Any]) -> None:
        super().__init__()
        self.net = nn.Sequential(Layer(6, 8), Layer(8, 8), nn.Dropout(0.1), Layer(8, 8))
        self.several = Several(8, 8)
        self.head = nn.Linear(8, CLASSES)
        self.probe, self.seen = probe, dict[str, Any]()

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[3](self.net[1](self.net[0](x))) if self.training else self.net(x)  # dropout has streams of its own
        return self.head(x)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.zero_grad()
        with torch.enable_grad():
            self.seen[f"{batch_idx}"] = self.probe(self)
        self.seen[f"{batch_idx} .grad"] = self.gradients()
        self.zero_grad()
        self.several.penalty = 0.0

    def gradients(self) -> dict[str, Tensor]:
        named = [(name, p.grad) for name, p in self.named_parameters() if p.grad is not None]
        return {name: g.detach().clone() for name, g in named}

    def probed(self, x: Tensor = X) -> Tensor:
        return cross_entropy(self(x), Y)


def of_inputs(model: Probed) -> Any:
    x = X.clone().requires_grad_()
    (saliency,) = grad(model.probed(x), x)
    rows = grad(torch.unbind(model(x)[:, 2]), x)[0]
    hidden = model.net[1](model.net[0](x))
    hidden.retain_grad()
    hidden.register_hook(lambda g: 2 * g)
    model.head(model.net[3](hidden)).mean().backward()
    random = torch.Generator().manual_seed(0)
    point = torch.randn(2, 6, generator=random, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(model.net[0].act, (point,))
    jacobian = torch.autograd.functional.jacobian(model, X[:1])
    return [saliency, rows, hidden.grad, x.grad, jacobian]


def of_weights(model: Probed) -> Any:
    """By `backward`, twice through one graph, from parts of it, with tensors frozen; and by `torch.autograd.grad`."""
    loss = model.probed()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    model.net[1].linear.requires_grad_(False)
    model.probed().backward(inputs=[model.net[0].linear.weight, model.head.bias])
    model.net[1].linear.requires_grad_(True)
    some = [model.head.weight, model.net[0].linear.bias, model.several.linear.weight]
    with pytest.raises(RuntimeError, match="not have been used"):
        grad(model.probed(), some)
    asked = grad(model.probed(), some, allow_unused=True)
    return [*asked[:2], asked[2] is None, *grad(model.probed(), some, materialize_grads=True)]


def of_values(model: Probed) -> Any:
    """Of what is made of weights themselves, their views and copies, also beside layers."""
    w = model.net[1].linear.weight
    penalty = sum(p.abs().sum() for p in model.parameters()) + (w.t() @ w - torch.eye(8, dtype=w.dtype)).square().sum()
    flat = torch.cat([p.view(-1) for p in model.head.parameters()])
    loss = model.probed() + 0.1 * penalty + flat.norm() + w.clone().pow(3).sum() + w[0].sum()
    loss = loss + model.head(linear(X[:, :1], w[:, :1])).mean()
    loss.backward()
    return [loss, *grad((w**3).sum(), w)]


def of_hooks(model: Probed) -> Any:
    """As Grad-CAM does it and its kin, within layers and on them."""
    kept: list[Any] = []
    found: dict[str, Any] = {}
    delta = torch.full((8,), 0.1, dtype=torch.float64, requires_grad=True)

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        kept.append(output)
        output.retain_grad()
        output.register_hook(lambda g: found.update(tensor=g))

    first, last = model.net[0], model.net[3]
    handles = [
        first.linear.register_forward_hook(keep),
        last.register_forward_hook(keep),
        last.register_forward_pre_hook(lambda m, args: kept.append(args[0])),
        model.net[1].register_forward_hook(lambda m, args, output: output + delta),
        last.act.register_full_backward_hook(lambda m, ins, outs: (relu(ins[0]),)),
        last.linear.register_full_backward_pre_hook(lambda m, outs: found.update(pre=outs[0])),
        first.register_full_backward_hook(lambda m, ins, outs: found.update(full=outs[0])),
    ]
    score = model(X)[:, 1]
    asked = grad(score.sum(), kept, retain_graph=True)
    score.sum().backward()
    for handle in handles:
        handle.remove()
    return [*asked, *(x.grad for x in (kept[0], kept[2])), found["tensor"], found["pre"], found["full"], delta.grad]


def of_containers(model: Probed) -> Any:
    """What a layer is given in lists and dicts, writes into, gives back, goes on with, and keeps."""
    x, by = X.clone().requires_grad_(), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    first, second = model.net[0](x) * 1, model.net[0](x)
    given = [first, second]
    out = model.several(given, scale={"by": by})
    same = given[0] is first and given[1] is second and out["same"] is second
    hidden, (a, b) = out["hidden"]
    loss = out["x"].mean() + hidden.square().mean() + a.sum() * b.mean() + model.several.penalty + first.mean()
    loss.backward()
    return [same, x.grad, by.grad, loss]


def of_penalties(model: Probed) -> Any:
    x = X.clone().requires_grad_()
    (g,) = grad(model(x).square().sum(), x, create_graph=True)
    (g.norm(dim=1) - 1).square().mean().backward()
    return x.grad


def of_gradients(model: Probed) -> Any:
    """As Hutchinson's estimate is made, by weights' gradients."""
    some = [model.net[0].linear.weight, model.head.weight]
    first = grad(model.probed(), some, create_graph=True)
    return grad(first, some, [p.detach().sign() for p in some])


def of_weights_hooks(model: Probed) -> Any:
    seen: list[Tensor] = []
    weight = model.net[0].linear.weight
    handles = weight.register_hook(lambda g: seen.append(g.clone())), model.head.bias.register_hook(lambda g: g * 0)
    model.probed().backward()
    (weight**2).sum().backward()
    for handle in handles:
        handle.remove()
    return seen


def of_reruns(model: Probed) -> Any:
    """Called twice, under checkpointing, with draws; and with a step of one's own in between."""
    model.eval()
    x = X.clone().requires_grad_()
    hidden = checkpoint(model.net, x, use_reentrant=False)
    model.head(model.net[1](hidden) + model.net[1](hidden * 2)).square().mean().backward()
    norm = torch.stack([g.norm() for g in model.gradients().values()]).norm()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0 if p.grad is None else 0.1 * p.grad / norm)
    model.train()
    torch.manual_seed(1)
    (drawn,) = grad(model.head(model.net(x)).sum(), x)
    return [x.grad, norm, drawn, torch.rand(2)]


PROBES = {
    f.__name__: f
    for f in (of_inputs, of_weights, of_values, of_hooks, of_containers, of_penalties, of_reruns, of_gradients,
              of_weights_hooks)
}  # fmt: skip
REFUSED = (
    "of_gradients-tensor",
    "of_gradients-fsdp",
    "of_weights-fsdp",
    "of_values-fsdp",
    "of_weights_hooks-tensor",
    "of_weights_hooks-fsdp",
    "of_hooks-tensor",
    "of_gradients-residual",
    "of_weights_hooks-residual",
    "of_hooks-residual",
)
CELLS = [name for probe in PROBES for layout in LAYOUTS if (name := f"{probe}-{layout}") not in REFUSED]


def probed(probe: str, layout: dict[str, Any]) -> Any:
    module = Probed(PROBES[probe])
    strategy = HybridParallelStrategy(**layout) if surface.world_size() > 1 else "auto"
    run = surface.trainer(must_split=False, strategy=strategy, max_epochs=1, use_distributed_sampler=False)
    run.fit(module, loader(8))
    return {"seen": module.seen, "weights": weights(module)}


def _world(layout: dict[str, Any]) -> int:
    sizes = prod(size for name, size in layout.items() if name.endswith("_size"))
    return 2 * sizes if "placement" in layout or "data_parallel" in layout else sizes


@long(but=["of_containers-pipeline"])
@slow(but=[f"{probe}-pipeline" for probe in [*PROBES][::4]])
@pytest.mark.parametrize("cell", CELLS)
def test_gradients_of_layers_between_steps_are_one_devices(cell: str, pool: Pool) -> None:
    probe, layout = cell.split("-")
    check(pool, probed, probe, LAYOUTS[layout], world=_world(LAYOUTS[layout]))


class Evaluated(Net):
    """Its validation steps are attacked, and seen through by a hook's activations."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Layer(6, 8), Layer(8, 8), Layer(8, 8))
        self.kept: list[Tensor] = []
        self.net[1].linear.register_forward_hook(lambda m, args, output: self.keep(output))

    def keep(self, output: Tensor) -> None:
        if torch.is_grad_enabled() and not self.training:
            self.kept.append(output)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            loss = cross_entropy(self(x), y)
            (g,) = grad(loss, x)
            cross_entropy(self(x), y).backward()
        self.log("attacked", self.loss((x + 0.1 * g.sign(), y)))
        self.log("norm", torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm())
        self.log("saliency", x.grad.abs().mean())  # type: ignore[union-attr]
        self.zero_grad()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.kept.clear()
        with torch.enable_grad():
            (g,) = grad(self(batch[0])[:, 0].sum(), self.kept[0])
        self.log("cam", (g * self.kept[0]).relu().mean())
        self.kept.clear()


def evaluated(layout: dict[str, Any]) -> Any:
    strategy = HybridParallelStrategy(**layout) if surface.world_size() > 1 else "auto"
    module = Evaluated()
    run = surface.trainer(must_split=False, strategy=strategy, max_epochs=1, inference_mode=False)
    run.fit(module, loader(8), loader(8))
    found = metrics(run)
    run.test(module, loader(8), verbose=False)
    return {"fit": found, "test": metrics(run), "weights": weights(module)}


@slow(but=["pipeline"])
@pytest.mark.parametrize("layout", [LAYOUTS["pipeline"], LAYOUTS["placement"]], ids=["pipeline", "placement"])
def test_gradients_in_evaluation_steps_are_one_devices(layout: dict[str, Any], pool: Pool) -> None:
    check(pool, evaluated, layout, world=2)


def of_refused(model: Probed) -> dict[str, Any]:
    kept: list[Tensor] = []
    model.net[1].register_forward_hook(lambda m, args, output: output + sum(x.mean() for x in kept))
    model.net[0].register_forward_hook(lambda m, args, output: kept.append(output))
    called = {
        "earlier": lambda: (model.probed(), model.probed().backward()),
        "batched": lambda: torch.autograd.functional.jacobian(model.head, torch.ones(8).double(), vectorize=True),
        "view": lambda: grad(model.head.weight.sum(), model.head.weight[0]),
        "run": lambda: setattr(model, "late", (model.head(torch.ones(8).double()).sum(), model.head.weight.sum())),
    }
    found = {}
    for name, call in called.items():
        try:
            call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def of_parts(model: Probed) -> dict[str, Any]:
    weight = model.net[0].linear.weight
    found = {}
    handle = weight.register_hook(lambda g: None)
    for name, call in {
        "hook": lambda: model.probed().backward(),
        "again": lambda: grad(model.probed(), weight, create_graph=True),
        "one": lambda: handle.remove() or grad(model.probed(), weight),
    }.items():
        try:
            call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def refused(probe: Callable[[Probed], Any], layout: dict[str, Any]) -> dict[str, Any]:
    module = Probed(probe)
    run = surface.trainer(must_split=False, strategy=HybridParallelStrategy(**layout), max_epochs=1)
    run.fit(module, loader(4))
    found: dict[str, Any] = module.seen["0"]
    for n, late in enumerate(getattr(module, "late", ())):
        with pytest.raises(RuntimeError, match="has no gradients here: .*the run has ended"):
            late.backward()
        found[f"late {n}"] = True
    return found


def test_gradients_that_can_not_be_had_are_refused_on_all_ranks(pool: Pool) -> None:
    for seen in pool.run(2, refused, of_refused, LAYOUTS["pipeline"]):
        assert "has no gradients here" in seen["earlier"] and "an earlier call" in seen["earlier"]
        assert "are asked for by a transform" in seen["batched"]
        assert "test_unit_backward.py" in seen["view"] and "a view or copy of 'head.weight'" in seen["view"]
        assert seen["late 0"] and seen["late 1"]


@slow()
@pytest.mark.parametrize("layout", [LAYOUTS["tensor"], LAYOUTS["fsdp"]], ids=["tensor", "fsdp"])
def test_gradients_of_weights_in_parts_that_can_not_be_had_are_refused(layout: dict[str, Any], pool: Pool) -> None:
    for seen in pool.run(4, refused, of_parts, layout):
        assert "A hook is on a weight of 'net.0', which is kept in parts" in seen["hook"]
        assert "`create_graph=True` for the gradient of 'net.0.linear.weight'" in seen["again"]
        if "data_parallel" in layout:
            assert "'net.0.linear.weight', which replicas store in parts" in seen["one"]
        else:
            assert "one" not in seen
