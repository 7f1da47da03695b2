"""What the checksums of a file's and a directory's tensors cost when it is loaded, from the system's cache::

    python -m tests.benchmarks.checksums --megabytes 200

Prints how long a load takes with and without, in seconds, the medians of some, and what is checked in a second.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lightning_par.checkpoint import checked_together, reading
from lightning_par.checkpoint.files import make_checkpoint_io, save
from lightning_par.python_state.nested_tensors import map_tensors
from tests.checkpoint.test_urls import _save

RUNS = 7


def seconds(load: Callable[[], Any]) -> float:
    """The median of the time in which all tensors of a checkpoint are loaded and copied."""
    taken = []
    for _ in range(RUNS):
        began = time.perf_counter()
        map_tensors(torch.clone, load())
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200)
    count = parser.parse_args().megabytes
    torch.set_num_threads(1)
    weights = {f"w{i}": torch.randn(count, 25_000) for i in range(10)}  # of 4 bytes
    content = {"state_dict": weights, "global_step": 1}
    with tempfile.TemporaryDirectory() as folder:
        save(content, str(file := Path(folder, "file.ckpt")))
        _save(str(directory := Path(folder, "directory.ckpt")), 1, content)
        del weights, content
        for name, home, load in (
            ("file", checked_together, lambda: make_checkpoint_io().load_checkpoint(file)),
            ("directory", reading, lambda: reading.load_whole(str(directory))),
        ):
            with mock.patch.object(home, "refuse_damaged"), mock.patch("zlib.crc32", lambda *args: 0):
                without = seconds(load)
            checked = seconds(load)
            print(
                f"{name}: {checked:.3f} s, without {without:.3f} s: {checked / without:.2f} times as long, "
                f"{count * 1e6 / (checked - without) / 1e9:.1f} GB/s"
            )


if __name__ == "__main__":
    main()
