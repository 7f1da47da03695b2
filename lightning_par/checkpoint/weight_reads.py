"""Weights in parts whose memory user code asks for between two steps, as `torch.save` and safetensors do.

To user code a weight is whole, on one rank alone, too: ``if trainer.is_global_zero: model.save_pretrained(path)``. Its
bytes are brought when they are looked at, from the ranks that hold them, whose own code need not come for that. What
only asks which tensors share memory brings nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.absent.base import ASKED
from lightning_par.absent.elsewhere import Elsewhere
from lightning_par.absent.unread import Unread
from lightning_par.checkpoint.buffers import Scratch
from lightning_par.checkpoint.owners import Place
from lightning_par.mesh.ledger import note
from lightning_par.mesh.positions import Positions
from lightning_par.mesh.raw_bytes import raw_bytes
from lightning_par.mesh.side_channel import Line, SideChannel
from lightning_par.mesh.standing import Standing
from lightning_par.private.storage import storage_of
from lightning_par.private.tensors import write_count
from lightning_par.sharded.run_state import RunState
from lightning_par.sharded.tensor import ShardedTensor, full


class WeightReads:
    """Brings weights of one run to the rank that reads them.

    Args:
        module: laid out over the ranks.
        rank: this process' global rank.
        run: a name for the run, alike on all ranks and used once in a job.
        standing: how far this rank is.

    Example::

        reads = WeightReads(module, dist.get_rank(), "run 1", Standing())
        x = reads.of(module.state_dict()["fc.weight"])
        x.data_ptr()  # the whole weight lies there, on this rank alone
        reads.close()
    """

    def __init__(self, module: nn.Module, rank: int, run: str, standing: Standing) -> None:
        self._module, self._rank, self.standing = module, rank, standing
        self._state = RunState.current
        self.scratch = Scratch()
        self._arrived = Scratch()
        self._places: dict[str, Place] = {}
        self._known: tuple[int, dict[int, _Known]] = (-1, {})  # of one moment, by the ids of their memory
        self._brought: weakref.WeakValueDictionary[Any, object] = weakref.WeakValueDictionary()
        self._weights: list[Tensor] = []  # that hold what was brought
        self._channel = SideChannel(f"weights of {run}", rank, self._answer)

    def of(self, x: Tensor) -> Unread | None:
        """What stands for the memory of ``x``, a tensor in parts or elsewhere; None where it has none to bring.

        The same as long as nothing writes to ``x``; what shares memory with a weight shares it here, too.
        """
        if self.standing.inside:
            return None
        name, weight = self._weight_of(x)
        if name is None and not isinstance(x, ShardedTensor):
            return None
        version = write_count(x._innermost) if isinstance(x, ShardedTensor) else self.standing.writes
        when = name or id(x), self.standing.steps, version
        known = vars(x).get(ASKED)
        if known is None or known[0] != when:
            # not of ``x``, which holds what is made here: the two would wait for the garbage collector
            source: Any = _Gathered(weight, self) if name is None else _Weight(weight, name, self)
            known = when, Unread(source, self._brought.get(when))
            vars(x)[ASKED] = known
            if name is not None:
                self._brought[when] = known[1].memory
            self._state.shows_memory = True
            if isinstance(x, nn.Parameter):
                self._weights.append(x)
        found: Unread = known[1]
        return found

    def knows(self, x: Tensor) -> bool:
        """Whether ``x`` is a weight, or another object of the same entries."""
        return self._weight_of(x)[0] is not None

    def is_of_weight(self, x: Tensor) -> bool:
        """Whether ``x`` has the memory of a weight, or a part of that."""
        return self._lying_at(_memory(x)) is not None

    def forget(self) -> None:
        """To be called where a step begins: what parameters hold of each other's parts goes."""
        for x in self._weights:
            vars(x).pop(ASKED, None)
        self._state.shows_memory = False
        self._weights.clear()

    def fetch(self, x: Tensor, name: str, out: Tensor) -> None:
        """Write the weight ``name``, whole, into ``out``.

        Args:
            x: this rank's, in parts or elsewhere.
            name: of the parameter or buffer.
            out: of its shape and dtype, contiguous, on the CPU.

        Raises:
            RuntimeError: a rank that holds it has ended, or has gone on with the run.
        """
        place = self._place_of(x, name)
        whole = place.folded(out)
        for index, rank in enumerate(place.ranks):
            if rank == self._rank:
                part = place.folded(_part(x).detach().cpu().contiguous())
                place.put(whole, index, (slice(None), slice(0, part.shape[1])), part)
            elif len(place.indices(index)):
                self._receive(name, place, index, whole)

    def close(self) -> None:
        """Answer no more; no communication."""
        self.forget()
        self._channel.close()

    # -------------------------------------------------------------------------------------------------------- who asks

    def _lying_at(self, memory: Any) -> _Known | None:
        """The weight in parts, or elsewhere, that lies in ``memory``."""
        if self._known[0] != self.standing.steps:
            named = [(name, y) for name, y in _tensors(self._module) if isinstance(y, ShardedTensor | Elsewhere)]
            lying = [(name, y, own) for name, y in named if (own := _memory(y)) is not None]
            self._known = self.standing.steps, {id(own): _Known(name, y, weakref.ref(own)) for name, y, own in lying}
        found = self._known[1].get(id(memory))
        # a weight may have gone, or moved, since: its id may be that of other memory by now
        return found if found is not None and found.memory() is memory and _memory(found.weight) is memory else None

    def _weight_of(self, x: Tensor) -> tuple[str | None, Any]:
        """The name of the weight that ``x`` is, or of which it is another object, and the weight; else a twin of it."""
        known = self._lying_at(_memory(x))
        if known is not None and _is_same(x, known.weight):
            return known.name, known.weight
        return None, x.twin() if isinstance(x, ShardedTensor) else x

    def _place_of(self, x: Tensor, name: str) -> Place:
        if isinstance(x, ShardedTensor):
            return Place.of(x, self._rank)
        assert isinstance(x, Elsewhere)
        if name not in self._places:
            holder = x.origin.axis.ranks[x.origin.holders[0]]
            with self._asked(holder, name, "place") as told:
                owner = told["owner"]
                positions = None if owner is None else Positions.of(owner)
                self._places[name] = Place(x.shape, x.dtype, tuple(told["ranks"]), told["dim"], positions)
        return self._places[name]

    def _receive(self, name: str, place: Place, index: int, whole: Tensor) -> None:
        count = 0
        with self._asked(place.ranks[index], name, "part") as told:
            for piece in place.pieces(index):
                target = place.target(whole, index, piece)
                arrived = target
                if arrived is None:  # it has gaps in the whole
                    rows, columns = (s.stop - s.start for s in piece)
                    arrived = self._arrived.empty((rows, columns, whole.shape[2]), whole.dtype)
                told["line"].receive_into(_view_of(arrived))
                count += arrived.numel()
                if target is None:
                    place.put(whole, index, piece, arrived)
        note("recv", "world", "weights read", count, count * whole.element_size(), 2)

    def _asked(self, rank: int, name: str, what: str) -> _Asked:
        return _Asked(
            self._channel,
            rank,
            {"name": name, "what": what, "steps": self.standing.steps, "writes": self.standing.writes},
        )

    # ----------------------------------------------------------------------------------------------------- who is asked

    def _answer(self, question: Any, line: Line) -> None:
        """In a thread, while this rank's own code waits, or runs between two steps."""
        x = dict(_tensors(self._module))[question["name"]]
        if question["what"] == "place":
            place = Place.of(x, self._rank)
            owner = None if place.positions is None else place.positions.owner.tolist()
            line.say({"ranks": list(place.ranks), "dim": place.dim, "owner": owner})
            return
        for _ in self.standing.wait_at(question["steps"], question["writes"]):
            line.say({"waits": True})
        place, part = Place.of(x, self._rank), _part(x).detach()
        before = write_count(part)
        line.say({})
        folded = place.folded(part.contiguous())
        for rows, columns in place.pieces(place.ranks.index(self._rank)):
            line.send(_view_of(folded[rows, columns].cpu().contiguous()))
        changed = write_count(part) != before or self.standing.steps != question["steps"]
        line.say({"failure": "it has changed the weight meanwhile"} if changed else {})


class _Asked:
    """What a rank says to a question, once it can; with the line to it."""

    def __init__(self, channel: SideChannel, rank: int, question: dict[str, Any]) -> None:
        self._asking, self._rank, self._question = channel.ask(rank, question), rank, question

    def __enter__(self) -> dict[str, Any]:
        self._line: Line = self._asking.__enter__()
        told = self._heard()
        while "waits" in told:
            told = self._heard()
        return {**told, "line": self._line}

    def __exit__(self, *exception: Any) -> None:
        try:
            if exception[0] is None and self._question["what"] == "part":
                self._heard()
        finally:
            self._asking.__exit__(*exception)

    def _heard(self) -> dict[str, Any]:
        told: dict[str, Any] = self._line.hear()
        if "failure" in told:
            raise RuntimeError(
                f"Rank {self._rank}, which holds {self._question['name']!r}, can't send it: {told['failure']}. Read "
                "weights on all ranks at the same place of the code, or between steps on one alone; not in a thread."
            )
        return told


@dataclass(frozen=True)
class _Known:
    """A weight in parts, or elsewhere, and where it was when it was looked at."""

    name: str
    weight: Tensor
    memory: weakref.ref[Any]


@dataclass
class _Weight:
    """The source of a weight, or of what shares its memory."""

    tensor: Tensor
    name: str
    reads: WeightReads

    def __post_init__(self) -> None:
        self.shape, self.dtype, self.scratch = self.tensor.shape, self.tensor.dtype, self.reads.scratch
        self.steps = self.reads.standing.steps

    def copy_into(self, target: Tensor, dim: int = 0, indices: Any = None) -> None:
        if self.reads.standing.steps != self.steps:
            raise RuntimeError(
                f"{self.name!r} was handed out after step {self.steps} of the run, and its values are asked for after "
                f"step {self.reads.standing.steps}, when it has changed: save it, or clone it, before."
            )
        _fill(target, indices, dim, self.shape, lambda out: self.reads.fetch(self.tensor, self.name, out))


@dataclass
class _Gathered:
    """The source of a tensor that was computed of weights: all ranks that have a part of it come together."""

    tensor: Tensor
    reads: WeightReads

    def __post_init__(self) -> None:
        self.shape, self.dtype, self.scratch = self.tensor.shape, self.tensor.dtype, self.reads.scratch

    def copy_into(self, target: Tensor, dim: int = 0, indices: Any = None) -> None:
        _fill(target, indices, dim, self.shape, lambda out: out.copy_(full(self.tensor)))


def _fill(target: Tensor, indices: Any, dim: int, shape: torch.Size, fetch: Any) -> None:
    """``target`` gets what ``fetch`` writes into a tensor of ``shape``, or that at ``indices`` of ``dim``."""
    direct = indices is None and target.device.type == "cpu" and target.is_contiguous()
    whole = target if direct else torch.empty(shape, dtype=target.dtype)
    fetch(whole)
    if not direct:
        target.copy_(whole if indices is None else whole.index_select(dim, torch.as_tensor(indices)))


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _part(x: Tensor) -> Tensor:
    """What this rank holds of ``x``, plain."""
    return x._innermost if isinstance(x, ShardedTensor) else x


def _memory(x: Tensor) -> Any:
    """The same object for what shares memory."""
    return x.origin if isinstance(x, Elsewhere) else storage_of(_part(x))


def _is_same(x: Tensor, weight: Tensor) -> bool:
    """Whether ``x`` has the very entries of ``weight``, with which it shares memory."""
    if isinstance(x, Elsewhere):
        return x.is_whole
    return _part(x).is_set_to(_part(weight)) and x.shape == weight.shape


def _view_of(x: Tensor) -> memoryview:
    array: Any = raw_bytes(x).numpy()
    return memoryview(array)
