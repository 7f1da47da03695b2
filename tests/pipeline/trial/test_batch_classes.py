"""Batches of tensors of a class of another library's, as torchvision's `tv_tensors.Image`: its functions give back
plain tensors, and a few keep the class."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import PipelineParallelStrategy
from lightning_par.private.modes import DisableTorchFunctionSubclass
from tests.helpers.pool import Pool
from tests.helpers.slow import long
from tests.helpers.surface import check, trained

KEPT = {Tensor.clone, Tensor.to, Tensor.detach, Tensor.requires_grad_}


class Picture(Tensor):
    """As `torchvision.tv_tensors.TVTensor`, which is no dependency of tests."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        with DisableTorchFunctionSubclass():
            result = func(*args, **kwargs or {})
        if func in KEPT and isinstance(args[0], cls):
            return result.as_subclass(cls)
        return result.as_subclass(Tensor) if isinstance(result, cls) else result

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        with DisableTorchFunctionSubclass():
            return super().shape

    def halved(self) -> Tensor:
        return self / 2


class Mask(Picture):
    pass


class Box(Picture):
    """Has attributes."""

    scale: float

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, cls):
            vars(result).update(vars(args[0]))
        return result


class Twice(Picture):
    """Does otherwise than torch with one function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        return result * 2 if getattr(func, "__name__", "") in ("div", "__truediv__") else result


class Scaled(Picture):
    """Has another method of a name of torch's."""

    def halved(self) -> Tensor:
        return self.half()

    def half(self) -> Tensor:  # type: ignore[override]
        return self / 3


class Wrapped(Tensor):
    """All that is computed of one is one."""


@dataclass
class Sample:
    image: Tensor
    mask: Tensor
    name: str = "x"


def batches(kind: type, count: int = 3) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        image, mask = (torch.rand(4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
        one = image.as_subclass(kind)
        if kind is Box:
            one.scale = 2.0
        found.append(Sample(one, (mask > 0.5).double().as_subclass(Mask)))
    return DataLoader(found, batch_size=None)  # type: ignore[arg-type]


class Layer(nn.Module):
    """Goes by the class of what it is given, and asks it for a method."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, Picture):
            x = x.halved() * (1.0 if type(x) is Mask else getattr(x, "scale", 3.0))
        return self.linear(x).tanh()


class Segments(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = Layer(), nn.Linear(6, 6)

    def loss(self, batch: Sample) -> Tensor:
        hidden = self.first(batch.image)
        logits = self.last(hidden) * batch.mask + batch.image.clone().mean(1, keepdim=True)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.mask)

    def training_step(self, batch: Sample) -> Tensor:
        assert type(batch.image) is not Tensor and type(batch.image.clone()) is type(batch.image)
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=4)
        return loss

    def validation_step(self, batch: Sample) -> Any:
        self.log("val", self.loss(batch), batch_size=4)
        return batch.image

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def _fit(kind: type, microbatches: Any) -> Any:
    strategy = partial(PipelineParallelStrategy, microbatches=microbatches)
    return trained(Segments(), batches(kind), strategy)  # type: ignore[arg-type]


@long("Twice-1")
@pytest.mark.parametrize(
    ("kind", "microbatches"),
    [(Picture, 2), (Picture, 1), (Box, 1), (Box, "auto"), (Twice, 1), (Twice, "auto"), (Scaled, "auto")],
)
def test_a_class_whose_functions_give_back_plain_tensors_is_followed(kind: type, microbatches: Any, pool: Pool) -> None:
    check(pool, _fit, kind, microbatches)


def _refused() -> list[str]:
    told = []
    for kind in (Box, Twice, Scaled):
        with pytest.raises(ValueError) as error:
            _fit(kind, 2)
        told.append(str(error.value))
    with pytest.raises(NotImplementedError) as other:
        _fit(Wrapped, 1)
    return [*told, str(other.value)]


def test_what_is_not_known_to_be_torchs_is_not_cut(pool: Pool) -> None:
    for box, twice, scaled, wrapped in pool.run(2, _refused):
        assert "a test_batch_classes.Box of the batch has attributes, which may be of its samples" in box
        assert "test_batch_classes.Twice does otherwise than torch with `" in twice
        assert "a test_batch_classes.Scaled of the batch has its own half" in scaled
        assert "a step makes a Wrapped of a tensor (as_subclass)" in wrapped
