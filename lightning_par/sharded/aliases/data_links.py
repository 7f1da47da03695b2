"""A sharded tensor whose ``.data`` was set to another tensor, with which one device has it share memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_par.mesh import collectives
from lightning_par.private.storage import storage_of, tensor_in
from lightning_par.sharded.aliases.copies import note, same
from lightning_par.sharded.aliases.frames import axes_of, form_of, frames_of, gathered, innermost, is_followed


def link(x: Any, value: Any) -> None:
    """The sharded ``x`` lies in memory of its own, where on one device it shares that of ``value``, by ``x.data``."""
    if hasattr(value, "positions"):
        make = partial(_cut_of_parts, frames_of(x))
        note("data", value.twin(), x, make, _put_parts, axes_of(value), apart=True, talks=axes_of(x))
        return
    plain = innermost(value)
    storage = storage_of(plain)
    if storage is None or not is_followed(plain, axes_of(x)):
        return
    # Memory of numpy's, say, is there though no tensor holds it: this one does then.
    source = partial(_lying, weakref.ref(storage), form_of(plain)) if storage.resizable() else partial(same, plain)
    note("data", source, x, partial(_cut, frames_of(x)), _put_full, apart=True, loose=True, talks=axes_of(x))


def _lying(storage: weakref.ref[torch.UntypedStorage], form: tuple[Any, ...]) -> Tensor | None:
    """The tensor that lies there, if anybody else still has it."""
    memory = storage()
    return None if memory is None else tensor_in(memory, *form)


def _cut(frames: Sequence[Any], plain: Tensor) -> Tensor:
    for _, *how in frames:
        plain = collectives.scatter(plain, *how)
    return plain


def _cut_of_parts(frames: Sequence[Any], value: Any) -> Tensor:
    return _cut(frames, gathered(value))


def _put_parts(value: Any, other: Any) -> None:
    """All ranks must call it, also where ``value`` is gone."""
    whole = gathered(other)
    if value is not None:
        innermost(value).copy_(_cut(frames_of(value), whole))


def _put_full(plain: Tensor | None, part: Any) -> None:
    whole = gathered(part)
    if plain is not None:
        plain.copy_(whole)
