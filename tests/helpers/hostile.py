"""Files that do harm to who trusts them: pickles that run code, by each instruction that can, and true ones damaged."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import pickletools
import random
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

CANARY = "CANARY"  # the variable that names the folder which code that runs would make
METADATA = "torch.distributed.checkpoint.metadata"


def touch(*args: Any, **kwargs: Any) -> Any:
    """What no file may call."""
    os.makedirs(os.environ[CANARY], exist_ok=True)
    return Trap


class Trap:
    """Tells of whatever is done to it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        touch()
        return super().__new__(cls)

    __init__ = __setstate__ = append = extend = add = __setitem__ = touch  # type: ignore[assignment]


class Quiet(Trap):
    """Tells of what is done to it once it is there."""

    __new__ = object.__new__
    __init__ = object.__init__  # type: ignore[assignment]

    def __hash__(self) -> int:
        touch()
        return 0


# ------------------------------------------------------------------------------------------------- instructions


def text(value: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(value)) + value.encode()


def found(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def found_late(module: str, name: str) -> bytes:
    """By protocol 4, to which dots lead on."""
    return text(module) + text(name) + pickle.STACK_GLOBAL


def packed(*values: bytes) -> bytes:
    return pickle.MARK + b"".join(values) + pickle.TUPLE


def called(function: bytes, *arguments: bytes) -> bytes:
    return function + packed(*arguments) + pickle.REDUCE


def own(name: str) -> bytes:
    return found_late("tests.helpers.hostile", name)


def slots(**values: bytes) -> bytes:
    """A state that sets attributes."""
    return packed(pickle.NONE, pickle.EMPTY_DICT + b"".join(text(k) + v + pickle.SETITEM for k, v in values.items()))


def attribute(value: bytes, *names: str) -> bytes:
    for name in names:
        value = called(found("builtins", "getattr"), value, text(name))
    return value


def from_globals(function: bytes) -> bytes:
    """`os.mkdir`, which the function's module has imported."""
    return attribute(called(attribute(function, "__globals__", "get"), text("os")), "mkdir")


def whole(body: bytes, protocol: int) -> bytes:
    return pickle.PROTO + bytes([protocol]) + body + pickle.STOP


def in_extensions() -> None:
    """Let this process's registry of extensions have `touch`."""
    for code in (0x70, 0x7070, 0x707070):
        copyreg.add_extension("tests.helpers.hostile", f"touch_{code}", code)  # type: ignore[attr-defined]
        globals()[f"touch_{code}"] = touch


def routes(folder: str) -> dict[str, bytes]:
    """Instructions that leave one value, and make ``folder`` where Python's own unpickler follows them."""
    make, path = found("os", "mkdir"), text(folder)
    code = f"__import__('os').mkdir({folder!r})"
    metadata = found(METADATA, "Metadata")
    new, quiet = own("Trap"), own("Quiet") + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    inner = whole(called(make, path), 2)
    raw = pickle.BINBYTES + struct.pack("<I", len(inner)) + inner
    plain = {
        "global": called(make, path),
        "of another module": called(found("posix", "mkdir"), path),
        "eval": called(found("builtins", "eval"), text(code)),
        "exec": called(found("builtins", "exec"), text(code)),
        "Python 2's name": called(found("__builtin__", "eval"), text(code)),
        "a pickle inside": called(found("pickle", "loads"), raw),
        "a process": called(found("subprocess", "Popen"), packed(text("mkdir"), path)),
        "partial": called(called(found("functools", "partial"), make, path)),
        "getattr": called(attribute(found("tests.helpers.hostile", "os"), "mkdir"), path),
        "builtins of a function": called(
            called(attribute(metadata, "__init__", "__builtins__", "get"), text("eval")), text(code)
        ),
        "globals of a method": called(from_globals(attribute(found(METADATA, "MetadataIndex"), "__init__")), path),
        "globals of a layout": called(from_globals(found("torch.serialization", "_get_layout")), path),
        "stack global": called(found_late("os", "mkdir"), path),
        "inst": pickle.MARK + path + pickle.INST + b"os\nmkdir\n",
        "obj": pickle.MARK + make + path + pickle.OBJ,
        "newobj": new + pickle.EMPTY_TUPLE + pickle.NEWOBJ,
        "newobj with keywords": new + pickle.EMPTY_TUPLE + pickle.EMPTY_DICT + pickle.NEWOBJ_EX,
        "build": quiet + pickle.NONE + pickle.BUILD,
        "append": quiet + pickle.NONE + pickle.APPEND,
        "appends": quiet + pickle.MARK + pickle.NONE + pickle.APPENDS,
        "additems": quiet + pickle.MARK + pickle.NONE + pickle.ADDITEMS,
        "setitem": quiet + pickle.NONE + pickle.NONE + pickle.SETITEM,
        "setitems": quiet + pickle.MARK + pickle.NONE + pickle.NONE + pickle.SETITEMS,
        "key": pickle.EMPTY_DICT + quiet + pickle.NONE + pickle.SETITEM,
        "frozenset": pickle.MARK + quiet + pickle.FROZENSET,
        "class of an object": metadata + pickle.EMPTY_TUPLE + pickle.NEWOBJ
        + slots(__class__=own("Quiet")) + pickle.BUILD + pickle.NONE + pickle.BUILD,
        "method of a class": metadata + slots(__setstate__=own("touch")) + pickle.BUILD
        + pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.NONE + pickle.BUILD,
        "method of a key": found(METADATA, "MetadataIndex") + slots(__hash__=own("touch")) + pickle.BUILD + pickle.POP
        + pickle.EMPTY_DICT + found(METADATA, "MetadataIndex") + pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.NONE
        + pickle.SETITEM,
        "ext1": called(pickle.EXT1 + b"\x70"),
        "ext2": called(pickle.EXT2 + b"\x70\x70"),
        "ext4": called(pickle.EXT4 + b"\x70\x70\x70\x00"),
        "twice": make + pickle.DUP + packed(path) + pickle.REDUCE,
        "by the memo": make + pickle.BINPUT + b"\x63" + pickle.POP + called(pickle.BINGET + b"\x63", path),
    }  # fmt: skip
    # Modules and classes that a description of tensors may be in, and what they have imported.
    homes = (METADATA, "torch.distributed.checkpoint.filesystem", "torch.serialization", "torch", "pathlib")
    dotted = {f"dotted in {home}": called(found_late(home, "os.mkdir"), path) for home in homes}
    dotted["dotted to a class"] = called(
        attribute(called(found_late(METADATA, "MetadataIndex.__init__.__globals__.get"), text("os")), "mkdir"), path
    )
    dotted["dotted over builtins"] = called(
        called(found_late("torch.serialization", "_get_layout.__builtins__.get"), text("eval")), text(code)
    )
    command = packed(text("mkdir"), path)
    process = "torch.utils.collect_env.subprocess.Popen"  # a class, which these modules' own imports lead to
    dotted |= {f"process by {home}": called(found_late(home, process), command) for home in homes[:2]}
    imported = {
        f"imported by {home}": called(attribute(found_late(home, "os"), "mkdir"), path) for home in homes
    }  # found where it was not defined
    return plain | dotted | imported


NEEDS_A_READER = {
    "persistent": pickle.PERSID + b"tests.helpers.hostile\n",
    "persistent number": pickle.BININT1 + b"\x07" + pickle.BINPERSID,
    "persistent module": packed(text("module"), own("Trap"), text("a.py"), text("1")) + pickle.BINPERSID,
    "persistent storage": packed(text("storage"), own("Trap"), text("0"), text("cpu"), pickle.BININT1 + b"\x01")
    + pickle.BINPERSID,
    "buffer": b"\x97",
    "read-only buffer": b"\x97\x98",
}
"""Instructions that do nothing without a reader's help, which they may not get."""


# ------------------------------------------------------------------------------------------------------- where


def spliced(true: bytes, body: bytes, draw: random.Random) -> bytes:
    """``true`` with these instructions somewhere in it, whose value is dropped."""
    at = draw.choice([position for _, _, position in pickletools.genops(true)][2:])
    return true[:at] + body + pickle.POP + true[at:]


def rezipped(archive: bytes, change: Callable[[bytes], bytes], name: str = "data.pkl") -> bytes:
    """The archive with another content of one of its files."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            new.writestr(info.filename, change(content) if info.filename.endswith(name) else content)
    return out.getvalue()


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Cut short, with other bits, bytes, numbers and instructions, with parts lost or twice."""
    new = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at, length = draw.randrange(max(1, len(new))), draw.randrange(1, 40)
        match draw.randrange(7):
            case 0:
                new[at : at + 1] = bytes(byte ^ 1 << draw.randrange(8) for byte in new[at : at + 1])
            case 1:
                new[at : at + 1] = draw.randbytes(1)
            case 2:
                del new[at:]
            case 3:
                del new[at : at + length]
            case 4:
                other = draw.randrange(max(1, len(new)))
                new[at:at] = new[other : other + length]
            case 5:
                new[at : at + 4] = draw.choice((b"\xff" * 4, bytes(4), b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80"))
            case _:
                new[at:at] = draw.choice(pickletools.opcodes).code.encode("latin-1")
    return bytes(new)


def in_child(work: Callable[[], Any]) -> int:
    """The exit code of a process that does ``work``, and leaves all else alone."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def armed(pickled: bytes) -> bool:
    """Whether Python's own unpickler makes the canary's folder. What else it does stays in another process."""
    in_child(lambda: pickle.loads(pickled))
    canary, patience = Path(os.environ[CANARY]), 200
    while patience and not canary.exists():  # a process may need a moment
        time.sleep(0.01)
        patience -= 1
    if canary.exists():
        canary.rmdir()
    return patience > 0
