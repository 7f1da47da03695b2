"""Functions that read a weight between two steps: from its memory, as a view of it, or of values that are sent."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_par.absent.elsewhere import Elsewhere, is_elsewhere
from lightning_par.absent.geometry import Geometry
from lightning_par.absent.origin import ElsewhereError, Origin
from lightning_par.mesh.broadcast import kind_of, send_to_all
from lightning_par.mesh.handshake import refuse_alone
from lightning_par.mesh.raw_bytes import raw_bytes
from lightning_par.pipeline.between_steps.gradients.remote_gradient import wholes
from lightning_par.pipeline.between_steps.graphs.unlinked import unlinked
from lightning_par.pipeline.between_steps.graphs.weight_graphs import MADE_OF, has_graph, linked
from lightning_par.pipeline.between_steps.weights.remote_weight import as_it_is, copied, plain
from lightning_par.private.modes import DisableTorchFunctionSubclass
from lightning_par.private.storage import memory_of
from lightning_par.python_state.nested_tensors import map_tensors, tensors_in
from lightning_par.sharded.rules.alias import Alias, read_only
from lightning_par.sharded.rules.raw_memory import VIEWS, in_memory
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor, full

if TYPE_CHECKING:
    from lightning_par.pipeline.between_steps.remote_reads import JointGradients


def alone(owner: JointGradients, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Once memory was asked for, each rank reads on its own: others may not come. `NotImplemented` where it can't."""
    with DisableTorchFunctionSubclass():
        result = in_memory(func, args, kwargs)
    tensors = tensors_in((args, kwargs))
    if result is not NotImplemented or any(is_elsewhere(x) for x in tensors):
        return result
    if not all(_is_read_alone(owner, x) for x in tensors if owner.is_weight(x)):
        return NotImplemented
    view = viewed(owner, func, name, args, kwargs)
    if view is not None:
        for x in tensors_in(view):
            x._read_alone = True  # type: ignore[attr-defined]
        return view
    result = as_it_is(func, args, kwargs)
    graphs = [x for x in tensors if x.requires_grad] if torch.is_grad_enabled() else []
    return _without_graphs(graphs, result, func, args, kwargs) if graphs else result


def _is_read_alone(owner: JointGradients, x: Tensor) -> bool:
    """Whether ranks that have nothing of ``x`` are brought its values; see `in_memory`."""
    if x.requires_grad and torch.is_grad_enabled():
        return False
    if vars(x).get("_read_alone"):
        return True
    return RunState.current.knows(x) if owner.name_of(x) in owner.in_parts else owner.is_itself(x)


def viewed(owner: JointGradients, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """A view of a weight, for which no rank needs values; None where ``func`` makes none, on any rank."""
    if name not in VIEWS or len(tensors_in((args, kwargs))) > 1 or not owner.is_weight(args[0]):
        return None
    base: Any = args[0]
    like = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    views = func(like, *args[1:], **kwargs)
    if {memory_of(x) for x in tensors_in(views)} != {memory_of(like)}:
        return None
    if not is_elsewhere(base):
        return map_tensors(lambda x: owner.show(x, owner.name_of(base), copied(base)), as_it_is(func, args, kwargs))
    return map_tensors(lambda x: _away(owner, x, base, _lies(x) == _lies(like)), views)


def _lies(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.storage_offset()  # fake tensors know no `is_set_to`


def _away(owner: JointGradients, like: Tensor, base: Any, is_whole: bool) -> Any:
    """What stands here for a view of the kind of ``like`` of a weight that is elsewhere."""
    view = Elsewhere(like.shape, like.dtype, base.device, base.origin, stride=like.stride())
    view.is_whole = is_whole and base.is_whole
    return owner.show(view, owner.name_of(base), copied(base))


def read(owner: JointGradients, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """What ``func`` makes of the values; where that is a view, it is one of the weight itself."""
    args, kwargs = wholes((args, kwargs))  # of gradients: the ranks without the weight would not ask for them
    links = any(has_graph(owner, x) for x in tensors_in((args, kwargs)))
    brought: dict[int, Any] = {}  # weights and what was sent of them, by its memory

    def whole(x: Tensor) -> Tensor:
        if not owner.is_weight(x):
            return x
        values = brought_to_all(owner, name, x)
        brought[memory_of(values)] = x, values
        return values

    stays = None if links else _stays_in_place(owner, func, name, args, kwargs)
    if stays is not None:
        return stays
    given = map_tensors(whole, (args, kwargs))
    result = func(*given[0], **given[1])
    if isinstance(result, np.ndarray):
        read_only(result)
    strided = [x for x in tensors_in(result) if x.layout == torch.strided]
    memories = {memory_of(x) for x in strided}
    if len(memories) != 1 or not memories <= brought.keys():  # no view, or views of several
        return result
    base, values = brought[memories.pop()]
    of = owner.name_of(base)
    if not is_elsewhere(base):
        return map_tensors(lambda x: owner.show(x, of, copied(base)), as_it_is(func, args, kwargs))

    def away(x: Tensor) -> Tensor:
        return base if x is values else _away(owner, x, base, False)

    return map_tensors(away, result)


def brought_to_all(owner: JointGradients, name: str, x: Tensor) -> Tensor:
    """The values of ``x`` for the function ``name``, in the graph of all ranks if it has one. All must call it."""
    values = sent(owner, name, x)
    return linked(owner, x, values) if has_graph(owner, x) else values


def _stays_in_place(owner: JointGradients, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """What ``func`` makes of weights entry by entry is where they are, in parts if they are, as an average is: no rank
    needs values. None where it needs them, or can have them and may show them to the user."""
    weights = [x for x in tensors_in((args, kwargs)) if owner.is_weight(x)]
    names = [owner.name_of(x) for x in weights]
    home = _home(owner, names)
    if home is None:
        return None
    # Tried with what stands for them on ranks that have nothing, so that those which have parts say the same.
    of = next(of for of in names if owner.holders_of(of) == home)
    standing = {id(x): _standing(owner, x, of) for x in weights}
    with torch.no_grad():
        try:
            tried = as_it_is(func, *map_tensors(lambda x: standing.get(id(x), x), (args, kwargs)))
        except ElsewhereError:
            return None
        away = [x for x, other in zip(weights, names) if owner.holders_of(other) != home]
        given = {id(x): sent(owner, name, x) for x in away}
        result = as_it_is(func, *map_tensors(lambda x: given.get(id(x), x), (args, kwargs)))
    memories = {id(standing[id(x)].origin): copied(x) for x in weights}
    copies = [memories.get(id(x.origin), object()) for x in tensors_in(tried) if isinstance(x, Elsewhere)]
    for x, memory in zip(tensors_in(result), copies):
        owner.show(x, of, memory)
    return result


def _home(owner: JointGradients, names: Sequence[str]) -> tuple[int, ...] | None:
    """The ranks on which what is made of weights of these ``names`` may stay; None where all are to have it."""
    holders = {*map(owner.holders_of, names)}
    if len(holders) == 1 and (owner.updates or {*names} <= owner.in_parts.keys()):
        return holders.pop()
    return owner.needed if owner.needed in holders else None


def _standing(owner: JointGradients, x: Tensor, of: str) -> Elsewhere:
    """For ``x``, on ranks that hold the weight ``of``."""
    return Elsewhere(x.shape, x.dtype, x.device, Origin(of, owner.holders_of(of), owner.axis), stride=x.stride())


def without_graph(of: Iterable[Tensor], x: Tensor) -> Tensor:
    """``x``, which all ranks have, made ``of`` others: a backward that comes to it raises."""
    return unlinked(x, MADE_OF, of)


def _without_graphs(of: Iterable[Tensor], result: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """The ``result`` of ``func``, in which what has a gradient on one device is `without_graph`.

    What is made like a weight, as by `torch.ones_like`, has none.
    """
    if not any(x.is_floating_point() or x.is_complex() for x in tensors_in(result)):
        return result

    def like(x: Tensor) -> Tensor:
        with DisableTorchFunctionSubclass():
            meta = torch.empty(x.shape, dtype=x.dtype, device="meta")
        return meta.requires_grad_(x.requires_grad)

    linked = [True] * len(tensors_in(result))
    with contextlib.suppress(Exception):  # what goes by values can't be told
        given = map_tensors(like, (args, kwargs))
        linked = [x.requires_grad for x in tensors_in(func(*given[0], **given[1]))]
    links = iter(linked)
    return map_tensors(lambda x: without_graph(of, x) if next(links, True) else x, result)


def sent(owner: JointGradients, name: str, x: Any) -> Tensor:
    """The values of ``x`` for the function ``name``, in memory of their own. All ranks must call it."""
    of = owner.name_of(x)
    owner.meet(f"called `{name}` on the weight {of!r} between two steps")
    here = values_here(x) if owner.sources[of] == owner.axis.rank else None
    values = send_to_all(here, kind_of(x), owner.sources[of], owner.axis, "weights")
    if owner.axis.dry and owner.sources[of] != owner.axis.rank:
        known = owner.buffers_alone.value(x)
        values = values if known is None else known.clone()
    return _laid_as(x, values.to(x.device, copy=here is not None))


def values_here(x: Any) -> Tensor:
    """The values of a weight that is here, or in parts on the ranks of this one's stage: all of these call it."""
    if not isinstance(x, ShardedTensor | Alias):
        return plain(x)  # type: ignore[no-any-return]
    with RunState.current.lender.unseen(), torch.no_grad():
        return full(x).clone()


def _laid_as(x: Any, values: Tensor) -> Tensor:
    """``values`` in memory where they lie as those of ``x`` do: what is a view of it, and what a copy, goes by that."""
    stride = x.stride()
    if values.stride() == stride or not Geometry(tuple(x.shape), stride, 0, x.dtype).apart:
        return values
    once = values[tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)]
    return torch.empty_strided(once.shape, stride, dtype=x.dtype, device=x.device).copy_(once).expand(x.shape)


def equal(owner: JointGradients, a: Tensor, b: Tensor) -> bool:
    """`torch.equal`, by hashes of what is compared."""
    if a.shape != b.shape or a is b:
        return a.shape == b.shape
    doing = f"compared weights of shape {tuple(a.shape)} between two steps"
    refuse_alone(owner.axis, doing)
    owner.meet(doing)
    told = owner.axis.all_gather_object([_hash(owner, x) for x in (a, b)], "weights")
    one, other = (next((told[r][i] for r in range(len(told)) if told[r][i] is not None), None) for i in (0, 1))
    return one is not None and one == other


def _hash(owner: JointGradients, x: Tensor) -> bytes | None:
    """Equal for equal values; None where they aren't known, and where one is no number."""
    if is_elsewhere(x):
        return None
    values = values_here(x).cpu() + 0  # of -0.0, too
    if bool(torch.isnan(values).any()):
        return None
    return hashlib.blake2b(raw_bytes(values.contiguous()).numpy().tobytes()).digest()
