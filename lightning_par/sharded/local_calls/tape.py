"""Notes what the rules of functions do with this rank's parts, so that it can be done again without them.

A rule decides by shapes, dtypes, positions and settings which plain functions run on the parts. The tape is a mode
that sees these, and hears of the verbs that rules call. What can't be done again from that is *unclear*: a value that
a rule read, a random draw, a write, a tensor of unknown origin, a gather that is reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.listener import Listener, thread
from lightning_par.sharded.functions import DRAWS, METADATA, READS, STRIDES, name_of, writes
from lightning_par.sharded.local_calls.form import PLAIN, Form, form_of
from lightning_par.sharded.rules.in_place import is_told_to
from lightning_par.sharded.tensor import ShardedTensor

_FACTS = METADATA | STRIDES | frozenset("""
shape dtype device ndim layout requires_grad is_leaf is_cuda is_meta is_sparse is_quantized is_nested is_mps is_cpu
untyped_storage nelement itemsize nbytes is_mkldnn is_xpu names __hash__ grad_fn
""".split())  # fmt: skip
"""What a rule may ask of a tensor: those things go by what a call's key holds."""


@dataclass(frozen=True)
class Name:
    """Stands for a plain tensor in what was noted."""

    text: str


@dataclass(frozen=True)
class Shard:
    """Stands for a sharded tensor of this form."""

    part: Name
    form: Form


@dataclass(frozen=True)
class Item:
    """One call: what runs, with `Name` and `Shard` for tensors, and the names of what it gives.

    Attributes:
        kind: "function", "verb", or "view" for what runs on sharded tensors as it stands.
    """

    kind: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: str


class UnclearError(Exception):
    """What was noted can't be done again."""


class Tape(TorchFunctionMode, Listener):
    """While it is entered, rules are followed.

    Args:
        inputs: the tensors there are before, by the names that stand for them.
        views: whether a function that is unclear is noted as it stands, on sharded tensors, to be run by its rule.
    """

    def __init__(self, inputs: dict[str, Tensor], views: bool = False) -> None:
        super().__init__()
        self._views = views
        self.items: list[Item] = []
        self.unclear = False
        self._names: dict[int, str] = {id(x): name for name, x in inputs.items()}
        self._held: list[Any] = list(inputs.values())  # or an id would soon be another's
        self._count = 0
        self._paused = self._in_rule = False

    def __enter__(self) -> Tape:
        self._before, thread.listener = thread.listener, self
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        thread.listener = self._before
        super().__exit__(*error)

    def described(self, value: Any) -> Any:
        """``value`` with names for tensors.

        Raises:
            UnclearError: a tensor came from where the tape does not see.
        """
        if isinstance(value, Tensor):
            if type(value) is ShardedTensor:
                part, form = self._name(value._local), form_of(value)
                assert form is not None  # a part of parts has no name
                return Shard(part, form)
            return self._name(value)
        if type(value) in (tuple, list):
            return type(value)(self.described(x) for x in value)
        if isinstance(value, dict):
            return {key: self.described(x) for key, x in value.items()}
        if type(value) is slice:
            return slice(*map(self.described, (value.start, value.stop, value.step)))
        return value

    def verb(self, run: Callable[..., Any], told: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """See `Listener.verb`."""
        axis = next((x for x in (*args, *kwargs.values()) if isinstance(x, Axis)), None)
        if axis is not None and axis.by_sample:  # nothing moves: it comes to functions of this microbatch's tensors
            return run(*args, **kwargs)
        result = self._aside(run, args, kwargs)
        if self._is_known(result):  # it had nothing to do
            return result
        self._note("verb", told, args, kwargs, result)
        return result

    def missed(self) -> None:
        """See `Listener.missed`."""
        self.unclear = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        name = name_of(func)
        subclasses = [kind for kind in types if kind not in PLAIN]
        if subclasses:
            return self._of_subclass(func, name, subclasses, args, kwargs)
        result = func(*args, **kwargs)
        if name in _FACTS:
            return result
        draws = name in DRAWS and self._draws(name, args, kwargs)
        written = writes(name) or "out" in kwargs or is_told_to(func, args, kwargs)
        if written or name in READS or draws and (self._in_rule or not self._views):
            self.unclear = True
        else:
            self._note("view" if draws else "function", func, args, kwargs, result)
        return result

    def _of_subclass(self, func: Any, name: str, kinds: list[type], args: Any, kwargs: Any) -> Any:
        if name in _FACTS:
            return self._aside(func, args, kwargs)
        if self.unclear or writes(name) or "out" in kwargs or is_told_to(func, args, kwargs) or name in READS:
            self.unclear = True
            return self._aside(func, args, kwargs)
        if not self._views or self._in_rule:
            return self._by_rule(func, kinds, args, kwargs)
        noted, names, self._in_rule = len(self.items), self._names.copy(), True
        try:
            result = self._by_rule(func, kinds, args, kwargs)
        finally:
            self._in_rule = False
        if self.unclear:
            del self.items[noted:]
            self._names, self.unclear = names, False
            self._note("view", func, args, kwargs, result)
        return result

    def _by_rule(self, func: Any, kinds: list[type], args: Any, kwargs: Any) -> Any:
        if kinds != [ShardedTensor]:
            self.unclear = True
            return self._aside(func, args, kwargs)
        from lightning_par.sharded.rules.lookup import dispatch

        super().__enter__()  # torch takes a mode away while it runs
        try:
            return dispatch(func, args, kwargs)
        finally:
            super().__exit__(None, None, None)

    @staticmethod
    def _draws(name: str, args: Any, kwargs: Any) -> bool:
        from lightning_par.sharded.rules.draws import tells_no_draw

        return not tells_no_draw(name, args, kwargs)

    def _aside(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``run``, of which nothing is noted."""
        paused, self._paused = self._paused, True
        before, thread.listener = thread.listener, None
        try:
            return run(*args, **kwargs)
        finally:
            self._paused = paused
            thread.listener = before

    def _note(self, kind: str, run: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        if self.unclear:
            return
        try:
            item = Item(kind, run, self.described(tuple(args)), self.described(kwargs), f"t{self._count}")
        except UnclearError:
            self.unclear = True
            return
        self._count += 1
        self.items.append(item)
        self._give_names(result, item.out)

    def _give_names(self, result: Any, out: str) -> None:
        if isinstance(result, (tuple, list)):
            for number, x in enumerate(result):
                self._give_names(x, f"{out}[{number}]")
        elif type(result) is ShardedTensor:
            self._give_names(result._local, f"{out}._local")
        elif type(result) in PLAIN:
            if id(result) not in self._names:  # it may be an argument, handed through
                self._names[id(result)] = out
                self._held.append(result)
        elif result is not None:
            self.unclear = True  # numbers are of this call's values, or are not a function of tensors at all

    def _name(self, x: Tensor) -> Name:
        found = self._names.get(id(x))
        if found is None:
            raise UnclearError
        return Name(found)

    def _is_known(self, x: Any) -> bool:
        return id(x) in self._names
