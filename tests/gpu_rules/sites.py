"""Where in the project, or else in the user's code, something was asked for."""

from __future__ import annotations

import os
import sys
from types import FrameType

_OWN = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = "lightning_par" + os.sep


def site(depth: int = 3) -> str:
    """The innermost lines of the package that lead here; where there are none, the user's line."""
    ours: list[str] = []
    other = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(ours) < depth:
        file = frame.f_code.co_filename
        if _in_package(file):
            ours.append(f"{file.rpartition(_PACKAGE)[2]}:{frame.f_lineno}")
        elif not other and not _is_torch(file) and not file.startswith(_OWN):
            other = f"[{os.sep.join(file.split(os.sep)[-2:])}:{frame.f_lineno}]"
        frame = frame.f_back
    return " < ".join(ours) or other


def purpose() -> str | None:
    """What the package says that an operation is for: each verb of a mesh axis has an argument for it."""
    found = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _in_package(frame.f_code.co_filename) and isinstance(frame.f_locals.get("purpose"), str):
            found = frame.f_locals["purpose"]
        elif found is not None:
            break
        frame = frame.f_back
    return found


def _in_package(file: str) -> bool:
    return os.sep + _PACKAGE in file and "site-packages" not in file.rpartition(_PACKAGE)[2]


def _is_torch(file: str) -> bool:
    return f"{os.sep}torch{os.sep}" in file or file.startswith("<")
