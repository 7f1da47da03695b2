"""A pickle that may come from anyone is read, and nothing that it asks for is looked up, made or called.

Python's unpickler imports what a pickle names, calls it and sets its attributes. This one knows the instructions that
plain values need, and hands back what else is asked for as a description. Whoever wrote the pickle chooses no more than
plain values; what they may be is for the caller to check.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False, slots=True)
class Asked:
    """What a pickle asks for.

    Args:
        name: of the class or function, with its module.
        arguments: what to call it with; None for the class or function itself.
        state: what to fill the object with.
    """

    name: str
    arguments: Any = None
    state: Any = None


def described(content: bytes, names: Container[tuple[str, str]]) -> Any:
    """The value that is pickled in ``content``, by protocol 4 or 5.

    Of `None`, bools, ints, strings, lists, tuples, dicts with keys that are ints, strings or `Asked`, and `Asked`.

    Args:
        content: the pickle.
        names: the modules and names that it may ask for; each name is one in its module, without a dot.

    Raises:
        EOFError: it ends too early.
        pickle.UnpicklingError: it asks for something else, or is none of these values.
        ValueError: it is garbled.

    Example::

        import pickle, pathlib

        asked = described(pickle.dumps([pathlib.PurePosixPath("a")]), {("pathlib", "PurePosixPath")})
        assert (asked[0].name, asked[0].arguments) == ("pathlib.PurePosixPath", ("a",))
    """
    try:
        return _Reader(content, names).read()
    except (EOFError, pickle.UnpicklingError):
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"it is garbled ({type(error).__name__}: {error})") from error


class _Reader:
    def __init__(self, content: bytes, names: Container[tuple[str, str]]) -> None:
        self.content, self.at, self.names = content, 0, names
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under the marks
        self.memo: list[Any] = []

    def read(self) -> Any:
        while (code := self.take(1)) != pickle.STOP:
            if code not in _STEPS:
                raise pickle.UnpicklingError(f"the instruction {code!r} of a pickle")
            _STEPS[code](self)
        return self.stack.pop()

    # ------------------------------------------------------------------------------------------------- what is read

    def take(self, count: int) -> bytes:
        taken = self.content[self.at : self.at + count]
        if len(taken) < count:
            raise EOFError("it ends too early")
        self.at += count
        return taken

    def number(self, width: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(width), "little", signed=signed)

    def text(self, width: int) -> None:
        self.stack.append(self.take(self.number(width)).decode("utf-8", "surrogatepass"))  # as `pickle` decodes it

    def recall(self, width: int) -> None:
        self.stack.append(self.memo[self.number(width)])

    # --------------------------------------------------------------------------------------------------- containers

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.below.pop()
        return items

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def tuple_of(self, count: int) -> None:
        items = [self.stack.pop() for _ in range(count)]
        self.stack.append(tuple(items[::-1]))

    def append(self, items: list[Any]) -> None:
        _checked(self.stack[-1], list).extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = _checked(self.stack[-1], dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_checked(key, str, int, Asked)] = value

    # ------------------------------------------------------------------------------------------------ what is asked for

    def name(self) -> None:
        name, module = _checked(self.stack.pop(), str), _checked(self.stack.pop(), str)
        if "." in name or (module, name) not in self.names:  # a dotted name is an attribute of what may be asked for
            raise pickle.UnpicklingError(f"{module}.{name}"[:200])
        self.stack.append(Asked(f"{module}.{name}"))

    def make(self) -> None:
        arguments, made = _checked(self.stack.pop(), tuple), _checked(self.stack.pop(), Asked)
        if made.arguments is not None:
            raise ValueError("what was made is called")
        self.stack.append(Asked(made.name, arguments))

    def fill(self) -> None:
        state, made = self.stack.pop(), _checked(self.stack[-1], Asked)
        if made.arguments is None or made.state is not None:
            raise ValueError("something is filled that was not made, or was filled before")
        made.state = state


def _checked(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise TypeError(f"a {type(value).__name__} is out of place")
    return value


_STEPS: dict[bytes, Callable[[_Reader], Any]] = {
    pickle.PROTO: lambda r: r.take(1),
    pickle.FRAME: lambda r: r.take(8),
    pickle.SHORT_BINUNICODE: lambda r: r.text(1),
    pickle.BINUNICODE: lambda r: r.text(4),
    pickle.BINUNICODE8: lambda r: r.text(8),
    pickle.NONE: lambda r: r.push(None),
    pickle.NEWTRUE: lambda r: r.push(True),
    pickle.NEWFALSE: lambda r: r.push(False),
    pickle.BININT: lambda r: r.push(r.number(4, signed=True)),
    pickle.BININT1: lambda r: r.push(r.number(1)),
    pickle.BININT2: lambda r: r.push(r.number(2)),
    pickle.LONG1: lambda r: r.push(r.number(r.number(1), signed=True)),
    pickle.BINFLOAT: lambda r: r.push(*struct.unpack(">d", r.take(8))),
    pickle.MEMOIZE: lambda r: r.memo.append(r.stack[-1]),
    pickle.BINGET: lambda r: r.recall(1),
    pickle.LONG_BINGET: lambda r: r.recall(4),
    pickle.MARK: _Reader.mark,
    pickle.EMPTY_TUPLE: lambda r: r.push(()),
    pickle.TUPLE1: lambda r: r.tuple_of(1),
    pickle.TUPLE2: lambda r: r.tuple_of(2),
    pickle.TUPLE3: lambda r: r.tuple_of(3),
    pickle.TUPLE: lambda r: r.push(tuple(r.since_mark())),
    pickle.EMPTY_LIST: lambda r: r.push([]),
    pickle.APPEND: lambda r: r.append([r.stack.pop()]),
    pickle.APPENDS: lambda r: r.append(r.since_mark()),
    pickle.EMPTY_DICT: lambda r: r.push({}),
    pickle.SETITEM: lambda r: r.set_items([r.stack.pop(), r.stack.pop()][::-1]),  # the value lies on top
    pickle.SETITEMS: lambda r: r.set_items(r.since_mark()),
    pickle.STACK_GLOBAL: _Reader.name,
    pickle.NEWOBJ: _Reader.make,
    pickle.REDUCE: _Reader.make,
    pickle.BUILD: _Reader.fill,
}
