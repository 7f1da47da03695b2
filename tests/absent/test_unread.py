"""A tensor that is not read yet is a tensor to all that reads, writes or saves it."""

from __future__ import annotations

import copy
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_par.absent.unread import Unread
from lightning_par.checkpoint.buffers import Scratch


class Far:
    """A source that counts how often it is asked, and for how many entries."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.shape, self.dtype = values, values.shape, values.dtype
        self.scratch = Scratch()
        self.asked = self.fetched = 0

    def copy_into(self, target: Tensor, dim: int = 0, indices: Any = None) -> None:
        self.asked += 1
        self.fetched += target.numel()
        target.copy_(self.values if indices is None else self.values.index_select(dim, torch.as_tensor(indices)))


def _pair() -> tuple[Tensor, Unread]:
    values = torch.arange(12.0).view(3, 4)
    return values, Unread(Far(values))


READS: dict[str, Any] = {
    "add": lambda x: x + 1,
    "times itself": lambda x: x * x,
    "equal": lambda x: torch.equal(x, x.clone()),
    "cat": lambda x: torch.cat([x, torch.ones(1, 4)]),
    "half": lambda x: x.half(),
    "sum": lambda x: x.sum().item(),
    "list": lambda x: x.tolist(),
    "state dict": lambda x: {name: v.detach().clone() for name, v in {"x": x}.items()}["x"],
    "written to another": lambda x: torch.zeros(3, 4).copy_(x),
    "stack": lambda x: torch.stack((x, x)),
    "any device": lambda x: x.cpu().to("cpu"),
    "whole copy": lambda x: copy.deepcopy(x),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "bool": lambda x: bool((x > 3).any()),
}


@pytest.mark.parametrize("name", READS)
def test_reading_gives_the_values_and_keeps_nothing(name: str) -> None:
    values, far = _pair()
    want, got = READS[name](values.clone()), READS[name](far)
    assert torch.equal(got, want) if isinstance(want, Tensor) else got == want
    assert type(got) is type(want) or name == "any device"
    assert not far.is_kept
    assert far.source.asked >= (name != "any device")  # type: ignore[attr-defined]


def test_its_form_is_known_without_reading() -> None:
    _, far = _pair()
    assert far.shape == (3, 4) and far.dtype == torch.float32 and far.device.type == "cpu" and far.ndim == 2
    assert far.numel() == 12 and far.stride() == (4, 1) and isinstance(far, Tensor) and "3, 4" in repr(far)
    assert far.source.asked == 0  # type: ignore[attr-defined]


def _view(x: Tensor) -> None:
    x[1:, :2] = 7.0


def _alias(x: Tensor) -> None:
    x.detach().mul_(3.0)


def _numpy(x: Tensor) -> None:
    x.numpy()[0] = -1.0


@pytest.mark.parametrize("write", [_view, _alias, _numpy, lambda x: x.add_(1).clamp_(max=3), lambda x: x.t().zero_()])
def test_what_is_written_stays_and_is_saved(write: Any) -> None:
    values, far = _pair()
    other = far.detach()
    want = values.clone()
    write(want)
    assert write(far) is None or not isinstance(want, Unread)
    assert torch.equal(far + 0, want) and torch.equal(other + 0, want)
    assert torch.equal(_saved({"x": far, "y": other})["y"], want) and not torch.equal(values, want)


def _saved(value: Any, **options: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn, torch.uint16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 3), (), (0, 4)])
def test_a_saved_file_holds_it_like_any_tensor(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    values = torch.arange(15).view(5, 3).to(dtype) if shape == (5, 3) else torch.ones(shape).to(dtype)
    plain, late = tmp_path / "a", tmp_path / "b"
    torch.save({"x": values, "y": torch.ones(2)}, plain)
    torch.save({"x": Unread(Far(values)), "y": torch.ones(2)}, late)
    for options in (dict(weights_only=True), dict(weights_only=False), dict(mmap=True)):
        found = torch.load(late, **options)["x"]
        assert type(found) is Tensor and found.dtype == dtype and found.shape == values.shape
        assert torch.equal(found.view(torch.uint8) if shape else found, values.view(torch.uint8) if shape else values)
    with zipfile.ZipFile(late) as archive:
        assert archive.testzip() is None
    assert plain.stat().st_size == late.stat().st_size


def test_the_file_is_byte_for_byte_that_of_plain_tensors_tied_ones_included() -> None:
    values = torch.randn(40, 30)
    far = Unread(Far(values))
    plain, late = io.BytesIO(), io.BytesIO()
    torch.save({"x": values, "tied": values.detach(), "z": torch.ones(2)}, plain)
    torch.save({"x": far, "tied": Unread(far.source, far.memory), "z": torch.ones(2)}, late)
    assert plain.getvalue() == late.getvalue()


def test_other_picklers_write_the_values_or_refuse() -> None:
    values, far = _pair()
    buffer = io.BytesIO()
    torch.save({"x": far}, buffer, pickle_protocol=4)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)["x"], values)
    with pytest.raises(NotImplementedError):
        _saved({"x": far}, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize(("dim", "indices"), [(0, [0, 2]), (1, [3]), (1, []), (0, [0, 1, 2])])
def test_a_part_is_read_without_the_rest(dim: int, indices: list[int]) -> None:
    values, far = _pair()
    want = values.index_select(dim, torch.tensor(indices, dtype=torch.int64))
    part = far.read_part(dim, torch.tensor(indices, dtype=torch.int64))
    assert torch.equal(part, want) and part.is_contiguous() and not far.is_kept
    far.add_(1)
    assert torch.equal(far.read_part(dim, torch.tensor(indices, dtype=torch.int64)), want + 1)


def test_tensors_are_saved_one_at_a_time() -> None:
    """All are written from the same memory, the largest tensor's."""
    scratch, addresses = Scratch(4000), []

    class Near(Far):
        def copy_into(self, target: Tensor, dim: int = 0, indices: Any = None) -> None:
            addresses.append(target.data_ptr())
            super().copy_into(target, dim, indices)

    tensors = {}
    for i, size in enumerate((10, 1000, 500)):
        source = Near(torch.full((size,), float(i)))
        source.scratch = scratch
        tensors[f"{i}"] = Unread(source)
    found = _saved(tensors)
    assert [x.unique().tolist() for x in found.values()] == [[0.0], [1.0], [2.0]]
    assert len(set(addresses)) == 1 and len(addresses) == 3
