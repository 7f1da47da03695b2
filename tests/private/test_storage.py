"""The memory of tensors."""

from __future__ import annotations

import os
import sys
import weakref

import pytest
import torch

from lightning_par.private.storage import is_shared, memory_of, storage_of, trim_memory


def test_views_share_a_number_for_their_memory_also_on_meta() -> None:
    for device in ("cpu", "meta"):
        x, other = torch.empty(4, 4, device=device), torch.empty(4, 4, device=device)
        assert memory_of(x[1:].t()) == memory_of(x) != memory_of(other)


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


def test_memory_that_others_have_is_known() -> None:
    x = torch.zeros(4)
    kept = x.data
    assert is_shared(kept)
    view = x[1:]
    del x
    assert is_shared(kept)
    del view
    assert not is_shared(kept)
