"""The units of a pipeline: the modules that are called as a whole, chosen from the calls of a recorded step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from lightning_par.pipeline.plan.balance_time import UnitCall, bottleneck, costs_of, split

UNEVEN, WORTH = 1.3, 0.95  # stages this far from even are worth opening a module that makes them this much faster


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module in the recorded step, with the calls inside it, in order.

    Attributes:
        path: the module's name, "" for the LightningModule itself.
        flops: of the whole call, children included.
        numel: parameters of the module and of all modules in it.
        children: the calls of modules within this call.
        closed: why it can't be opened, e.g. "reads a value"; None where it can.
        nbytes: of the values that are made in the whole call, children included.
        always: whether it is closed where a step runs layer by layer, too.
    """

    path: str
    flops: float
    numel: int
    children: tuple[ModuleCall, ...] = ()
    closed: str | None = None
    nbytes: float = 0.0
    always: bool = False


class ClosedError(ValueError):
    """A module that was to be called apart lies in one that can't be taken apart.

    Args:
        path: of the module.
        holder: of the one that calls it.
        reason: why that can't be taken apart.
    """

    def __init__(self, path: str, holder: str, reason: str) -> None:
        self.path, self.holder, self.reason = path, holder, reason
        super().__init__(
            f"stages names {path!r}, which is called by {holder!r}, and that can't be taken apart over stages: "
            f"{reason}. Write {holder!r} in its place."
        )


def walk(root: ModuleCall) -> Iterator[ModuleCall]:
    """Every call, the outer before the inner."""
    yield root
    for child in root.children:
        yield from walk(child)


def ancestors(path: str) -> list[str]:
    """The names of the modules around ``path``, the nearest first, without the LightningModule.

    Example::

        assert ancestors("net.blocks.0") == ["net.blocks", "net"]
    """
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def close(root: ModuleCall, paths: Collection[str], reason: str) -> ModuleCall:
    """``root``, in which the modules ``paths`` can't be opened, for a ``reason``.

    Example::

        assert close(Call("net", 8, 8), {"net"}, "reads a value").closed == "reads a value"
    """
    children = tuple(close(child, paths, reason) for child in root.children)
    return replace(root, children=children, closed=root.closed or (reason if root.path in paths else None))


def check_step(root: ModuleCall) -> None:
    """Raises ValueError where the step's own code can't be taken apart, however it runs."""
    if root.always:
        raise ValueError(
            f"The step can't be cut into stages: {root.closed}. Call them in the forward of a module of its own, which "
            "stays in one place, or use TensorParallelStrategy."
        )


def as_units(root: ModuleCall, paths: Collection[str]) -> ModuleCall:
    """``root``, in which the modules ``paths``, that have no parameters, can be called as a whole as those that have.

    Example::

        assert as_units(Call("norm", 8, 0), {"norm"}).numel == 1
    """
    if not paths:
        return root
    children = tuple(as_units(child, paths) for child in root.children)
    return replace(root, numel=root.numel or int(root.path in paths), children=children)


def unit_calls(root: ModuleCall, units: Collection[str]) -> list[UnitCall]:
    """The calls of ``units`` in execution order.

    What a container computes itself, and a module without parameters, counts for the unit called before it.
    """
    found: list[UnitCall] = []
    early = 0.0

    def visit(call: ModuleCall) -> None:
        nonlocal early
        if call.path in units:
            found.append(UnitCall(call.path, call.flops, call.numel))
            return
        for child in call.children:
            visit(child)
        own = max(0.0, call.flops - sum(child.flops for child in call.children))
        if found:
            found[-1] = UnitCall(found[-1].path, found[-1].flops + own, found[-1].numel)
        else:
            early += own

    visit(root)
    if found:
        found[0] = UnitCall(found[0].path, found[0].flops + early, found[0].numel)
    return found


def choose_units(
    root: ModuleCall, stages: int, required: Collection[str] = (), opened: Collection[str] = ()
) -> tuple[str, ...]:
    """The modules to be called as a whole, in execution order.

    A container is opened while there are fewer units than ``stages``, or where the stages come out uneven and opening
    it helps. With ``required``, only what lies around those and ``opened`` is opened. No unit holds another, unless it
    can't be opened and a module in it is called from elsewhere, too. Where all that can be is open, there may be fewer
    than ``stages``.

    Args:
        root: the recorded step.
        stages: into how many stages the units will be split.
        required: names of modules that must not lie within a unit.
        opened: names of modules that must not be units.

    Raises:
        ClosedError: one of ``required`` lies in a module that can't be opened.
        ValueError: one of ``required`` is not called.

    Example::

        net = Call("net", 8, 8, (Call("net.0", 4, 4), Call("net.1", 4, 4)))
        assert choose_units(Call("", 8, 8, (net,)), stages=1) == ("net",)
        assert choose_units(Call("", 8, 8, (net,)), stages=2) == ("net.0", "net.1")
    """
    tree = _Tree(root)
    if required:
        return tree.units(_open_around(tree, required, opened))
    must = tree.settled({"", *opened})
    opened = must
    while len(units := tree.units(opened)) < stages and (can := [unit for unit in units if tree.can_open(unit)]):
        opened = tree.opened_deeply(opened, max(can, key=tree.flops.__getitem__))
    if len(units) >= stages:
        opened = _close_again(tree, _even_out(tree, opened, stages), stages, must)
    return tree.units(opened)


class _Tree:
    """The calls of modules with parameters, by name."""

    def __init__(self, root: ModuleCall) -> None:
        self.root = root
        self.flops: dict[str, float] = {}
        self.closed: dict[str, str] = {}
        self.inside: dict[str, set[str]] = {}
        for call in walk(root):
            if call.numel:
                self.flops[call.path] = self.flops.get(call.path, 0.0) + call.flops
                self.inside.setdefault(call.path, set()).update(c.path for c in walk(call) if c.numel)
                if call.closed is not None:
                    self.closed[call.path] = call.closed
        for path, inside in self.inside.items():
            inside.discard(path)

    def can_open(self, path: str) -> bool:
        return path not in self.closed and bool(self.inside[path])

    def units(self, opened: Collection[str]) -> tuple[str, ...]:
        found: dict[str, None] = {}

        def visit(call: ModuleCall) -> None:
            if call.numel and call.path not in opened:
                found[call.path] = None
                return
            for child in call.children:
                visit(child)

        visit(self.root)
        return tuple(found)

    def settled(self, opened: Collection[str]) -> frozenset[str]:
        """``opened``, and what holds another unit."""
        units = set(self.units(opened))
        named = {above for unit in units for above in ancestors(unit)}
        holders = {u for u in units if self.can_open(u) and (u in named or self.inside[u] & units)}
        return self.settled({*opened, *holders}) if holders else frozenset(opened)

    def opened_deeply(self, opened: Collection[str], *paths: str) -> frozenset[str]:
        """``opened`` and ``paths``, and what is alone in one of them."""
        before = set(self.units(opened))
        more = self.settled({*opened, *paths})
        new = [unit for unit in self.units(more) if unit not in before]
        return self.opened_deeply(more, new[0]) if len(new) == 1 and self.can_open(new[0]) else more


def _open_around(tree: _Tree, required: Collection[str], also: Collection[str]) -> frozenset[str]:
    around = {path for path, inside in tree.inside.items() if inside & set(required) and tree.can_open(path)}
    opened = tree.settled({"", *around, *also})
    units = tree.units(opened)
    for path in required:
        if path not in opened and path not in units:
            holder = next((u for u in units if path in tree.inside.get(u, ())), None)
            if holder is None:
                raise ValueError(f"the step calls no module {path!r} with parameters.")
            raise ClosedError(path, holder, tree.closed[holder])
    return opened


def _even_out(tree: _Tree, opened: frozenset[str], stages: int) -> frozenset[str]:
    """Open what makes the slowest stage faster, as long as it is far slower than the mean."""
    best = _bottleneck(tree, opened, stages)
    ahead = opened  # a container may have to be opened twice or more before that helps
    mean = sum(costs_of(unit_calls(tree.root, tree.units(opened)))) / stages
    while best > UNEVEN * mean:
        calls = unit_calls(tree.root, tree.units(ahead))
        costs = costs_of(calls)
        bounds = [*split(calls, stages), len(calls)]
        runs = [range(start, end) for start, end in zip(bounds, bounds[1:])]
        run = max(runs, key=lambda run: sum(costs[i] for i in run))
        can = dict.fromkeys(calls[i].path for i in run if tree.can_open(calls[i].path))
        if not can:
            return opened
        tries = [tree.opened_deeply(ahead, path) for path in sorted(can, key=lambda path: -tree.flops[path])]
        # Equal blocks are opened together: one alone does not help where several stages are the slowest.
        most = max(tree.flops[path] for path in can)
        alike = [u for u in tree.units(ahead) if tree.can_open(u) and tree.flops[u] >= WORTH * most]
        tries.append(tree.opened_deeply(ahead, *alike))
        tries = [one for one in tries if len(tree.units(one)) >= stages]  # what is in it may be opened already
        if not tries:
            return opened
        reached = [_bottleneck(tree, one, stages) for one in tries]
        ahead = tries[reached.index(min(reached))]
        if min(reached) < WORTH * best:
            opened, best = ahead, min(reached)
    return opened


def _bottleneck(tree: _Tree, opened: Collection[str], stages: int) -> float:
    """The cost of the slowest stage."""
    return bottleneck(costs_of(unit_calls(tree.root, tree.units(opened))), stages)


def _close_again(tree: _Tree, opened: frozenset[str], stages: int, kept: Collection[str]) -> frozenset[str]:
    """Make a unit of each container that came to lie within one stage, the outermost first."""
    units = tree.units(opened)
    starts = split(unit_calls(tree.root, units), stages)
    seen, stages_of = 0, {path: set[int]() for path in opened}

    def visit(call: ModuleCall) -> None:
        nonlocal seen
        begin = seen
        if call.path in units:
            seen += 1
            return
        for child in call.children:
            visit(child)
        if call.path in stages_of:
            stages_of[call.path].update(sum(start <= i for start in starts) for i in range(begin, seen))

    visit(tree.root)
    for path in sorted(opened - {"", *kept}, key=lambda path: -len(tree.inside[path])):
        fewer = opened - {path}
        if len(stages_of[path]) == 1 and tree.settled(fewer) == fewer and len(tree.units(fewer)) >= stages:
            opened = fewer
    return opened


def list_names(names: Iterable[str]) -> str:
    """The names in one line, with neighbours of a list together.

    Example::

        assert list_names(["tok", "blocks.0", "blocks.1", "blocks.2", "head"]) == "tok, blocks.0-2, head"
    """
    kinds: dict[tuple[str, str | None], list[int]] = {}
    for name in dict.fromkeys(names):
        parts = name.split(".")
        at = max((i for i, part in enumerate(parts) if part.isdigit()), default=None)
        if at is None:
            kinds[name, None] = []
        else:
            kinds.setdefault((".".join(parts[:at]), ".".join(parts[at + 1 :])), []).append(int(parts[at]))
    texts = []
    for (head, tail), numbers in kinds.items():
        texts += [head] if tail is None else [f"{head}.{run}.{tail}".strip(".") for run in _runs(numbers)]
    return ", ".join(texts)


def _runs(numbers: list[int]) -> list[str]:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
