"""The batch: all ranks of a replica get the very same one, bit for bit, whatever it is made of.

Ranks of one replica would otherwise differ where loader workers or transforms draw random numbers, since those are
seeded by global rank.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.known_objects import Beginning, Known
from lightning_par.mesh.raw_bytes import raw_bytes
from lightning_par.private.fake_tensors import FakeTensor

_PLAIN = (Tensor, FakeTensor)  # fakes in dry runs alone
_WORDS = frozenset((int, float, bool, str, type(None)))
_STANDING = (
    "A value that stood for another stage's in a trial of the step has come into what is kept, as by a hook within a "
    "layer: it can't be sent to the other ranks. Let the layer return the value, or use TensorParallelStrategy."
)


@dataclass(frozen=True)
class _Form:
    """What a receiver must know of a tensor before its values arrive."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    begins: Beginning | None = None


def broadcast_batch(
    batch: Any, axis: Axis, device: torch.device, source: int = 0, detach: bool = False, purpose: str = "batch",
    known: Known | None = None, packed: Packed | None = None,
) -> Any:  # fmt: skip
    """``batch`` of index ``source`` along ``axis``, on every rank.

    Anything that pickles may be in it. Plain tensors on ``device`` travel as tensors, one message each, and keep their
    strides; everything else (structure, strings, arrays, tensors that live elsewhere, tensor subclasses) travels in one
    pickled header.

    Args:
        batch: any structure; what other ranks than the source pass is dropped.
        axis: the ranks that share the batch.
        device: where the process group's tensors live, e.g. the strategy's root device.
        source: the index along ``axis`` of the rank whose batch it is.
        detach: tensors arrive as leaves, on the source, too; those that were leaves as they were.
        purpose: what ledgers call the transfers.
        known: objects that don't travel, since all ranks have them.
        packed: the batch as `pack` made it on the source, if it has.

    Raises:
        TypeError: the batch holds something that can't be pickled; on every rank.
    """
    if axis.size == 1:
        return batch
    if axis.tells(source):
        packed = packed or pack(batch, device, detach, known)
        if not axis.dry and any(isinstance(x, FakeTensor) for x in packed.tensors):  # nothing would leave
            packed = Packed(_STANDING, [], True)
    else:
        packed = Packed(None, [], True)
    tensors, copied = packed.tensors, packed.copied
    header = axis.broadcast_object(packed.header, purpose, source)
    if isinstance(header, str):
        raise TypeError(header)
    structure, forms = header
    if not axis.tells(source):
        tensors = [torch.empty_strided(f.shape, f.stride, dtype=f.dtype, device=device) for f in forms]
    for tensor, form in zip(tensors, forms):
        if form.begins is not None:
            assert known is not None
            _send_rest(tensor, form.begins, known, axis, purpose, source)
        elif tensor.numel():
            axis.broadcast_(raw_bytes(tensor), purpose, source)
    # Where a tensor was copied to be sent, the source, too, goes on with the copy: strides can change a last bit.
    if not copied:
        return batch
    for tensor, form in zip(tensors, forms):
        if form.requires_grad and not tensor.requires_grad:
            tensor.requires_grad_()
    return Unpacker(io.BytesIO(structure), tensors, known).load()


def _send_rest(x: Tensor, begins: Beginning, known: Known, axis: Axis, purpose: str, source: int) -> None:
    """``x`` of the source, on every rank, where the others have its beginning."""
    rest = begins.rest(x).contiguous()
    if rest.numel():
        axis.broadcast_(raw_bytes(rest), purpose, source)
    if not axis.tells(source):
        begins.rest(x).copy_(rest)
        x.narrow(begins.dim, 0, begins.size).copy_(known.begins[begins.name])


class _Packer(pickle.Pickler):
    """Pickles a structure without the values of its plain tensors, which it collects."""

    def __init__(self, file: io.BytesIO, device: torch.device, detach: bool, known: Known | None = None) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.device = device
        self.detach = detach
        self.known = known or Known()
        self.tensors: list[Tensor] = []
        self._index: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | str | None:
        if type(obj) in _WORDS:  # most of what is asked for
            return None
        name = self.known.name_of(obj)
        if name is not None:
            return name
        if type(obj) not in _PLAIN or obj.device.type != self.device.type or not (obj.is_leaf or self.detach):
            return None
        if obj.layout is not torch.strided or obj.is_quantized or obj.is_nested:
            return None
        if id(obj) not in self._index:
            self._index[id(obj)] = len(self.tensors)
            self.tensors.append(_without_graph(obj) if self.detach else obj)
        return self._index[id(obj)]

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, RemovableHandle):  # it would come with a copy of the dict that it removes from
            raise TypeError("it is the handle of a hook")
        made = self.known.made_of(obj)
        if made is not None:
            return made
        if isinstance(obj, type) and _is_named_tuple(obj) and not _is_importable(obj):
            defaults = tuple(getattr(obj, "_field_defaults", {}).items())
            return _named_tuple, (obj.__module__, obj.__name__, vars(obj)["_fields"], defaults)
        return NotImplemented


def _without_graph(x: Tensor) -> Tensor:
    return x.detach().requires_grad_() if x.requires_grad and x.is_leaf else x.detach()


def _is_importable(kind: type) -> bool:
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind


def _is_named_tuple(kind: Any) -> bool:
    """Whether a class is nothing but a named tuple: one that says more, or has other bases, can't be made anew."""
    if kind.__bases__ != (tuple,) or not hasattr(kind, "_fields"):
        return False
    make: Any = namedtuple  # of which mypy wants the fields written down
    alike = make("alike", kind._fields, rename=True)  # held: a class that is let go loses what is in it
    own, plain = vars(kind), vars(alike)
    if own.keys() - plain.keys() - _OF_ANNOTATIONS - {*kind._fields}:
        return False
    functions = {name: x for name, x in plain.items() if isinstance(x, FunctionType)}
    return all(getattr(own.get(name), "__code__", None) is x.__code__ for name, x in functions.items())


_OF_ANNOTATIONS = frozenset("""
__annotations__ __annotate__ __annotate_func__ __annotations_cache__ __orig_bases__ __firstlineno__
__static_attributes__ __slotnames__
""".split())  # fmt: skip


@functools.cache
def _named_tuple(module: str, name: str, fields: tuple[str, ...], defaults: tuple[tuple[str, Any], ...]) -> type:
    """A class that a function made, and no module holds."""
    given = [value for _, value in defaults]
    make: Any = namedtuple  # of which mypy wants the fields written down
    return make(name, fields, rename=True, defaults=given, module=module)  # type: ignore[no-any-return]


class Unpacker(pickle.Unpickler):
    """Unpickles a structure around the objects that were left out of it, given in the order of their indices, and
    around those that are known by a name."""

    def __init__(self, file: io.BytesIO, left_out: Sequence[Any], known: Known | None = None) -> None:
        super().__init__(file)
        self._left_out = left_out
        self._known = known or Known()

    def persistent_load(self, index: int | str) -> Any:
        return self._known.named(index) if isinstance(index, str) else self._left_out[index]


class Packed(NamedTuple):
    """A batch that is about to travel.

    Attributes:
        header: its structure, and the forms of its tensors; or why it can't travel.
        tensors: to be sent after that.
        copied: whether one of them is a copy.
    """

    header: tuple[bytes, list[_Form]] | str | None
    tensors: list[Tensor]
    copied: bool


def pack(batch: Any, device: torch.device, detach: bool, known: Known | None = None) -> Packed:
    """A batch, as `broadcast_batch` sends it."""
    file, known = io.BytesIO(), known or Known()
    packer = _Packer(file, device, detach, known)
    try:
        packer.dump(batch)
    except Exception as error:  # picklers raise whatever the objects' own methods raise
        reason = f"A batch of type {type(batch).__name__} can't be sent to the ranks of its replica: {error}"
        return Packed(reason, [], True)
    tensors = [_dense(tensor) for tensor in packer.tensors]
    forms = [
        _Form(tuple(t.shape), t.stride(), t.dtype, o.requires_grad, known.beginning(t))
        for t, o in zip(tensors, packer.tensors)
    ]
    copied = detach or any(sent is not own for sent, own in zip(tensors, packer.tensors))
    return Packed((file.getvalue(), forms), tensors, copied)


def _dense(tensor: Tensor) -> Tensor:
    """``tensor`` itself if its elements fill one piece of memory, in whatever order of dims, else a contiguous copy."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    if tensor.is_conj() or tensor.is_neg() or (tensor.numel() and extent != tensor.numel()) or 0 in tensor.stride():
        return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return tensor


def refusal(value: Any, device: torch.device, known: Known | None = None) -> str | None:
    """Why ``value`` can't travel; None if it can. What can be pickled may be such that it can't be made again."""
    file = io.BytesIO()
    packer = _Packer(file, device, True, known)
    try:
        packer.dump(value)
        file.seek(0)
        Unpacker(file, packer.tensors, known).load()
    except Exception as error:  # picklers raise whatever the objects' own methods raise
        return str(error)
    return None
