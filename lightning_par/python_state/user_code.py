"""Whose an object or a piece of code is: the user's, whose state counts, or a library's."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_par.trial.memo import Memo

# Libraries whose code keeps nothing from step to step that a step goes by, and whose insides are many.
_LIBRARIES = frozenset(
    """
torch torchvision torchaudio torchmetrics lightning pytorch_lightning lightning_fabric lightning_utilities lightning_par
numpy scipy einops einx transformers tokenizers
""".split()
)
# Parts of the standard library whose objects are plain containers of what a user puts in.
_CONTAINERS = frozenset("collections types argparse queue functools itertools _thread".split())
# Objects of libraries whose attributes move in a step, and what derives from them, wherever it is written.
_WATCHED = ("torch.distributions", "torch.optim", "torch.nn", "torch.cuda.amp.grad_scaler", "torch.amp.grad_scaler",
            "torch.autograd", "transformers.cache_utils", "transformers.modeling_outputs",
            "transformers.utils.generic")  # fmt: skip
# Whose code runs the user's, and is run by it.
_AROUND = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "lightning_par")
_STANDARD = frozenset(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))


@functools.cache
def is_library(module: str | None) -> bool:
    """Whether the Python module of this name is of a library whose state is its own."""
    top = (module or "").partition(".")[0]
    return top in _LIBRARIES or top in sys.stdlib_module_names


@functools.cache
def is_users_code(module: str | None, packages: frozenset[str]) -> bool:
    """Whether what a function or class of this Python module keeps counts.

    Args:
        module: its name.
        packages: installed packages, by their first names, that count as the user's: the model's own.
    """
    if module is None or is_library(module):
        return False
    top = module.partition(".")[0]
    return top in packages or not _is_installed(top)


def _is_installed(top: str) -> bool:
    """Whether the package or file of this name was installed, in whatever folder Python looks for such."""
    module = sys.modules.get(top)
    file = getattr(module, "__file__", None)
    places = [*getattr(module, "__path__", ())] or ([] if file is None else [file])
    return bool(places) and all(_is_of_installers(Path(place)) for place in places)


def _is_of_installers(place: Path) -> bool:
    """Whether a package or file lies in a folder that `site` has for installed ones, of this environment, of those
    below it and of the user; or who installed it wrote that down beside it (``pip install --target``)."""
    folder = place.parent
    named = folder.name in ("site-packages", "dist-packages") or folder in _STANDARD
    return named or place.name in _recorded(folder)


@functools.cache
def _recorded(folder: Path) -> frozenset[str]:
    """What installers put into a folder, as they note there (the "RECORD" of PyPA's specifications)."""
    found = (record for record in folder.glob("*.dist-info/RECORD") if os.access(record, os.R_OK))
    records = [record.read_text(errors="replace") for record in found]
    return frozenset(line.partition(",")[0].partition("/")[0] for text in records for line in text.splitlines())


def has_attributes(value: Any) -> bool:
    """Whether the attributes of ``value``, an object of a plain class, are its state."""
    kind = type(value)
    if isinstance(value, (type, BaseException, Tensor, nn.Module, types.ModuleType, types.FunctionType)):
        return False
    if callable(getattr(kind, "__get__", None)):
        return False
    module = kind.__module__
    if is_library(module):
        watched = any(base.__module__.startswith(_WATCHED) for base in kind.__mro__)
        return module.partition(".")[0] in _CONTAINERS or watched
    return hasattr(value, "__dict__") or bool(slots_of(kind))


def slots_of(kind: type) -> dict[str, types.MemberDescriptorType]:
    """The ``__slots__`` of a class and its bases, by name."""
    return _slots[kind]


def _find_slots(kind: type) -> dict[str, types.MemberDescriptorType]:
    classes = (base for base in reversed(kind.__mro__) if "__slots__" in vars(base))  # those of C have none to write to
    members = ((name, x) for base in classes for name, x in vars(base).items())
    return {n: x for n, x in members if isinstance(x, types.MemberDescriptorType) and n[:2] != "__"}


_slots = Memo(_find_slots)


def packages_of(module: nn.Module) -> frozenset[str]:
    """The packages whose classes the model is made of."""
    names = {base.__module__ for m in module.modules() for base in type(m).__mro__}
    return frozenset(name.partition(".")[0] for name in names if not is_library(name))


def line_of(error: BaseException) -> str | None:
    """The last line of an error's way that is not torch's, Lightning's or this package's, as ``"train.py:12"``; None
    where all are.

    Example::

        raise ValueError(f"The module can't be built: {error} at {line_of(error)}")
    """
    frames = [(frame, line) for frame, line in _way(error) if not _is_around_users_code(frame)]
    return f"{frames[-1][0].f_code.co_filename}:{frames[-1][1]}" if frames else None


def told_with_line(error: BaseException) -> str:
    """An error of the user's code in words, with its `line_of`: ``"KeyError: 'x' at train.py:12"``."""
    line = line_of(error)
    return f"{type(error).__name__}: {error}" + ("" if line is None else f" at {line}")


def last_of(error: BaseException, wanted: Callable[[types.FrameType], bool]) -> types.FrameType | None:
    """The last frame of an error's way that is ``wanted``, if no code of the user's comes behind it."""
    found = None
    for frame, _ in _way(error):
        if wanted(frame):
            found = frame
        elif not _is_around_users_code(frame):
            found = None
    return found


def _is_around_users_code(frame: types.FrameType) -> bool:
    """Whether what runs there is torch, Lightning or this package."""
    return frame.f_globals.get("__name__", "").partition(".")[0] in _AROUND


def _way(error: BaseException) -> Iterator[tuple[types.FrameType, int]]:
    """The frames that an error came through, the outermost first, with their lines."""
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def is_called_by_libraries(kind: type, name: str) -> bool:
    """Whether a method takes the place of one that a library knows, other than those that Lightning calls by hand."""
    return any(
        is_library(base.__module__)
        and not base.__module__.startswith(("lightning", "pytorch_lightning", "torch.nn.modules.module", "builtins"))
        and name in vars(base)
        for base in kind.__mro__
    )
