"""What ranks that hold the same weights send of their gradients: in each backward that a step runs, once a step else.

As `lightning_par.optim.gradient_sync` has it: all parameters that require a gradient as a backward begins are averaged
once it has ended, whether it came to them or not, and which ones it came to is told with them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from lightning_par.planner.messages.stored_parts import StoredPart
from lightning_par.planner.times.layout_work import LayoutWork


def averages(work: LayoutWork, parts: Sequence[StoredPart]) -> dict[str, float]:
    """Bytes that a rank sends in a step, by axis.

    Args:
        work: of the layout.
        parts: what the rank has of its parameters; what sums the gradients of those that are stored in parts, as it
            gathers them, is counted elsewhere.
    """
    found: dict[str, float] = defaultdict(float)
    for trained in work.run.tree.trained or ({part.parameter.name for part in parts if part.parameter.trained},):
        for axis, size in _average(work, parts, trained).items():
            found[axis] += size
    return found


def _average(work: LayoutWork, parts: Sequence[StoredPart], trained: Collection[str]) -> dict[str, float]:
    one, replicas = work.one, work.replicas.size
    sharers = one.layout.tensor if one.shard_residual else 1  # that have a share each of the gradient of a whole weight
    sums: dict[tuple[str, int], list[int]] = {}  # elements of what is summed along so many ranks
    for part in parts:
        alike = sharers if part.parameter.dim is None else 1
        key = ("tensor", alike) if part.message else ("data", replicas * alike)
        if part.parameter.name in trained and key[1] > 1:
            sums.setdefault(key, []).append(part.numel)
    # Which gradients there are goes with them, if all go to all ranks that are to know.
    flags = sums.keys() == {("data", replicas * sharers)}
    found = dict.fromkeys(("data", "tensor"), 0.0)
    for (axis, ranks), numels in sums.items():
        entries = sum(numels) + len(numels) * flags
        found[axis] += 2 * entries * work.run.precision.gradients * (ranks - 1) / ranks
    return found
