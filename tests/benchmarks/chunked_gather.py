"""An all-gather of tokens and a product of them, whole and in chunks of which the next is gathered meanwhile.

Each message takes a fixed time behind the one before it (the group of `tests.gpu_rules`), and so does the product, a
chunk of it in proportion. What `shard_residual` would gain by chunks in forward if messages cost no more than that::

    OMP_NUM_THREADS=1 python -m tests.benchmarks.chunked_gather
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist

from tests.gpu_rules.ranks import StrictPool
from tests.gpu_rules.report import Rules


def run(seconds: float, chunks: int) -> float:
    """The median of the time that gather and product take."""
    if not dist.is_initialized():
        dist.init_process_group("gloostrict")
    x, times = torch.randn(64, 16), []
    for _ in range(15):
        dist.barrier()
        began = time.perf_counter()
        works = []
        for part in x.chunk(chunks):
            whole = torch.empty(2 * len(part), 16)
            works.append(dist.all_gather_into_tensor(whole, part.contiguous(), async_op=True))
        for work in works:
            work.wait()
            time.sleep(seconds / chunks)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, default=0.01)
    options = parser.parse_args()
    from tests.benchmarks.chunked_gather import run as _run  # as the ranks know it

    pool = StrictPool("cpu", Rules(delay=options.delay, checks=False))
    for seconds in (0.01, 0.02, 0.04, 0.08):
        whole, two, four = (max(pool.run(2, _run, seconds, chunks)) for chunks in (1, 2, 4))
        print(f"product {seconds * 1e3:.0f} ms: whole {whole * 1e3:.1f}, in 2 chunks {two * 1e3:.1f}, in 4 chunks "
              f"{four * 1e3:.1f} ms", flush=True)  # fmt: skip
    pool.close()


if __name__ == "__main__":
    main()
