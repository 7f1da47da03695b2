"""What one rank finds out of its device and its links, while the others do the same: ranks may share processors."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

WHILE = 0.15
"""Seconds for which each thing is done again and again."""

WINDOWS = 3

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SIDE = {"cpu": 512, "cuda": 8192}  # of a large product
_WALK = {"cpu": 1 << 20, "cuda": 1 << 26}  # elements that functions walk over
_CACHE = {"cpu": 1 << 24, "cuda": 1 << 28}  # elements that no cache holds


@dataclass(frozen=True)
class DeviceRates:
    """Of one device while all are busy.

    Attributes:
        peak: FLOP/s of large products, by the name of their dtype.
        ramp: of the length of a product's sum, in which half of that is reached.
        attention: FLOP/s of fused attention, forward and backward.
        bandwidth: bytes a second between the device and its memory.
        walk: bytes a second that functions of single entries read and write.
        launch: seconds of the smallest function.
        parameter: seconds that the step of an optimizer takes for each small parameter.
        element: seconds that it takes for each element of a large one.
    """

    peak: dict[str, float]
    ramp: int
    attention: tuple[float, float]
    bandwidth: float
    walk: float
    launch: float
    parameter: float
    element: float


@dataclass(frozen=True)
class LinkRates:
    """Of messages among all ranks.

    Attributes:
        bandwidth: bytes a second that a rank sends in an all-reduce.
        latency: seconds of each hop of its ring.
        gather: of `bandwidth` that an all-gather reaches.
        scatter: of `bandwidth` that a reduce-scatter reaches.
    """

    bandwidth: float
    latency: float
    gather: float
    scatter: float


def seconds(function: Callable[[], Any], device: torch.device, duration: float = WHILE) -> float:
    """Of one call, behind a barrier of all ranks: the least of the means of `WINDOWS` parts of ``duration`` seconds."""
    function()
    function()
    _meet(device)
    found = []
    for _ in range(WINDOWS):
        count, begin = 0, time.perf_counter()
        while time.perf_counter() < begin + duration / WINDOWS:
            function()
            count += 1
            if device.type == "cuda" and count % 16 == 0:
                torch.cuda.synchronize(device)  # else the queue grows longer than the duration
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append((time.perf_counter() - begin) / count)
    return min(found)  # other programs may run meanwhile


def device_rates(device: torch.device) -> DeviceRates:
    """All ranks must call it."""
    side = _SIDE[device.type]
    large = {name: _product(side, side, side, dtype, device) for name, dtype in _DTYPES.items()}
    peak = {name: 2 * side**3 / took for name, took in large.items()}
    short = side // 16
    rate = 2 * side * short * side / _product(side, short, side, torch.float32, device)
    ramp = max(0.0, short * (peak["float32"] / rate - 1))
    if device.type == "cuda":  # as products in single precision are let be
        peak["tf32"] = peak["float32"]
    bandwidth = _bandwidth(device)
    one = torch.ones(4, device=device)
    launch = seconds(lambda: torch.add(one, one), device)
    parameter, numel = _update(device, 32, 8) / 32, _CACHE[device.type] // 4
    element = max(1e-12, _update(device, 1, numel) - parameter) / numel
    return DeviceRates(
        peak,
        round(ramp),
        _attention(device),
        bandwidth,
        _walk(device),
        launch,
        parameter,
        element,
    )


def link_rates(device: torch.device) -> LinkRates:
    """All ranks must call it."""
    ranks = dist.get_world_size()
    small, large = (torch.ones(count, device=device) for count in (16, 1 << 20))
    part = torch.ones(large.numel() // ranks, device=device)
    whole = part.repeat(ranks)
    short = _messages(lambda: dist.all_reduce(small), 20, device)
    once = (ranks - 1) / ranks * large.nbytes

    def rate(send: Callable[[], Any], sent: float) -> float:
        return sent / max(_messages(send, 3, device) - short, 1e-6)

    bandwidth = rate(lambda: dist.all_reduce(large), 2 * once)
    gather = rate(lambda: dist.all_gather_into_tensor(whole, part), once)
    scatter = rate(lambda: dist.reduce_scatter_tensor(part, whole), once)
    return LinkRates(bandwidth, short / (2 * (ranks - 1)), gather / bandwidth, scatter / bandwidth)


def _messages(send: Callable[[], Any], count: int, device: torch.device) -> float:
    """Seconds of one of ``count``, which all ranks send."""
    send()
    send()
    found = []
    for _ in range(WINDOWS):
        _meet(device)
        begin = time.perf_counter()
        for _ in range(count):
            send()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append((time.perf_counter() - begin) / count)
    return min(found)


def _bandwidth(device: torch.device) -> float:
    x, y = (torch.ones(_CACHE[device.type], device=device) for _ in range(2))
    return 8 * x.numel() / seconds(lambda: y.copy_(x), device)


def _product(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = torch.ones(m, k, dtype=dtype, device=device), torch.ones(n, k, dtype=dtype, device=device)
    return seconds(lambda: F.linear(a, b), device)


def _attention(device: torch.device) -> tuple[float, float]:
    batch, heads, length, width = (2, 4, 256, 64) if device.type == "cpu" else (2, 16, 4096, 128)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(batch, heads, length, width, device=device, dtype=dtype).requires_grad_() for _ in range(3))
    with torch.no_grad():
        forward = seconds(lambda: F.scaled_dot_product_attention(q, k, v), device)

    def both() -> None:
        F.scaled_dot_product_attention(q, k, v).sum().backward()

    backward = max(seconds(both, device) - forward, forward)
    pairs = batch * heads * length * length * width
    return 4 * pairs / forward, 10 * pairs / backward


def _walk(device: torch.device) -> float:
    """The functions of a transformer that are no products, forward and backward."""
    x = torch.randn(_WALK[device.type] // 256, 256, device=device, requires_grad=True)
    weight = torch.ones(256, device=device)
    functions: list[Callable[[Tensor], Tensor]] = [
        F.gelu, lambda x: F.layer_norm(x, (256,), weight), lambda x: F.softmax(x, -1), lambda x: x + 1,
    ]  # fmt: skip
    gradient = torch.ones_like(x)

    def run() -> None:
        for function in functions:
            x.grad = None
            function(x).backward(gradient)

    # Forward reads and writes; backward reads what is kept and the gradient, and writes one.
    return len(functions) * 5 * x.nbytes / seconds(run, device)


def _update(device: torch.device, count: int, numel: int) -> float:
    """Of the step of AdamW."""
    parameters = [nn.Parameter(torch.ones(numel, device=device)) for _ in range(count)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW(parameters)
    return seconds(optimizer.step, device)


def _meet(device: torch.device) -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
