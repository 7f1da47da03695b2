"""A stage's backward in two parts leaves what the whole one leaves, does each half of the work once, and lets go."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_par.pipeline.run.backward import SplitBackward, backward
from tests.helpers.slow import long

D = 8


@dataclass
class Boundary:
    """What one stage received and sent on for one microbatch.

    Args:
        inputs: received leaves that require a gradient, in order.
        outputs: what was sent on, or the loss; each requires a gradient.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]


class Block(nn.Module):
    """A Transformer's block, hand-written: norms, residuals, attention, dropout."""

    def __init__(self, width: int = D, dropout: float = 0.0) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.down(F.gelu(self.up(self.norms[1](x)))))


class Twice(nn.Module):
    """A weight used twice in a row, one used twice side by side, one of a parametrization, used twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.beside, self.own = (nn.Linear(D, D) for _ in range(3))
        self.normed = weight_norm(nn.Linear(D, D))

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.own(self.shared(x).tanh()).sin())
        with nn.utils.parametrize.cached():
            x = self.normed(self.normed(x).tanh())
        return self.beside(x) * self.beside(x.cos())


class Bypass(nn.Module):
    """Weights that join the inputs late, or leave the stage without having met them."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.Parameter(torch.randn(2, 3, D))
        self.scale, self.gate = nn.Parameter(torch.rand(D)), nn.Parameter(torch.rand(D))
        self.deep, self.unused = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights = self.deep(self.prefix).sigmoid()
        return torch.cat([weights, self.scale * x], 1), self.scale, weights.mean(0) * self.gate


class InputsAndOutputs(nn.Module):
    """Two inputs, one read twice and passed on; three outputs, one of them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(D, D)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.fc(x).relu_()
        return h * y, x, self.fc((y * 1).mul_(2)).sum()


class OneInputUnread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(D, D)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.fc(x)


class _Scaled(torch.autograd.Function):
    """Writes to its gradient, and forgets what it saved: not made for two backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.saved = x, weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (x, weight), ctx.saved = ctx.saved, None
        return grad * weight, (grad * x).sum((0, 1))


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(D, D), nn.Linear(D, D), nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(_Scaled.apply(self.first(x), self.scale)) * _Scaled.apply(x, self.last.bias)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.blocks, self.reentrant, self.calls = nn.ModuleList([Block(), Block(dropout=0.5)]), reentrant, 0

    def _call(self, block: nn.Module, x: Tensor) -> Tensor:
        self.calls += 1
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(self._call, block, x, use_reentrant=self.reentrant)
        return x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, D, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Hooked(nn.Module):
    """Hooks on weights, on activations, and on modules; each changes a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.fcs = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.fired: Counter[str] = Counter()
        self.fcs[0].weight.register_hook(lambda grad: self._fire("weight", grad * 3))
        self.fcs[0].weight.register_post_accumulate_grad_hook(lambda p: self._fire("after", None))
        self.fcs[1].register_full_backward_hook(lambda _, grads, __: (self._fire("module", grads[0].sin()),))

    def _fire(self, name: str, result: Any) -> Any:
        self.fired[name] += 1
        return result

    def forward(self, x: Tensor) -> Tensor:
        x = self.fcs[1](self.fcs[0](x).tanh())
        x.register_hook(lambda grad: grad.exp())
        x = self.fcs[2](x.tanh())
        x.grad_fn.register_prehook(lambda grads: (grads[0] * 2, *grads[1:]))
        return x


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Unflatten(1, (2, 2)),
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Dropout2d(0.3),
            nn.MaxPool2d(2),
            nn.ConvTranspose2d(4, 2, 3),
            nn.GroupNorm(2, 2),
        )


class Compiled(nn.Module):
    """Between layers that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(D, D), Block(), nn.Linear(D, D)
        self.block.compile(backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.first(x)))


STAGES: dict[str, Callable[[], nn.Module]] = {
    "block": Block,
    "dropout": lambda: nn.Sequential(Block(dropout=0.3), Block(dropout=0.5)),
    "multihead": lambda: nn.TransformerEncoderLayer(D, 2, 16, batch_first=True),
    "twice": Twice,
    "bypass": Bypass,
    "inputs and outputs": InputsAndOutputs,
    "one input unread": OneInputUnread,
    "custom": Custom,
    "checkpointed": Checkpointed,
    "reentrant": lambda: Checkpointed(reentrant=True),
    "compiled": Compiled,
    "lstm": Recurrent,
    "hooked": Hooked,
    "convolutions": Convolutions,
    "relay": nn.Identity,
}
UNSPLIT = ("reentrant", "compiled")
TWO_INPUTS = {"inputs and outputs", "one input unread"}


def _stage(name: str) -> tuple[nn.Module, Boundary, list[Tensor]]:
    """A stage after its forward, and the gradients of its outputs; equal at every call."""
    torch.manual_seed(0)
    stage = STAGES[name]().double()
    inputs = [torch.randn(2, 4, D, dtype=torch.float64, requires_grad=True) for _ in range(1 + (name in TWO_INPUTS))]
    outputs = stage(*inputs)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    return stage, Boundary(inputs, outputs), [torch.randn_like(x) for x in outputs]


def _grads(stage: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in stage.named_parameters()}


def _largest_difference(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> float:
    assert {name for name, grad in a.items() if grad is None} == {name for name, grad in b.items() if grad is None}
    differences = [(grad - b[name]).abs().max().item() for name, grad in a.items() if grad is not None]
    return max(differences, default=0.0)


@long("compiled")
@pytest.mark.parametrize("name", STAGES)
def test_both_parts_leave_what_the_whole_leaves(name: str) -> None:
    stage, boundary, grads = _stage(name)
    expected = backward(boundary.outputs, grads, boundary.inputs)
    assert all(x.grad is None for x in boundary.inputs)
    again, boundary, grads = _stage(name)
    split = SplitBackward()
    received = split.inputs(boundary.outputs, grads, boundary.inputs)
    early = {key for key, grad in _grads(again).items() if grad is not None}
    split.weights()
    assert (split.unsplit is not None) == (name in UNSPLIT)
    assert _largest_difference(dict(zip("xy", expected)), dict(zip("xy", received))) <= 1e-12
    assert _largest_difference(_grads(stage), _grads(again)) <= 1e-12
    assert all(x.grad is None for x in boundary.inputs)
    if name in EARLY:
        assert early == EARLY[name]
    elif name not in (*UNSPLIT, "lstm"):
        assert early == set()


# What has to be computed in the first part, and nothing else.
EARLY = {
    "twice": {"shared.weight", "shared.bias", "normed.bias"}
    | {f"normed.parametrizations.weight.original{i}" for i in (0, 1)},
    "custom": {"scale", "last.weight", "last.bias"},
}


def test_hooks_of_weights_and_modules_fire_once() -> None:
    stage, boundary, grads = _stage("hooked")
    split = SplitBackward()
    split.inputs(boundary.outputs, grads, boundary.inputs)
    assert stage.fired == {"module": 1}
    split.weights()
    assert stage.fired == {"module": 1, "weight": 1, "after": 1}


def _flops(function: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("depth", [1, 4])
def test_each_part_does_its_half_once(depth: int) -> None:
    torch.manual_seed(0)
    stage = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(depth)))
    x = torch.randn(16, 32, requires_grad=True)
    y, split = stage(x), SplitBackward()
    forward = depth * 2 * 16 * 32 * 32
    assert _flops(lambda: split.inputs([y], [torch.ones_like(y)], [x])) == forward
    assert _flops(split.weights) == forward


def test_a_blocks_parts_add_up_to_the_whole() -> None:
    stage, x = nn.Sequential(Block(32), Block(32)), torch.randn(2, 16, 32, requires_grad=True)
    y = stage(x)
    whole = _flops(lambda: backward([y], [torch.ones_like(y)], [x]))
    y, split = stage(x), SplitBackward()
    first, second = _flops(lambda: split.inputs([y], [torch.ones_like(y)], [x])), _flops(split.weights)
    assert first + second == whole
    assert 0.4 < second / whole <= 0.5  # attention's own products, where they are counted, have no weights


def test_weights_used_twice_cost_no_second_pass() -> None:
    stage, boundary, grads = _stage("twice")
    whole = _flops(lambda: backward(boundary.outputs, grads, boundary.inputs))
    stage, boundary, grads = _stage("twice")
    split = SplitBackward()
    first = _flops(lambda: split.inputs(boundary.outputs, grads, boundary.inputs))
    assert first + _flops(split.weights) == whole


def test_a_checkpointed_block_is_computed_once_a_part() -> None:
    stage, boundary, grads = _stage("checkpointed")
    split = SplitBackward()
    split.inputs(boundary.outputs, grads, boundary.inputs)
    assert stage.calls == 2 + 2
    split.weights()
    assert stage.calls == 2 + 2 + 2


def test_without_inputs_all_is_left_to_the_weights() -> None:
    torch.manual_seed(0)
    stage, tokens = nn.Sequential(nn.Embedding(5, D), Block()).double(), torch.arange(4)[None]
    backward([stage(tokens).square().sum()], [None], [])
    expected = {name: grad.clone() for name, grad in _grads(stage).items() if grad is not None}
    stage.zero_grad()
    split = SplitBackward()
    assert _flops(lambda: split.inputs([stage(tokens).square().sum()], [None], [])) > 0  # the forward in it
    assert all(grad is None for grad in _grads(stage).values())
    split.weights()
    assert _largest_difference(expected, _grads(stage)) <= 1e-12


def test_gradients_of_microbatches_add_up() -> None:
    torch.manual_seed(0)
    stage = Twice().double()
    xs = [torch.randn(2, D, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    for x in xs:
        backward([stage(x).sum()], [None], [x])
    expected = {name: grad.clone() for name, grad in _grads(stage).items() if grad is not None}
    stage.zero_grad()
    splits = [SplitBackward() for _ in xs]
    for x, split in zip(xs, splits):
        split.inputs([stage(x).sum()], [None], [x])
    for split in splits:
        split.weights()
        split.weights()  # nothing is left for it
    assert _largest_difference(expected, _grads(stage)) <= 1e-12


def test_an_output_without_a_gradient_is_refused() -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match=r"shape \(2,\) needs its gradient"):
        SplitBackward().inputs([x * 2], [None], [x])


@pytest.mark.parametrize("with_inputs", [True, False])
def test_the_graph_is_let_go_after_the_weights(with_inputs: bool) -> None:
    """Without the garbage collector's help."""
    stage, x = nn.Sequential(*(Block() for _ in range(3))), torch.randn(2, 4, D, requires_grad=with_inputs)
    saved: list[weakref.ref[Tensor]] = []

    def pack(x: Tensor) -> Tensor:
        if not isinstance(x, nn.Parameter) and x._base is None:
            saved.append(weakref.ref(copied := x.detach().clone()))
            return copied
        return x

    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            boundary = Boundary([x] if with_inputs else [], [stage(x).sum()])
        split = SplitBackward()
        split.inputs(boundary.outputs, [None], boundary.inputs)
        del boundary
        assert sum(reference() is not None for reference in saved) > 10
        split.weights()
        assert sum(reference() is not None for reference in saved) == 0
    finally:
        gc.enable()
