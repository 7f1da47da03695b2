"""Where each module shall have one place, its first call stands for all."""

from __future__ import annotations

from lightning_par.pipeline.plan.first_calls import called_once
from lightning_par.pipeline.plan.units import ModuleCall, walk


def test_the_first_call_costs_what_all_do_and_may_be_opened() -> None:
    inner = ModuleCall("net.a", 1.0, 4)
    net = ModuleCall("net", 3.0, 8, (inner, ModuleCall("net.b", 2.0, 4)), closed="it reads a value")
    root = ModuleCall("", 9.0, 9, (net, ModuleCall("head", 1.0, 1), net, ModuleCall("net.a", 2.0, 4)))
    once = called_once(root)
    found = {call.path: (call.flops, call.closed) for call in walk(once)}
    assert found == {
        "": (9.0, None),
        "net": (6.0, None),
        "net.a": (4.0, None),
        "net.b": (4.0, None),
        "head": (1.0, None),
    }
    assert [call.path for call in walk(once)] == ["", "net", "net.a", "net.b", "head"]
