"""Tokens that are gathered for a product, and that a product's sums are of: in one message, and in chunks.

Each message takes a fixed time behind the one before it (the group of `tests.gpu_rules`), and so does the product, a
chunk of it in proportion: what chunks save, and lose, where each of their messages takes as long as one of all tokens.
With ``--by-byte`` a chunk's message takes its part of that time alone::

    OMP_NUM_THREADS=1 python -m tests.benchmarks.chunked_gather [--by-byte]
"""

from __future__ import annotations

import argparse
import statistics
import time
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.mesh import chunked_tokens
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.chunked_tokens import Arrival, product_summed
from lightning_par.mesh.chunks import Chunks
from lightning_par.mesh.positions import Positions
from tests.gpu_rules.ranks import StrictPool
from tests.gpu_rules.report import Rules

SAMPLES = 4


def run(seconds: float, count: int) -> tuple[float, float]:
    """The medians of the times that gather and product take, and product and sum."""
    if not dist.is_initialized():
        dist.init_process_group("gloostrict")
    axis = Axis("tensor", (0, 1), dist.get_rank(), dist.group.WORLD)
    ends = tuple(SAMPLES * number // count for number in range(count + 1))
    chunks = Chunks(1, Positions.even(8, 2), 2, True, ends)
    part, whole, weight = torch.randn(SAMPLES, 4, 16), torch.randn(SAMPLES, 8, 16), torch.randn(16, 16)
    made = chunked_tokens.product

    def late(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        made(x, weight, bias, out)
        time.sleep(seconds / count)

    found: tuple[list[float], list[float]] = ([], [])
    with patch.object(chunked_tokens, "product", late):
        for _ in range(15):
            for times in found:
                dist.barrier()
                began = time.perf_counter()
                if times is found[0]:
                    Arrival(part, chunks, axis, "enter").product(weight)
                else:
                    product_summed(whole, weight, chunks, axis, "leave")
                times.append(time.perf_counter() - began)
    return statistics.median(found[0]), statistics.median(found[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, default=0.01)
    parser.add_argument("--by-byte", action="store_true")
    options = parser.parse_args()
    from tests.benchmarks.chunked_gather import run as _run  # as the ranks know it

    pool = StrictPool("cpu", Rules(checks=False))
    for seconds in (0.01, 0.02, 0.04, 0.08):
        found = []
        for count in (1, 2, 4):
            pool.restart()  # a group reads its rules once
            pool.rules = Rules(delay=options.delay / (count if options.by_byte else 1), checks=False)
            times = pool.run(2, _run, seconds, count)
            found.append(" and ".join(f"{max(each) * 1e3:.1f}" for each in zip(*times, strict=True)))
        one, two, four = found
        print(f"product {seconds * 1e3:.0f} ms, with a gather and with a sum: in one message {one}, in two {two}, "
              f"in four {four} ms", flush=True)  # fmt: skip
    pool.close()


if __name__ == "__main__":
    main()
