"""Quantized weights as libraries lay them out, frozen under a trained adapter, and how a model of them is trained."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.pretrained.adapted import LAYOUTS

BATCH, LENGTH, WIDTH, RANK, STEPS = 4, 8, 16, 4, 3


class Packed(nn.Parameter):
    """Two weights of four bits in a byte, and what they mean in an attribute, as bitsandbytes' ``Params4bit``."""

    state: tuple[Tensor, torch.Size]

    def __new__(cls, data: Tensor, state: Any = None) -> Packed:
        self = torch.Tensor._make_subclass(cls, data, False)
        self.state = state
        return self

    @classmethod
    def of(cls, x: Tensor) -> Packed:
        scale = x.abs().amax() / 7
        digits = (x / scale).round().clamp(-7, 7).add(8).to(torch.uint8).flatten()
        return cls((digits[::2] << 4 | digits[1::2])[:, None], (scale, x.shape))


class _PackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, state: tuple[Tensor, torch.Size]) -> Tensor:
        ctx.state = state
        ctx.save_for_backward(weight)
        return x @ unpacked(weight, state).to(x.dtype).T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return grads[0] @ unpacked(weight, ctx.state).to(grads[0].dtype), None, None


def unpacked(weight: Tensor, state: tuple[Tensor, torch.Size]) -> Tensor:
    scale, shape = state
    digits = torch.stack([weight >> 4, weight & 15], -1).to(scale.dtype) - 8
    return (digits * scale).view(shape)


class Wrapped(Tensor):
    """Bytes and a scale a row that say to be a float, as the tensors of torchao: no memory of its own."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, codes.shape, dtype=scale.dtype, device=codes.device, requires_grad=False
        )

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, x: Tensor) -> Wrapped:
        scale = x.abs().amax(1, keepdim=True) / 127
        return cls((x / scale).round().to(torch.int8), scale)

    def plain(self) -> Tensor:
        return self.codes.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Wrapped:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return _WrappedLinear.apply(x, weight)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default):
            return cls(func(args[0].codes), func(args[0].scale))
        if func is torch.ops.aten._to_copy.default:
            return cls(args[0].codes.clone(), func(args[0].scale, **kwargs))
        raise NotImplementedError(f"{func} of {cls.__name__}")


class _WrappedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.weight = weight
        return x @ weight.plain().T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] @ ctx.weight.plain(), None


class Meaning:
    """What codes mean, in an object that their layer writes to, as bitsandbytes' ``QuantState``."""

    def __init__(self, scale: Tensor, shape: torch.Size) -> None:
        self.scale, self.shape, self.inverted = scale, shape, False


def repacked(weight: Any) -> tuple[Tensor, torch.Size]:
    """Lay the codes out otherwise at their first use, in other memory, as bitsandbytes does on some CPUs."""
    meaning = weight.state
    if not meaning.inverted:
        weight.data = 16 - weight.data  # both digits of a byte, from 1 to 15, about 8
        meaning.scale = -meaning.scale
        meaning.inverted = True
    return meaning.scale, meaning.shape


class Adapted(nn.Module):
    """A frozen quantized product, and a trained one of low rank beside it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        x = torch.randn(WIDTH, WIDTH, dtype=torch.float64) / WIDTH**0.5
        self.weight = (
            Packed.of(x) if kind in ("packed", "repacked") else nn.Parameter(Wrapped.of(x), requires_grad=False)
        )
        if kind == "repacked":
            self.weight.state = Meaning(*self.weight.state)  # type: ignore[assignment, misc]
        self.down = nn.Linear(WIDTH, RANK, bias=False, dtype=torch.float64)
        self.up = nn.Linear(RANK, WIDTH, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        if hasattr(weight, "state"):
            state = repacked(weight) if isinstance(weight.state, Meaning) else weight.state
            base = _PackedLinear.apply(x, weight, state)
        else:
            base = F.linear(x, weight)
        return torch.tanh(base + self.up(self.down(x)))


class Quantized(LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(self.seed())
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64).requires_grad_(False)
        self.layers = nn.Sequential(*(Adapted(kind) for _ in range(4)))
        self.losses: list[float] = []

    def seed(self) -> int:
        return 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = F.mse_loss(self.layers(self.first(batch)), batch)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]) * self.trainer.accumulate_grad_batches)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Unseeded(Quantized):
    """Built with other weights on each rank."""

    def seed(self) -> int:
        return int(os.environ["RANK"])


def bytes_of(weight: Any) -> list[Tensor]:
    """What a quantized weight is made of."""
    if hasattr(weight, "state"):
        parts = [weight.data, weight.state.scale if isinstance(weight.state, Meaning) else weight.state[0]]
    else:
        parts = [weight.codes, weight.scale]
    return [x.detach().as_subclass(Tensor).clone() for x in parts]


def trained(kind: str, layout: str | None, replicas: int = 1, make: Callable[[str], Any] = Quantized) -> dict[str, Any]:
    """What a fit came to: its losses, the trained weights, the quantized ones and whether they are what they were."""
    world, strategy = LAYOUTS[layout] if layout else (1, lambda: "auto")
    module = make(kind)
    before = [bytes_of(layer.weight) for layer in module.layers]
    generator = torch.Generator().manual_seed(1)
    batches = torch.randn(STEPS * replicas, BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    mine = batches
    if layout and replicas > 1:
        mine = batches.unflatten(0, (STEPS, replicas))[:, int(os.environ["RANK"]) % replicas]
    trainer = Trainer(
        accelerator="cpu", devices=world, strategy=strategy(), max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=1 if layout else replicas, gradient_clip_val=1.0, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(mine, batch_size=None))
    after = [bytes_of(layer.weight) for layer in module.layers]
    return {
        "losses": module.losses,
        "weights": {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad},
        "kinds": {type(layer.weight).__name__ for layer in module.layers},
        "quantized": [x for parts in after for x in parts],
        "unchanged": all(torch.equal(x, y) for a, b in zip(before, after) for x, y in zip(a, b)),
    }
