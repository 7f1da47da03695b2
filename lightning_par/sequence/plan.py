"""The sequence plan: which dim of the batch is the sequence, how it lies on the ranks, what attention has to move.

Pure functions of a recording. Everything here is about speed alone: a tensor that is not known to have a sequence
stays whole, and a wrong dim is split right, if to no use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from lightning_par.sequence.scheme import Asked, Scheme, Shapes, choose, ulysses_size
from lightning_par.sharded.tensor import ShardedTensor, moves
from lightning_par.trial.recording import Event, Recording

Shape = tuple[int, ...]
SequenceDim = int | Mapping[str, int] | None

_TRIED = 3  # dims of a tensor that may become the sequence; each costs a trial run


@dataclass(frozen=True)
class AttentionUse:
    """Calls of attention that are alike."""

    calls: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    batch: int
    features: int  # of a head
    itemsize: int
    causal: bool
    masked: bool
    place: str = ""  # the line of the first of them

    @property
    def shapes(self) -> Shapes:
        return Shapes(self.batch, self.heads, self.kv_heads, self.queries, self.keys, self.features)

    def scheme(self, asked: Asked, ranks: int) -> Scheme:
        degree = ulysses_size(asked, ranks)
        try:
            return choose(asked, ranks, self.shapes, (degree,) if 1 < degree < ranks else ())
        except ValueError as error:
            raise ValueError(f"Attention at {self.place}: {error}") from None


@dataclass(frozen=True)
class SequencePlan:
    """How a step's sequences are split.

    Attributes:
        ranks: along the sequence axis.
        shapes: of the tensors in the batch, in order.
        dims: of each of them the dim that is the sequence, or None.
        names: of each of them, as the user finds it in the batch.
        zigzag: whether causal attention asks for zigzag order.
        attention: the calls of attention, grouped.
        gathers: functions that gather, with their lines and how often a step calls them.
        stopped: why the trial run ended early, or None.
    """

    ranks: int
    shapes: tuple[Shape, ...]
    dims: tuple[int | None, ...]
    names: tuple[str, ...]
    zigzag: bool = False
    attention: tuple[AttentionUse, ...] = ()
    gathers: tuple[tuple[str, str, int], ...] = field(default=())
    stopped: str | None = None

    def dim_of(self, number: int, x: Tensor) -> int | None:
        """The sequence dim of tensor ``number`` of a batch, which may be another loader's."""
        if number < len(self.dims) and len(self.shapes[number]) == x.ndim:
            return self.dims[number]
        return next((dim for shape, dim in zip(self.shapes, self.dims) if len(shape) == x.ndim), None)


def check_sequence_dim(wish: object) -> None:
    """Raises TypeError where ``wish`` is neither an int nor a dict of names to ints."""
    if wish is None or (isinstance(wish, int) and not isinstance(wish, bool)):
        return
    if not isinstance(wish, Mapping) or not all(isinstance(dim, int) for dim in wish.values()):
        raise TypeError(
            f"sequence_dim must be an int, or a dict of the batch's keys to ints, got {wish!r}. Write e.g. "
            'sequence_dim=1 or sequence_dim={"input_ids": 1, "labels": 1}.'
        )


def make_plan(
    recording: Recording, names: Sequence[str], ranks: int, wish: SequenceDim, asked: Asked = "auto",
    islands: bool = False,
) -> SequencePlan:  # fmt: skip
    """The plan for what ``recording`` shows.

    Args:
        recording: one run of the step on one device.
        names: of the tensors in the batch, in order.
        ranks: along the sequence axis.
        wish: the user's ``sequence_dim``.
        asked: the user's ``attention``.
        islands: whether ranks have all tokens where they attend, as of a tensor axis: then tokens follow one another.

    Raises:
        ValueError: no tensor of the batch has the dim that the user names, or attention can't be computed as asked.
    """
    shapes = tuple(tuple(x.shape) for x in recording.batch)
    found = sequence_lengths(recording)
    dims = _wished(shapes, names, wish) if wish is not None else tuple(_guess(x, found, ranks) for x in recording.batch)
    uses = attention_uses(recording)
    schemes = [use.scheme(asked, ranks) for use in uses]  # of all of them: one may be impossible
    zigzag = not islands and any(use.causal and scheme.ring > 1 for use, scheme in zip(uses, schemes))
    return SequencePlan(ranks, shapes, dims, tuple(names), zigzag, uses, stopped=recording.stopped)


def first_plan(batch: Sequence[Tensor], names: Sequence[str], ranks: int, wish: SequenceDim) -> SequencePlan:
    """A plan before anything is recorded, right for most steps: one that runs by it may show that it was.

    Raises:
        ValueError: see `make_plan`.
    """
    shapes = tuple(tuple(x.shape) for x in batch)
    if wish is not None:
        return SequencePlan(ranks, shapes, _wished(shapes, names, wish), tuple(names))
    lengths = {x.shape[1] for x in batch if x.ndim > 2 or (x.ndim == 2 and not x.is_floating_point())}
    dims = tuple(_guess(x, lengths, ranks) if x.ndim > 1 and lengths else None for x in batch)
    return SequencePlan(ranks, shapes, dims, tuple(names))


def sequence_lengths(recording: Recording) -> set[int]:
    """The lengths that attention runs over, by its function or by hand; else those that embeddings look up."""
    found: set[int] = set()
    for event in recording.events:
        if event.name == "scaled_dot_product_attention":
            query, key = _given(event, 0, "query"), _given(event, 1, "key")
            found |= {query.shape[-2], key.shape[-2]}
        elif event.name == "softmax" and event.inputs and event.inputs[0].ndim > 2:
            found |= set(event.inputs[0].shape[-2:])
    if not found:
        looked_up = [_given(e, 0, "input") for e in recording.events if e.name == "embedding"]
        found = {x.shape[-1] for x in looked_up if isinstance(x, Tensor) and x.ndim > 1}
    return found


def other_plans(recording: Recording, plan: SequencePlan) -> Iterator[SequencePlan]:
    """With a dim for one more tensor, whose sequence is made within the model, as of an image's rows or of audio.

    Example::

        assert [p.dims for p in other_plans(recording_of_images, plan)] == [(2, None), (3, None)]
    """
    for number, (x, found) in enumerate(zip(recording.batch, plan.dims, strict=True)):
        if found is not None or x.ndim < 3 or not x.is_floating_point():
            continue
        long = [dim for dim in range(1, x.ndim) if x.shape[dim] >= 2 * plan.ranks]
        for dim in sorted(long, key=lambda dim: -x.shape[dim])[:_TRIED]:
            yield replace(plan, dims=(*plan.dims[:number], dim, *plan.dims[number + 1 :]))


def attends_in_parts(split: Recording) -> tuple[int, int]:
    """How many calls of attention each rank makes for its own tokens alone, and how many there are.

    Args:
        split: one run of the step as if the batch were split.
    """
    asking = [x for event in split.events if (x := asks(event)) is not None]
    return sum(map(asks_in_parts, asking)), len(asking)


def asks(event: Event) -> Any:
    """Whose tokens a call of attention is asked for; None of another event."""
    if event.name == "scaled_dot_product_attention":
        return _given(event, 0, "query")
    return event.inputs[0] if event.name == "softmax" and event.inputs and event.inputs[0].ndim > 2 else None


def asks_in_parts(x: Any) -> bool:
    """Whether a rank has its own tokens alone of ``x``, by which attention is asked."""
    return isinstance(x, ShardedTensor) and moves(x) and x.sharded_dim == x.ndim - 2


def attention_uses(recording: Recording) -> tuple[AttentionUse, ...]:
    """The calls of `scaled_dot_product_attention`, those alike together."""
    counted: Counter[tuple[Any, ...]] = Counter()
    places: dict[tuple[Any, ...], str] = {}
    for event in recording.events:
        if event.name == "scaled_dot_product_attention":
            query, key = _given(event, 0, "query"), _given(event, 1, "key")
            heads, kv_heads = (x.shape[-3] if x.ndim > 2 else 1 for x in (query, key))
            batch = query.numel() // max(1, heads * query.shape[-2] * query.shape[-1])
            masked = _given(event, 3, "attn_mask") is not None
            causal = bool(_given(event, 5, "is_causal"))
            sizes = (heads, kv_heads, query.shape[-2], key.shape[-2], batch, query.shape[-1], query.element_size())
            form = (*sizes, causal, masked)
            counted[form] += 1
            places.setdefault(form, event.place)
    return tuple(AttentionUse(count, *(*form, places[form])) for form, count in counted.items())


def _given(event: Event, place: int, name: str) -> Any:
    return event.args[place] if len(event.args) > place else event.kwargs.get(name)


def _guess(x: Tensor, lengths: set[int], ranks: int) -> int | None:
    """Dim 1 where it is as long as a sequence, or a token longer or shorter, as shifted labels are; else another."""
    near = {length + more for length in lengths for more in (-1, 0, 1)}
    order = [1, 0, *range(2, x.ndim)]
    long = [d for d in order if d < x.ndim and x.shape[d] >= 2 * ranks]
    fitting = [d for d in long if x.shape[d] in (near if d else lengths)]  # dim 0 is mostly the samples
    if fitting:
        return fitting[0]
    if not lengths and x.ndim == 3 and x.shape[1] >= 2 * ranks:  # samples of features over time
        return 1
    return None


def _wished(shapes: tuple[Shape, ...], names: Sequence[str], wish: SequenceDim) -> tuple[int | None, ...]:
    if isinstance(wish, int):
        dims = tuple(wish % len(s) if -len(s) <= wish < len(s) and len(s) > 1 else None for s in shapes)
        if all(dim is None for dim in dims):
            raise ValueError(
                f"sequence_dim={wish}, but no tensor of the batch has such a dim: {_listed(names, shapes)}."
            )
        return dims
    assert wish is not None
    for name, dim in wish.items():
        shape = next((s for n, s in zip(names, shapes) if n == name), None)
        if shape is None:
            raise ValueError(f"sequence_dim names {name!r}, which is not in the batch: {_listed(names, shapes)}.")
        if not -len(shape) <= dim < len(shape):
            raise ValueError(f"sequence_dim[{name!r}] = {dim}, but {name!r} has the shape {shape}.")
    return tuple(wish[n] % len(s) if n in wish else None for n, s in zip(names, shapes))


def _listed(names: Sequence[str], shapes: tuple[Shape, ...]) -> str:
    return ", ".join(f"{name or 'the batch'} {shape}" for name, shape in zip(names, shapes)) or "it has no tensors"
