"""The memory of tensors."""

from __future__ import annotations

import os
import sys
import weakref
from pathlib import Path

import pytest
import torch

from lightning_par.private.fake_tensors import FakeTensor, FakeTensorMode
from lightning_par.private.storage import (
    give_back_freed,
    is_mapped,
    is_shared,
    lies_as,
    memory_of,
    storage_of,
    tensor_in,
    tensors_in_memory,
    trim_memory,
)
from tests.helpers.pool import Pool


def test_views_share_a_number_for_their_memory_also_on_meta() -> None:
    for device in ("cpu", "meta"):
        x, other = torch.empty(4, 4, device=device), torch.empty(4, 4, device=device)
        assert memory_of(x[1:].t()) == memory_of(x) != memory_of(other)


def test_a_transforms_tensor_lies_where_what_it_stands_for_does() -> None:
    x = torch.empty(4, 4)
    torch.vmap(lambda row: torch.testing.assert_close(memory_of(row), memory_of(x)) or row)(x)


def test_tensors_that_lie_in_one_place_are_known_without_values_too() -> None:
    with FakeTensorMode():
        for x in (torch.empty(2, 2), torch.empty(2, 2, device="meta")):
            assert lies_as(x, x.detach()) and not lies_as(x, x.t()) and not lies_as(x, torch.empty_like(x))


def test_a_memory_is_one_object_that_lives_as_long_as_a_tensor_lies_in_it() -> None:
    x = torch.zeros(4)
    memory = storage_of(x)
    assert memory is storage_of(x[1:]) and storage_of(torch.eye(2).to_sparse()) is None
    memory.note = "kept"  # type: ignore[union-attr]
    gone = weakref.ref(memory)  # type: ignore[arg-type]
    del memory
    assert storage_of(x.view(2, 2)).note == "kept"  # type: ignore[union-attr]
    del x
    assert gone() is None


def test_a_tensor_is_made_in_memory_that_is_there() -> None:
    view = torch.zeros(2, 3)[1]
    storage = storage_of(view)
    assert storage is not None
    x = tensor_in(storage, view.dtype, 0, (2, 3), (3, 1))
    x.fill_(2.0)
    assert view.tolist() == [2.0] * 3 and view._version == 0 and not x._is_view()


def test_a_tensor_without_values_says_which_device_is_its_own() -> None:
    with FakeTensorMode():
        memory = storage_of(torch.empty(6))
        assert memory is not None and memory.device.type == "meta"
        x = tensor_in(memory, torch.float32, 0, (2, 3), (3, 1), torch.device("cpu"))
        assert isinstance(x, FakeTensor) and x.device.type == "cpu" and storage_of(x) is memory


@pytest.mark.skipif(sys.platform != "linux", reason="the others' allocators are not glibc's")
def test_memory_is_handed_back() -> None:
    def kept(addresses: list[int]) -> int:
        """In how many blocks there still is what was written: pages that were handed back read as zeros."""
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            return sum(os.pread(memory.fileno(), len(ones), x + (1 << 15)) == ones for x in addresses)

    blocks = [torch.ones(1 << 14) for _ in range(400)]  # below the size from which memory is mapped
    ones = blocks[0][:4].numpy().tobytes()
    given_up = [block.data_ptr() for block in blocks[::2]]  # each between two that stay, so the heap can't shrink
    del blocks[::2]
    assert kept(given_up) > 150
    trim_memory()
    assert kept(given_up) == 0
    assert all(torch.equal(block, torch.ones(1 << 14)) for block in blocks)


def _stays() -> list[bool]:
    """Whether memory that is given up at once is still there, with and without a limit."""

    def stays() -> bool:
        address = torch.ones(2 << 20).data_ptr()
        spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        return any(int(first, 16) <= address < int(last, 16) for first, last in spans)

    give_back_freed(4 << 20)
    limited = stays()
    give_back_freed(None)
    return [limited, stays()]


@pytest.mark.skipif(sys.platform != "linux", reason="the others' allocators are not glibc's")
def test_large_blocks_are_handed_back_as_they_are_freed_where_asked(pool: Pool) -> None:
    assert pool.run_apart(_stays) == [False, True]  # no holes of other tests


def test_memory_of_a_mapped_file_is_known(tmp_path: Path) -> None:
    torch.save(torch.ones(4), tmp_path / "x.pt")
    mapped = torch.load(tmp_path / "x.pt", mmap=True)
    assert is_mapped(mapped) and is_mapped(mapped[1:]) and not is_mapped(mapped.clone())
    assert not is_mapped(torch.empty(4, device="meta")) and not is_mapped(torch.eye(2).to_sparse())


def test_memory_that_others_have_is_known() -> None:
    x = torch.zeros(4)
    kept = x.data
    assert is_shared(kept)
    view = x[1:]
    del x
    assert is_shared(kept)
    del view
    assert not is_shared(kept)


def test_tensors_in_one_memory_are_counted_without_values_too() -> None:
    with FakeTensorMode():
        fake = torch.zeros(4)
        views = [fake[i:] for i in range(3)]
        assert tensors_in_memory(fake) == tensors_in_memory(views[0]) == 4
    x = torch.zeros(4)
    held = [x.data, x[1:]]
    assert tensors_in_memory(x) == 3
    held.pop()
    assert tensors_in_memory(x) == 2
