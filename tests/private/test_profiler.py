"""What torch's profiler tells of functions, on this process's clock."""

from __future__ import annotations

import time

import torch
from torch.profiler import profile

from lightning_par.private.profiler import Profiler


def test_functions_of_this_thread_are_told_once_and_on_the_clock() -> None:
    profiler = Profiler(torch.device("cpu"))
    x = torch.randn(200, 200, requires_grad=True)
    assert profiler.start()
    before = time.perf_counter_ns()
    with torch.profiler.record_function("the user's::range"):
        y = torch.nn.functional.linear(x, x).sum()
    between = time.perf_counter_ns()
    y.backward()
    after = time.perf_counter_ns()
    found = profiler.stop()
    names = [one.name for one in found.functions]
    assert "aten::linear" in names and "aten::addmm" not in names and "aten::mm" in names  # the latter in backward
    assert not [name for name in names if name.startswith("autograd") or "range" in name]
    assert all(a.end <= b.begin for a, b in zip(found.functions, found.functions[1:]))
    (linear,) = (one for one in found.functions if one.name == "aten::linear")
    slack = found.uncertainty
    assert before - slack <= linear.begin < linear.end <= between + slack
    assert all(one.end <= after + slack or one.begin >= after - slack for one in found.functions)
    assert found.kernels == () and 0 < slack < 10_000_000


def test_a_process_has_one_profiler() -> None:
    with profile():
        assert not Profiler(torch.device("cpu")).start()
    later = Profiler(torch.device("cpu"))
    assert later.start()
    later.stop()
