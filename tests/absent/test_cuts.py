"""What is cut from a tensor in a mapped file is cut from what it is computed from, and no more is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_par.absent.deferred.adoption import Adoption
from lightning_par.absent.deferred.cuts import recipe_of
from lightning_par.absent.deferred.deferred_tensor import Deferred, holding
from lightning_par.absent.geometry import Geometry, box_of
from lightning_par.absent.mapped.file import File
from lightning_par.absent.mapped.mappings import Mappings
from lightning_par.absent.unread import Unread
from tests.absent.test_unread import Far

Weights = dict[str, Tensor]


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[Weights]:
    """Mapped; rows of 2 kB, so that half of one is worth a call of its own."""
    torch.save({name: torch.randn(12, 512) for name in "abc"}, tmp_path / "weights.pt")
    yield torch.load(tmp_path / "weights.pt", mmap=True)


MAKES: dict[str, Callable[[Weights], Tensor]] = {
    "as it is": lambda w: w["a"],
    "copied": lambda w: w["a"].clone(),
    "cast twice": lambda w: w["a"].to(torch.bfloat16).double(),
    "transposed": lambda w: w["a"].view(3, 4, 512).transpose(0, 1).reshape(12, 512),
    "columns first": lambda w: w["a"].view(512, 12).t().contiguous(),
    "joined": lambda w: torch.cat([w["a"][:5], w["b"][5:9], w["c"][9:]]),
    "joined by columns": lambda w: torch.cat([w["a"][:, :200], w["b"][:, 200:]], 1),
    "stacked": lambda w: torch.stack([w["a"][:4], w["b"][:4], w["c"][:4]]).flatten(0, 1),
    "stacked and joined": lambda w: torch.cat(
        [torch.stack([w["a"][:3], w["b"][:3]], 1), torch.stack([w["c"][:3], w["b"][3:6]], 1)], 1
    ).view(12, 512),
    "copied into": lambda w: torch.empty_like(w["a"]).copy_(w["b"]),
    "copied into a part": lambda w: _with_rows(w["a"].clone(), w["b"]),
    "scaled": lambda w: w["a"] * 0.5,
    "scaled in place": lambda w: w["a"].clone().mul_(3.0),
    "shifted by a row": lambda w: w["a"] + w["b"][0],
    "picked": lambda w: w["a"].index_select(0, torch.tensor([3, 4, 5, 1, 0, 7, 7, 8, 9, 11, 2, 6])),
}
CUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "half the rows": lambda x: x[:6],
    "half the columns": lambda x: x[:, 256:],
    "one row": lambda x: x[7],
    "rows here and there": lambda x: x.index_select(0, torch.tensor([0, 1, 5, 9, 10])),
    "every third column": lambda x: x[:, 1::3],
    "blocks of columns": lambda x: x.index_select(1, torch.cat([torch.arange(64, 128), torch.arange(300, 400)])),
    "turned": lambda x: x.t()[:256],
}


def _with_rows(x: Tensor, rows: Tensor) -> Tensor:
    x[:6] = rows[:6]
    return x


def _adopted(weights: Weights) -> Any:
    adoption = Adoption()
    return adoption.instead(weights)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("make", MAKES)
def test_a_cut_of_what_was_made_of_files(make: str, cut: str, weights: Weights, monkeypatch: Any) -> None:
    expected = CUTS[cut](MAKES[make](weights)).contiguous()
    part = CUTS[cut](MAKES[make](_adopted(weights))).contiguous()
    assert isinstance(part, Deferred)
    count, plain = 0, File.read_bytes

    def counting(self: File, target: Tensor, start: int) -> None:
        nonlocal count
        count += target.numel()
        plain(self, target, start)

    monkeypatch.setattr(File, "read_bytes", counting)
    found = part.value()
    assert torch.equal(found, expected) and found.stride() == part.stride()
    assert found.untyped_storage().resizable()
    if cut in ("half the rows", "half the columns", "one row") and make not in WHOLE:
        most = expected.numel() * 4 * (2 if make == "shifted by a row" else 1)
        assert count <= most, f"{count} bytes for {most}"


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("make", MAKES)
def test_a_cut_of_what_was_made_of_a_checkpoint(make: str, cut: str, weights: Weights) -> None:
    expected = CUTS[cut](MAKES[make](weights)).contiguous()
    unread = {name: Unread(Far(x)) for name, x in weights.items()}
    part = CUTS[cut](MAKES[make]({name: holding(x) for name, x in unread.items()})).contiguous()
    assert isinstance(part, Deferred)
    found = part.value()
    assert torch.equal(found, expected) and found.stride() == part.stride()
    assert not any(x.is_kept for x in unread.values())
    sources: Any = [x.source for x in unread.values()]
    assert all(source.asked <= 1 for source in sources)
    if cut in ("half the rows", "half the columns", "one row") and make not in WHOLE:
        most = expected.numel() * (2 if make == "shifted by a row" else 1)
        most = sum(x.numel() for x in weights.values()) if make in CUT_TWICE else most
        assert sum(source.fetched for source in sources) <= most


WHOLE = ("columns first", "copied into a part")
"""Cuts of these need more than the part: columns of rows of 48 bytes; and rows of two origins."""
CUT_TWICE = ("transposed", "joined", "joined by columns", "stacked", "stacked and joined")
"""Cuts of these are cut along two dims from what they are made of, and a checkpoint's tensor is read along one."""


def test_what_draws_is_made_whole(weights: Weights) -> None:
    part = (_adopted(weights)["a"] + torch.rand(12, 512))[:3]
    drawn = torch.nn.functional.dropout(_adopted(weights)["a"], 0.5)[:3]
    assert recipe_of(part.ref()) is not None  # what was added is there
    assert not isinstance(drawn, Deferred) or recipe_of(drawn.ref()) is None


def test_what_was_written_to_is_no_file_s_any_more(weights: Weights) -> None:
    weights["a"][0, 0] = 5
    found = Mappings()
    assert found.region(weights["a"]) is None
    assert found.region(weights["c"]) is not None  # a page away
    assert found.region(torch.ones(3)) is None
    assert found.region(torch.from_numpy(np.ones(3))) is None


def test_writes_after_it_was_found_are_noticed(weights: Weights) -> None:
    region = Mappings().region(weights["b"])
    assert region is not None and region.is_clean()
    weights["b"][3] = 0
    assert not region.is_clean()


def test_a_file_that_is_written_to_meanwhile_is_refused(weights: Weights, tmp_path: Path) -> None:
    deferred = _adopted(weights)["a"]
    with open(tmp_path / "weights.pt", "ab") as file:
        file.write(b"more")
    with pytest.raises(OSError, match="written to while a model was loaded"):
        deferred.value()


def test_a_file_that_another_takes_the_name_of_is_still_read(weights: Weights, tmp_path: Path) -> None:
    expected, deferred = weights["a"].clone(), _adopted(weights)["a"]
    torch.save({}, tmp_path / "new.pt")
    (tmp_path / "new.pt").replace(tmp_path / "weights.pt")
    assert torch.equal(deferred.value(), expected)
    assert Mappings().region(weights["a"]) is None  # whose file can't be opened any more


def test_boxes() -> None:
    """Against the indices themselves."""
    x = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    views = [x[1], x[:, 1:], x.transpose(1, 3)[0, 2:4], x.flatten(1, 2)[:, ::2], x.view(6, 20)[2:5, 5:15], x[..., 2]]
    other = x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)  # the same entries, elsewhere
    boxes = [box_of(Geometry.of(x), Geometry.of(view)) for view in views]
    for view, box in zip(views, boxes):
        if box is not None:
            there = box.within(Geometry.of(other))
            assert torch.equal(other.as_strided(there.shape, there.stride, there.offset).reshape(view.shape), view)
    assert sum(box is not None for box in boxes) >= 4
    assert box_of(Geometry.of(x), Geometry.of(x.as_strided((3,), (7,), 0))) is None
