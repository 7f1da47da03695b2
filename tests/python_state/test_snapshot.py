"""State of every kind that a step may change in Python: undone without a trace, or told and the same as of one run."""

from __future__ import annotations

import array
import collections
import dataclasses
import functools
import io
import itertools
import queue
import random
import types
import weakref
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.data import DataLoader

from lightning_par.pipeline.effects.effects import apply
from lightning_par.pipeline.effects.watched_run import Watch
from lightning_par.private.module_hooks import hooks_on_all
from lightning_par.python_state import generators
from lightning_par.python_state.cells.sequences import SequenceCell
from lightning_par.python_state.kept import kept
from lightning_par.python_state.reachable import Reach
from lightning_par.python_state.registered_hooks import HookHolders, HooksCell

COUNT, SEEN = 0, []  # globals that steps change
CACHE: dict[str, Any] = {}


class LoopBack:
    """Ranks that are all this one."""

    name, size, rank, dry = "pipeline", 2, 0, False

    def tells(self, source: int = 0) -> bool:
        return True

    def broadcast_object(self, value: Any, *_: Any) -> Any:
        return value

    def broadcast_(self, value: Tensor, *_: Any) -> Tensor:
        return value


class Object:
    """Attributes of any kind."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def tick(self) -> float:
        self.n = getattr(self, "n", 0) + 1
        return float(self.n)


class Makes(OrderedDict):
    """Makes what is asked for of what it holds, as tables of activations do."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key)()

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, lambda: value)


class Slotted:
    __slots__ = ("n", "seen", "late")

    def __init__(self) -> None:
        self.n, self.seen = 0, list[int]()


@dataclasses.dataclass(frozen=True)
class Frozen:
    seen: list[int]


class Registry:
    count = 0
    seen: list[int] = []
    tensor = torch.zeros(2)

    @classmethod
    def note(cls) -> float:
        cls.count += 1
        cls.seen.append(cls.count)
        cls.tensor += 1
        return float(cls.count + len(cls.seen) + cls.tensor.sum())


class Child(Registry):
    pass


class Own:
    """An iterator of the user's."""

    def __init__(self) -> None:
        self.n = 0

    def __iter__(self) -> Own:
        return self

    def __next__(self) -> int:
        self.n += 1
        return self.n


def numbers() -> Iterator[float]:
    n = 1.0
    while True:
        n *= 1.5
        yield n


def draws() -> Iterator[float]:
    while True:
        yield random.random() + np.random.rand() + torch.rand(()).item()


def closure() -> Callable[[], float]:
    n, seen = 0, []

    def tick() -> float:
        nonlocal n
        n += 1
        seen.append(n)
        return float(n + len(seen))

    return tick


def default(seen: list[int] = []) -> float:  # noqa: B006
    seen.append(1)
    return float(len(seen))


def own_attribute() -> float:
    own_attribute.n = getattr(own_attribute, "n", 0) + 1  # type: ignore[attr-defined]
    return float(own_attribute.n)  # type: ignore[attr-defined]


def helper() -> float:
    return _deeper()


def _deeper() -> float:
    global COUNT
    COUNT += 1
    SEEN.append(COUNT)
    return float(COUNT + len(SEEN))


def grow(values: list[Any]) -> float:
    values.append(len(values))
    return float(sum(values))


def bump(values: Any, key: Any) -> float:
    values[key] += 1
    return float(values[key])


def linked(n: int) -> Object:
    return Object(next=linked(n - 1)) if n else Object(n=0)


def last(x: Any) -> Any:
    while hasattr(x, "next"):
        x = x.next
    return x


def views() -> tuple[Tensor, list[Tensor]]:
    flat = torch.zeros(6)
    return flat, [flat[:2], flat[2:]]


def written(x: Any) -> float:
    x.write("ab")
    return float(len(x.getvalue()))


def rotated(x: Any) -> float:
    x.rotate(1)
    x.append(x[0] + 1)
    return float(sum(x))


def through(x: Tensor, y: Tensor) -> float:
    """Writes in one place and reads in another."""
    x += 1
    return float(y.sum())


def put_back(m: Any) -> float:
    m.s[...] += 1
    return float(m.s.sum())


def moved_to_end(x: Any) -> float:
    x.move_to_end(next(iter(x)))
    return float(next(iter(x.values())))


def stored(m: Any) -> float:
    m.last, m.current = m.s["q"], m.s
    m.s["q"] += 1
    return float(m.last.sum() + m.current["q"].sum())


def made_here(m: Any) -> float:
    if not hasattr(m, "kind"):
        m.kind = namedtuple("Out", ["x"])  # type: ignore[misc]
        m.function = lambda x: x + 1
        m.items = iter([1.0, 2.0, 3.0, 4.0, 5.0])
        m.out = m.kind(torch.ones(2))
    return float(m.kind(1.0).x + m.function(1) + next(m.items) + m.out.x.sum())


class ByName:
    """Gives a named tuple what dicts have."""

    def __getitem__(self, key: Any) -> Any:
        return getattr(self, key) if isinstance(key, str) else super().__getitem__(key)  # type: ignore[misc]


def made_of_more(m: Any) -> float:
    """Named tuples that say more than their names: a base and a subclass's method."""
    if not hasattr(m, "kinds"):

        class Pair(NamedTuple):
            x: float
            y: float

            def total(self) -> float:
                return self.x + self.y

        class Out(ByName, Pair):  # type: ignore[misc]
            pass

        m.kinds = [Pair, Out]
    m.n = getattr(m, "n", 0.0) + m.kinds[0](1.0, 2.0).total() + m.kinds[1](1.0, 2.0)["y"]
    return float(m.n)


class Case:
    def __init__(self, make: Callable[[], Any], step: Callable[[Any], Any]) -> None:
        self.make, self.step = make, step


def of(make: Callable[[], Any], step: Callable[[Any], Any]) -> Case:
    """The state alone is what the step is given."""
    return Case(make, lambda m: step(m.s))


CASES: dict[str, Case] = {
    "numpy generator": of(lambda: np.random.default_rng(0), lambda s: s.beta(2, 2)),
    "numpy generator of another kind": of(lambda: np.random.Generator(np.random.MT19937(1)), lambda s: s.random()),
    "bit generator": of(lambda: np.random.PCG64(0), lambda s: np.random.Generator(s).random()),
    "RandomState": of(lambda: np.random.RandomState(0), lambda s: s.randn()),
    "random.Random": of(lambda: random.Random(0), lambda s: s.gauss(0, 1)),
    "torch.Generator": of(lambda: torch.Generator().manual_seed(0), lambda s: torch.rand((), generator=s)),
    "count": of(itertools.count, next),
    "cycle": of(lambda: itertools.cycle([1, 2, 3]), next),
    "enumerate": of(lambda: enumerate("abcdefgh"), lambda s: next(s)[0]),
    "list iterator": of(lambda: iter([[1], [2], [3], [4], [5]]), lambda s: grow(next(s))),
    "an iterator that ends": of(lambda: iter([1, 2]), lambda s: next(s, 7)),
    "generator": of(numbers, next),
    "generator that draws": of(draws, lambda s: next(s) + random.random() + np.random.rand()),
    "iterators in a tuple": of(lambda: (itertools.count(), [numbers()]), lambda s: next(s[0]) + next(s[1][0])),
    "own iterator": of(Own, next),
    "loader's iterator": of(lambda: iter(DataLoader(torch.arange(8.0), 2)), lambda s: next(s).sum()),
    "a loop over an iterator": of(lambda: iter(range(100)), lambda s: sum(x for x, _ in zip(s, range(3)))),
    "deep dicts": of(lambda: {"a": {"b": {"c": {"d": [{"n": 0}]}}}}, lambda s: bump(s["a"]["b"]["c"]["d"][0], "n")),
    "linked objects": of(lambda: linked(50), lambda s: last(s).tick()),
    "a circle": Case(lambda: Object(), lambda m: setattr(m.s, "own", m.s) or m.s.own.tick()),
    "tuple of mutables": of(lambda: ([0], {"n": 0}), lambda s: grow(s[0]) + bump(s[1], "n")),
    "tuple of tensors": of(lambda: (torch.zeros(2),), lambda s: s[0].add_(1).sum()),
    "slots": of(Slotted, lambda s: grow(s.seen) + (setattr(s, "n", s.n + 1) or s.n)),
    "late slot": of(Slotted, lambda s: setattr(s, "late", len(s.seen)) or grow(s.seen) + s.late),
    "frozen dataclass": of(lambda: Frozen([]), lambda s: grow(s.seen)),
    "closure": of(closure, lambda s: s()),
    "partial": of(lambda: functools.partial(grow, []), lambda s: s()),
    "bound method": of(lambda: Object().tick, lambda s: s()),
    "bound method of a list": of(lambda: [].append, lambda s: s(1) or len(s.__self__)),
    "default argument": of(lambda: default, lambda s: s()),
    "function's attribute": of(lambda: own_attribute, lambda s: s()),
    "class body": of(lambda: Registry, lambda s: s.note()),
    "child's class body": of(lambda: Child(), lambda s: s.note()),
    "globals": of(lambda: None, lambda s: helper()),
    "a global cache": of(lambda: None, lambda s: CACHE.setdefault("x", []).append(1) or len(CACHE["x"])),
    "bytearray": of(lambda: bytearray(b"ab"), lambda s: s.append(1) or len(s)),
    "array.array": of(lambda: array.array("d", [1]), lambda s: s.append(2) or sum(s)),
    "memoryview": of(lambda: memoryview(bytearray(4)), lambda s: bump(s, 0)),
    "deque": of(lambda: deque([1, 2, 3], maxlen=4), rotated),
    "OrderedDict": of(lambda: OrderedDict(a=1, b=2, c=3), moved_to_end),
    "dict that makes its values": of(lambda: Makes(n=1.0), lambda s: bump(s, "n")),
    "Counter": of(lambda: Counter(a=1), lambda s: bump(s, "a")),
    "defaultdict": of(lambda: defaultdict(list), lambda s: grow(s["new"])),
    "UserDict": of(lambda: UserDict(n=1), lambda s: bump(s, "n")),
    "UserList": of(lambda: UserList([1]), grow),
    "ChainMap": of(lambda: collections.ChainMap({}, {"n": 1}), lambda s: bump(s, "n")),
    "SimpleNamespace": of(lambda: types.SimpleNamespace(n=[]), lambda s: grow(s.n)),
    "queue": of(lambda: queue.deque([1]), grow),  # type: ignore[attr-defined]
    "set": of(lambda: {1}, lambda s: s.add(len(s) + 1) or sum(s)),
    "StringIO": of(io.StringIO, written),
    "weak reference": Case(lambda: Object(n=0), lambda m: weakref.ref(m.s)().tick()),  # type: ignore[union-attr]
    "array": of(lambda: np.zeros(3), lambda s: bump(s, 1)),
    "array of objects": of(lambda: np.array([[1], None], dtype=object), lambda s: grow(s[0])),
    "views of one tensor": of(views, lambda s: through(s[1][1], s[0]) + through(s[0], s[1][0])),
    "a tensor in two places": of(lambda: 2 * [torch.zeros(2)], lambda s: through(s[0], s[1])),
    "tensor that is kept for later": Case(lambda: {"q": torch.zeros(2)}, stored),
    "module in a list": of(lambda: [nn.BatchNorm1d(2)], lambda s: s[0](torch.ones(3, 2)).sum() + s[0].running_mean[0]),
    "what can't be sent": Case(lambda: None, made_here),
    "a class that is more than a named tuple": Case(lambda: None, made_of_more),
}  # fmt: skip


class Model(pl.LightningModule):
    case: Case

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.s = case, case.make()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.as_tensor(self.case.step(self), dtype=torch.float64)


def _reset() -> None:
    global COUNT
    COUNT = 0
    SEEN.clear()
    CACHE.clear()
    Registry.count, Registry.tensor = 0, torch.zeros(2)
    Registry.seen.clear()
    for name in ("count", "tensor"):
        if name in vars(Child):
            delattr(Child, name)
    default.__defaults__[0].clear()  # type: ignore[index]
    vars(own_attribute).clear()


def _run(module: Any, batches: list[Any], watched: bool) -> list[Any]:
    pl.seed_everything(0, verbose=False)
    watch, results = Watch(module, list(module.named_modules())), []
    for i, batch in enumerate(batches):
        if not watched:
            results.append(module.training_step(batch, i))
            continue
        start = generators.global_state()
        with kept(module, batch):
            pass
        for keep in (True, False):
            generators.set_global_state(start)
            with watch.undone(batch, keep=keep):
                module.training_step(batch, i)
        end = generators.global_state()
        generators.set_global_state(start)
        with watch.told(batch) as effects:
            effects.result = module.training_step(batch, i)
        generators.set_global_state(end)
        axis: Any = LoopBack()
        effects = effects.travel(axis, 0, objects=watch.objects(batch), made=watch.made, module=module)
        apply(effects, module, watch, batch, show=False)
        results.append(effects.result)
    return results


@pytest.mark.parametrize("name", CASES)
def test_state_of_every_kind_moves_once_a_step(name: str) -> None:
    _reset()
    plain = _run(Model(CASES[name]), [None] * 4, watched=False)
    _reset()
    assert _run(Model(CASES[name]), [None] * 4, watched=True) == plain
    assert len({float(x) for x in plain}) > 1 or name in ("OrderedDict", "an iterator that ends")


@pytest.mark.parametrize(
    "step", [lambda x: x.append(7), lambda x: x.clear(), lambda x: x.__setitem__(slice(None), [7])]
)
def test_a_list_of_which_another_rank_has_more_keeps_it(step: Callable[[list[Any]], Any]) -> None:
    """As what a hook or an ``if trainer.is_global_zero:`` put there on the first rank alone."""
    here, there = [1, 2], [1, 2, 3]
    told, heard = SequenceCell("seen", here), SequenceCell("seen", there)
    step(here)
    heard.apply(told.change())
    expected = [1, 2, 3]
    step(expected)
    assert there == expected


def test_an_object_has_one_name_whatever_attribute_came_first() -> None:
    """Attributes may be set in the order of a set of names, which is another one on each rank."""
    one: list[Any] = []
    names = [Reach() for _ in range(2)]
    for reach, order in zip(names, (("a", "b"), ("b", "a"))):
        reach.add("self", Object(**dict.fromkeys(order, one)))
    assert [reach.names[id(one)] for reach in names] == ["self.a"] * 2


class Table:
    """Looks its names up by what it makes at the first look-up, which can't be pickled."""

    def __init__(self, *names: str) -> None:
        self.names, self.cache = names, {}

    def find(self, name: str) -> int:
        if "find" not in self.cache:
            self.cache["find"] = lambda wanted: self.names.index(wanted)
        return self.cache["find"](name)


class LooksUp(pl.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch["x"][:, batch["columns"].find("b")].sum()


def test_what_a_batch_makes_for_itself_need_not_be_sent() -> None:
    def batches() -> list[Any]:
        return [{"x": torch.arange(4.0).view(2, 2) + i, "columns": Table("a", "b")} for i in range(2)]

    given = batches()
    assert _run(LooksUp(), given, watched=True) == _run(LooksUp(), batches(), watched=False)
    assert all("find" in batch["columns"].cache for batch in given)


def test_hooks_are_put_back_and_hung_again() -> None:
    module, other = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2)
    kept = module[0].register_forward_hook(print)
    hooks = HooksCell(HookHolders(module))
    assert not hooks.moved()
    other.register_forward_hook(print)
    assert not hooks.moved() and hooks.change() is None
    kept.remove()
    added = module[1].register_forward_pre_hook(print, with_kwargs=True)
    everywhere = register_module_forward_hook(print)
    on_weight = module[0].weight.register_hook(print)
    change = hooks.change()
    assert change is not None
    assert list(change.entries) == ["self.0", "all modules", "self.1", "parameter 0.weight"]
    hooks.restore()
    assert list(module[0]._forward_hooks.values()) == [print]
    assert not (module[1]._forward_pre_hooks or module[1]._forward_pre_hooks_with_kwargs or hooks_on_all())
    assert not module[0].weight._backward_hooks
    hooks.apply(change)
    assert not module[0]._forward_hooks and list(module[1]._forward_pre_hooks_with_kwargs.values()) == [True]
    assert list(module[0].weight._backward_hooks.values()) == [print] and hooks_on_all() == [print]
    for handle in (added, everywhere, on_weight):  # which still know where their hooks are
        handle.remove()
    assert not (module[1]._forward_pre_hooks or module[0].weight._backward_hooks or hooks_on_all())


def test_what_a_layer_removes_itself_stays_removed() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    handle = module[0].register_forward_hook(print)
    hooks = HooksCell(HookHolders(module))
    module.register_forward_hook(print)
    with hooks.within_unit("0"):
        handle.remove()
    hooks.restore()
    assert not module._forward_hooks and not module[0]._forward_hooks


def test_what_a_layer_registers_itself_is_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    hooks = HooksCell(HookHolders(module))
    with pytest.raises(RuntimeError, match="A hook on self.0 is registered as '0' runs"), hooks.within_unit("0"):
        module[0].register_forward_hook(print)


def test_hooks_that_another_rank_removed_go_by_their_places() -> None:
    here, there = (nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
    handles = [module[0].register_forward_hook(hook) for module in (here, there) for hook in (print, repr)]
    cells = [HooksCell(HookHolders(module)) for module in (here, there)]
    handles[0].remove()
    cells[1].remove(cells[0].removed())
    assert [*there[0]._forward_hooks.values()] == [repr] == [*here[0]._forward_hooks.values()]
