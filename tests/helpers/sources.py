"""Sources of ours as trees, for tests of how they are written."""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def parsing() -> Iterator[None]:
    """While a million nodes are made, looking them through for garbage again and again takes longer than to parse."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@functools.cache
def trees_in(folder: Path) -> dict[Path, ast.Module]:
    """The tree of each file below ``folder``; nobody changes it."""
    with parsing():
        return {path: ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}
