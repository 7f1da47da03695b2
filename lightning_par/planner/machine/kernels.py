"""How long a kernel takes on a machine: a roofline with the shapes of products."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil

from lightning_par.planner.machine.machines import Machine
from lightning_par.planner.recording.operations import Product

TILES = ((128, 256), (256, 128), (128, 128), (64, 128), (128, 64), (64, 64))
"""Rows and columns that one processor computes at a time (cuBLAS and CUTLASS; the first two keep it busiest)."""

ATTENTION_RAMP = 650
"""Keys at which fused attention reaches half of its rate at long sequences.

FlashAttention-2's causal rates for heads of 128 at 2k, 4k and 8k are 0.73, 0.86 and 0.94 of that at 16k on an H100
(arXiv 2407.08608, figure 5), and alike on an A100 (arXiv 2307.08691, figures 5 and 6), as recalled: to be looked up.
"""

_TILE_SHARE = (1.0, 1.0, 0.93, 0.75, 0.75, 0.6)  # of the best rate: a smaller tile reads more for each product


@lru_cache(maxsize=2**16)
def product_time(product: Product, machine: Machine, dtype: str) -> float:
    """Seconds of ``product``: the larger of its arithmetic, in whole waves of tiles, and its memory."""
    batch, m, n, k = product.batch, product.m, product.n, product.k
    if not batch * m * n * k:
        return 0.0
    rate = machine.peak.get(dtype, machine.peak["float32"]) * machine.product_share
    tiles = zip(TILES, _TILE_SHARE) if machine.tiles is None else [(machine.tiles, 1.0)]
    best = min(
        _tiled(batch, m, n, k + machine.ramp, rows, columns, machine.units) / share for (rows, columns), share in tiles
    )
    arithmetic = best / rate
    item = 1 if dtype == "float8" else product.itemsize
    memory = batch * (m * k + k * n) * item + batch * m * n * product.itemsize
    # In 8 bits both sides are written anew first.
    cast = batch * (m * k + k * n) * (product.itemsize + 1) if dtype == "float8" else 0
    return max(arithmetic, memory_time(memory, machine)) + memory_time(cast, machine) + machine.launch


def _tiled(batch: int, m: int, n: int, k: int, rows: int, columns: int, units: int) -> float:
    """FLOPs that the waves of tiles take, were all processors busy."""
    tiles = batch * ceil(m / rows) * ceil(n / columns)
    waves = tiles / units
    whole = ceil(waves) if waves < 8 else waves + 0.5  # many waves even out: tiles of one begin before the last ended
    return 2.0 * whole * units * rows * columns * k


def attention_time(product: Product, machine: Machine, dtype: str, backward: bool) -> float:
    """Seconds of fused attention: 2 products forward, 5 backward, half of the pairs where it is causal."""
    share = machine.attention_share[backward]
    pairs = product.batch * product.m * product.k * (0.5 if product.causal else 1.0)
    flops = (10.0 if backward else 4.0) * pairs * product.n
    length = product.k / (product.k + ATTENTION_RAMP)
    narrow = 1.0 if product.n >= 128 else 0.85 if product.n >= 64 else 0.6
    rate = machine.peak.get(dtype, machine.peak["float32"]) * share * narrow
    return flops / (rate * length) + machine.launch


def memory_time(nbytes: float, machine: Machine) -> float:
    """Seconds to read and write ``nbytes``."""
    return nbytes / (machine.bandwidth * machine.bandwidth_share)


def backward_products(product: Product, input_grad: bool, weight_grad: bool) -> list[Product]:
    """The products that the backward of one runs: of the first side's gradient, and of the second's.

    Example::

        products = backward_products(Product(1, 8, 16, 32), True, True)
        assert [(p.m, p.n, p.k) for p in products] == [(8, 32, 16), (16, 32, 8)]
    """
    m, n, k = product.m, product.n, product.k
    found = []
    if input_grad:
        found.append(replace(product, m=m, n=k, k=n))
    if weight_grad:
        found.append(replace(product, m=n, n=k, k=m))
    return found
