"""The fake device itself: it refuses what CUDA refuses, and tells what makes the host wait."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.gpu_rules import build
from tests.gpu_rules.ranks import StrictPool


def _refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except RuntimeError as error:
        return "Expected all tensors to be on the same device" in str(error)
    return False


def _mixed_devices() -> dict[str, bool]:
    x, other, host = (torch.ones(3, 3, device=device) for device in ("cuda:0", "cuda:1", "cpu"))
    return {
        "a CPU tensor": _refused(lambda: x + host),
        "another device": _refused(lambda: x @ other),
        "a list": _refused(lambda: torch.cat([x, other])),
        "a number": _refused(lambda: x + torch.tensor(2.0)),
        "a copy": _refused(lambda: host.copy_(x)),
    }


def test_mixed_devices_are_refused(pool: StrictPool) -> None:
    (refused,) = pool.run(1, _mixed_devices)
    wanted = {"a CPU tensor": True, "another device": True, "a list": True, "a number": False, "a copy": False}
    assert refused == wanted


def _waits() -> dict[str, list[Any]]:
    from tests.gpu_rules import waits

    x = torch.arange(4.0, device="cuda")
    pinned = torch.empty(4, pin_memory=True)
    mask, index, on_host = x > 1, torch.tensor([1, 2], device="cuda"), torch.ones(4)
    calls: dict[str, Callable[[], object]] = {
        "item": lambda: x.sum().item(),
        "if": lambda: bool(x[0] > 3),
        "cpu": lambda: x.cpu(),
        "to pinned": lambda: pinned.copy_(x, non_blocking=True),
        "to pageable": lambda: on_host.copy_(x, non_blocking=True),
        "from the host": lambda: on_host.to("cuda"),
        "mask": lambda: x[mask],
        "nonzero": lambda: mask.nonzero(),
        "synchronize": lambda: torch.cuda.synchronize(),
        "event": lambda: torch.cuda.Event().synchronize(),
        "arithmetic": lambda: (x * 2).softmax(-1)[index],
    }
    found = {}
    for name, call in calls.items():
        with waits.counted() as counter:
            call()
        assert all("gpu_rules/test_fake_device.py" in site for _, _, site in counter), counter
        found[name] = sorted(waits.blocking(counter).values()), [what for what, _, _ in counter]
    return found


def test_host_waits_are_counted_with_their_lines(pool: StrictPool) -> None:
    (found,) = pool.run(1, _waits)
    assert found == {
        "item": ([1], ["wait"]),
        "if": ([1], ["wait"]),
        "cpu": ([1], ["d2h"]),
        "to pinned": ([], ["d2h non_blocking"]),
        "to pageable": ([1], ["d2h"]),
        "from the host": ([], ["h2d"]),
        "mask": ([1], ["wait"]),
        "nonzero": ([1], ["wait"]),
        "synchronize": ([1], ["wait"]),
        "event": ([1], ["wait"]),
        "arithmetic": ([], []),
    }


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _Doubled.ran_in = threading.current_thread() is threading.main_thread(), torch.cuda.current_device()
        return 2 * grad


def _alike(layer: nn.Module, x: torch.Tensor) -> bool:
    layer, runs = layer.double(), []
    for device in ("cpu", "cuda"):
        out = layer.to(device).zero_grad() or layer(x.to(device))
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
        runs.append([p.grad.cpu().clone() for p in layer.parameters()])
    return all(torch.allclose(one, other, atol=1e-12) for one, other in zip(*runs))


def _trains() -> tuple[bool, tuple[bool, int], bool, bool]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Conv1d(4, 4, 3)).double()
    x, runs = torch.randn(2, 4, 8, dtype=torch.float64), []
    for device in ("cpu", "cuda:1"):
        model.to(device).zero_grad()
        q = model(_Doubled.apply(x.to(device).requires_grad_()))
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        y.square().mean().backward()
        runs.append([p.grad.cpu().clone() for p in model.parameters()])
    alike = all(torch.allclose(one, other, atol=1e-12) for one, other in zip(*runs))
    torch.cuda.manual_seed(3)
    first = torch.rand(5, device="cuda")
    torch.cuda.manual_seed(3)
    alike = alike and _alike(nn.Conv1d(4, 8, 3, groups=4), x) and _alike(nn.LSTM(8, 5, batch_first=True), x)
    alike = alike and _alike(nn.GRU(8, 5, batch_first=True), x) and _alike(nn.GRU(8, 5, bias=False), x)
    return alike, _Doubled.ran_in, torch.equal(first, torch.rand(5, device="cuda")), bool((first != 0).all())


def test_a_model_trains_there_with_its_backward_in_a_device_thread(pool: StrictPool) -> None:
    assert pool.run(1, _trains) == [(True, (False, 1), True, True)]


def _kernels_of_cuda() -> list[bool]:
    """Whether what a CPU takes comes to the same there, and what it doesn't, to what floats come to."""
    x, found = torch.randn(3, 5), []
    for function in (torch.softmax, torch.log_softmax):
        for dim in (0, -1):
            on_host, there = x.clone().requires_grad_(), x.cuda().requires_grad_()
            for y in (on_host, there):
                function(y, dim).square().sum().backward()
            assert on_host.grad is not None and there.grad is not None
            found.append(torch.allclose(on_host.grad, there.grad.cpu(), atol=1e-6))
            half = x.half()
            of_half = function(half.cuda(), dim, dtype=torch.float32)
            found.append(torch.allclose(of_half.cpu(), function(half.float(), dim), atol=1e-6))
    numbers = torch.tensor([0, 3, 1, 1, 7, -2, 4])
    counted = torch.histc(numbers.cuda(), bins=4, min=0, max=4)
    found.append(torch.equal(counted.cpu(), torch.histc(numbers.double(), bins=4, min=0, max=4).long()))
    return found


def test_kernels_that_a_cpu_lacks(pool: StrictPool) -> None:
    assert pool.run(1, _kernels_of_cuda) == [[True] * 9]


def _batch_norms() -> list[float]:
    """How far SyncBatchNorm on two ranks is from BatchNorm of all rows on one host."""
    dist.init_process_group("nccl")
    torch.manual_seed(3)
    x, grad = (torch.randn(6, 4, 5, dtype=torch.float64) for _ in range(2))
    rows = slice(0, 2) if dist.get_rank() == 0 else slice(2, 6)
    whole, part = nn.BatchNorm1d(4).double(), nn.SyncBatchNorm(4).double().cuda()
    nn.init.normal_(whole.weight)
    part.load_state_dict(whole.state_dict())
    given, own = x.clone().requires_grad_(), x[rows].cuda().requires_grad_()
    out, own_out = whole(given), part(own)
    out.backward(grad)
    own_out.backward(grad[rows].cuda())
    for p in part.parameters():
        dist.all_reduce(p.grad)
    pairs = [(out[rows], own_out), (given.grad[rows], own.grad), (whole.weight.grad, part.weight.grad)]
    pairs += [(whole.bias.grad, part.bias.grad), *zip(whole.buffers(), part.buffers(), strict=True)]
    return [(wanted - found.cpu()).abs().max().item() for wanted, found in pairs]


def test_batch_norm_is_synced(pool: StrictPool) -> None:
    for off in pool.run(2, _batch_norms):
        assert max(off) < 1e-12, off


def _averaged_by_ddp() -> list[list[float]]:
    dist.init_process_group("nccl")
    layer = nn.Linear(2, 1, bias=False).cuda()
    model, grads = DistributedDataParallel(layer, device_ids=[0], find_unused_parameters=True), []
    for step in range(3):  # it asks for times from the second on
        layer.zero_grad()
        model(torch.tensor([[1.0, step]], device="cuda") * (1 + dist.get_rank())).sum().backward()
        grads.append(layer.weight.grad.flatten().tolist())
    return grads


def test_torchs_ddp_averages_gradients(pool: StrictPool) -> None:
    assert pool.run(2, _averaged_by_ddp) == [[[1.5, 1.5 * step] for step in range(3)]] * 2


def _inference() -> list[bool]:
    """Which tensors are inference tensors, on the CPU and on the fake device."""
    found = []
    for device in ("cpu", "cuda"):
        layer, x = nn.Linear(4, 4).to(device), torch.ones(2, 4, device=device)
        with torch.inference_mode():
            y, view = layer(x), layer.weight.t()
            y[0].add_(1)
            found.append([y.is_inference(), view.is_inference(), y[0].is_inference(), x[0].is_inference()])
        found[-1] += [y[0].is_inference(), (y + 1).is_inference()]
    return found


def test_inference_mode_is_as_on_a_cpu(pool: StrictPool) -> None:
    (found,) = pool.run(1, _inference)
    assert found[0] == found[1] and found[0][0]


def _cast_to() -> list[torch.dtype]:
    x = torch.ones(2, 4, device="cuda", dtype=torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16):
        return [F.log_softmax(y, -1).dtype for y in (x, x.t(), x.view(4, 2)[1:])]


def test_autocast_knows_views(pool: StrictPool) -> None:
    assert pool.run(1, _cast_to) == [[torch.float32] * 3]


def _loads() -> dict[str, Any]:
    x = torch.arange(6.0, device="cuda:1")
    file = io.BytesIO()
    torch.save({"x": x, "part": x[2:]}, file)
    found = {}
    for where in (None, "cpu", "cuda:2", torch.device("cuda", 0)):
        file.seek(0)
        loaded = torch.load(file, map_location=where)
        shared = loaded["x"].untyped_storage().data_ptr() == loaded["part"].untyped_storage().data_ptr()
        found[str(where)] = str(loaded["x"].device), loaded["part"].tolist(), shared
    return found


def test_files_are_loaded_to_devices(pool: StrictPool) -> None:
    (found,) = pool.run(1, _loads)
    devices = {"None": "cuda:1", "cpu": "cpu", "cuda:2": "cuda:2", "cuda:0": "cuda:0"}
    assert found == {where: (device, [2.0, 3.0, 4.0, 5.0], True) for where, device in devices.items()}


def _storages_and_streams() -> list[Any]:
    x = torch.ones(4, device="cuda")
    storage = x.untyped_storage()
    storage.resize_(0)
    empty = storage.nbytes()
    storage.resize_(16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x.fill_(2).record_stream(stream)
        within = torch.cuda.current_stream() == stream
    torch.cuda.current_stream().wait_stream(stream)
    pinned = torch.ones(2).pin_memory()
    return [
        empty,
        x.sum().item(),
        within,
        torch.cuda.current_stream() != stream,
        pinned.is_pinned(),
        pinned[1:].is_pinned(),
    ]


def test_storages_streams_and_pinned_memory(pool: StrictPool) -> None:
    assert pool.run(1, _storages_and_streams) == [[0, 8.0, True, True, True, True]]


def test_this_process_has_no_fake_device(pool: StrictPool) -> None:
    pool.run(1, _waits)
    assert not torch.cuda.is_available()
    with pytest.raises(build.NoFakeDeviceError, match="before torch is imported"):
        build.extension()


def test_without_a_compiler_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    told = build.missing()
    assert told is not None and ("g++" in told or "has CUDA" in told)
