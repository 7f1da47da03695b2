"""The batches of one replica, out of the streams of the replicas that a run had before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_par.resume.global_batch import GlobalBatch


class ReplicaBatches:
    """A loader of the batches that replica ``index`` of ``size`` runs; see `GlobalBatch.share`.

    Args:
        streams: loaders, by the number of the replica whose batches they give.
        batch: what a step is made of.
        size: replicas that there are.
        index: one of them.
        limit: ``limit_train_batches``, of a stream.

    Attributes:
        stream: how many batches an epoch takes of each stream; None where nobody knows.

    Example::

        loader = ReplicaBatches({0: ["a", "b"], 1: ["c", "d"]}, GlobalBatch(2, 1), 1, 0)
        assert [*loader] == ["a", "c", "b", "d"]
    """

    def __init__(
        self, streams: Mapping[int, Any], batch: GlobalBatch, size: int, index: int, limit: int | float = 1.0
    ) -> None:
        self._streams, self._batch, self._size, self._index = dict(streams), batch, size, index
        self._first = next(iter(streams.values()))
        length: int | None
        try:
            length = len(self._first)
        except (TypeError, NotImplementedError):  # as of an iterable dataset
            length = None
        self.stream: int | None
        if isinstance(limit, int):
            self.stream = limit if length is None else min(limit, length)
        else:
            self.stream = None if length is None else int(length * limit)
        self._has_length = length is not None

    def __iter__(self) -> Iterator[Any]:
        iterators = {number: iter(stream) for number, stream in self._streams.items()}
        # made now, as a loader's own iterator would be, and not when the first batch is asked for
        return self._batches(iterators, self.stream)

    def _batches(self, iterators: dict[int, Iterator[Any]], last: int | None) -> Iterator[Any]:
        stands = dict.fromkeys(iterators, 0)
        for number, batch in self._batch.share(self._size, self._index, last):
            for _ in range(batch - stands[number]):  # other replicas'
                if next(iterators[number], _END) is _END:
                    return
            found = next(iterators[number], _END)
            if found is _END:
                return
            stands[number] = batch + 1
            yield found

    def __len__(self) -> int:
        if not self._has_length or self.stream is None:
            raise TypeError(f"{type(self._first).__name__} has no length")
        return self._batch.batches_on(self._size, self.stream)

    @property
    def sampler(self) -> Any:
        """Told of the epoch, it tells those of all streams."""
        return _Samplers(self._streams.values())

    @property
    def batch_sampler(self) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_first":
            raise AttributeError(name)
        return getattr(self._first, name)


_END = object()


class _Samplers:
    def __init__(self, streams: Any) -> None:
        self._streams = [*streams]

    def set_epoch(self, epoch: int) -> None:
        for stream in self._streams:
            holders = (stream, getattr(stream, "batch_sampler", None))
            samplers = [getattr(holder, "sampler", None) for holder in holders]
            for sampler in {id(x): x for x in samplers}.values():
                set_epoch = getattr(sampler, "set_epoch", None)
                if callable(set_epoch):
                    set_epoch(epoch)
