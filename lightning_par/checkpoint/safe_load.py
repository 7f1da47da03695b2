"""What `torch.load` reads runs no code unless the user says so, and what it may not hold is said by name."""

from __future__ import annotations

import pathlib
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_PATHS = [
    (kind, f"{module}.{kind.__name__}")
    for kind in (type(pathlib.Path()), pathlib.PurePosixPath, pathlib.PureWindowsPath)
    for module in ("pathlib", "pathlib._local")  # the name in Python 3.13
]
"""Harmless whatever they are given, and common in hyperparameters."""


@contextmanager
def reads(
    path: str, weights_only: bool | None, file: Any = None, failure: type[Exception] = RuntimeError
) -> Iterator[None]:
    """Inside, `torch.load` reads the checkpoint at ``path``, or a file of it; paths are among what may be in it.

    Args:
        path: the user's name of it.
        weights_only: as for `torch.load`, which gets it, too.
        file: what is read, to be looked through for what it may not hold.
        failure: what to raise where it is cut short or garbled.

    Raises:
        pickle.UnpicklingError: it holds other things than ``weights_only`` allows; the message names them.
        RuntimeError: or ``failure``: it is cut short or garbled.

    Example::

        with reads("last.ckpt", None, "last.ckpt"):
            checkpoint = torch.load("last.ckpt")
    """
    known = torch.serialization.get_safe_globals()  # the user's own stay
    with torch.serialization.safe_globals([x for x in _PATHS if x not in known]):
        try:
            yield
        except pickle.UnpicklingError as error:
            raise pickle.UnpicklingError(_refusal(path, file, str(error))) from None
        except (OSError, MemoryError, ImportError):
            raise
        except Exception as error:
            if weights_only is False and type(error) not in (EOFError, RuntimeError):
                raise  # of the user's own classes
            raise failure(f"The checkpoint {path} can't be read: {type(error).__name__}: {error}") from error


def _refusal(path: str, file: Any, message: str) -> str:
    names = re.findall(r"GLOBAL (\S+) (?:was not an allowed|whose module)", message)
    if not names:
        return f"The checkpoint {path} can't be read: {without_advice(message)}"
    return (
        f"Weights only load failed. The checkpoint {path} holds {', '.join(_not_allowed(file) or names)}, and reading "
        "what is no plain data can run code. If you trust where it comes from, say so by "
        "`trainer.fit(..., ckpt_path=..., weights_only=False)`, or in the same way in validate, test and predict; or "
        "allow these alone by `torch.serialization.add_safe_globals`."
    )


def without_advice(message: str) -> str:
    """What torch says of a file that it refuses, without how to run the code in it."""
    said = message.partition("WeightsUnpickler error:")[2] or message
    return re.split(r"Please use|\n\nCheck the documentation", said)[0].strip()


def _not_allowed(file: Any) -> list[str]:
    """All names that torch would refuse; it stops at the first."""
    try:
        if hasattr(file, "seek"):
            file.seek(0)
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:  # not every form of file can be looked through
        return []
