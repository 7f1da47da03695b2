"""The first calls of modules, where each module shall have one place, whatever the order in which a step calls them."""

from __future__ import annotations

from dataclasses import replace

from lightning_par.pipeline.plan.units import ModuleCall, walk


def called_once(root: ModuleCall) -> ModuleCall:
    """``root``, in which the first call of each module costs as much as all of its calls, and is the only one, and any
    module can be opened but those that never can.

    Example::

        net = Call("", 3, 1, (Call("a", 1, 1), Call("b", 1, 1), Call("a", 1, 1)))
        assert [call.flops for call in called_once(net).children] == [2, 1]
    """
    flops: dict[str, float] = {}
    for call in walk(root):
        flops[call.path] = flops.get(call.path, 0.0) + call.flops
    seen: set[str] = set()

    def first(call: ModuleCall) -> ModuleCall | None:
        if call.path in seen:
            return None
        seen.add(call.path)
        children = tuple(found for child in call.children if (found := first(child)) is not None)
        return replace(call, flops=flops[call.path], children=children, closed=call.closed if call.always else None)

    once = first(root)
    assert once is not None
    return once
