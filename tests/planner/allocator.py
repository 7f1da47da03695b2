"""What torch's allocator for GPUs reserves for what it is asked for: its rules, as `c10/cuda/CUDACachingAllocator.cpp`
has them, run on paper for one stream, without a limit and without segments that grow."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

MB = 1 << 20
_LEAST, _SMALL = 512, MB  # bytes of a block; of the largest one that has a segment of the small ones


@dataclass(eq=False)
class _Block:
    size: int
    number: int  # in the order in which blocks were made
    small: bool  # whether its segment is one of small blocks
    before: _Block | None = None
    after: _Block | None = None
    free: bool = True

    def __lt__(self, other: _Block) -> bool:
        return (self.size, self.number) < (other.size, other.number)


@dataclass
class Allocator:
    """Blocks cut out of segments, the smallest that is large enough; free neighbours become one again.

    Attributes:
        asked: bytes of the blocks in use.
        reserved: bytes of all segments.
        most_asked: the most there ever were in use.

    Example::

        found = Allocator()
        found.run([(1, 30 << 20), (2, 30 << 20), (1, -1), (3, 31 << 20)])
        assert (found.most_asked, found.reserved) == (62 << 20, 92 << 20)
    """

    asked: int = 0
    reserved: int = 0
    most_asked: int = 0
    _free: dict[bool, list[_Block]] = field(default_factory=lambda: {True: [], False: []})
    _used: dict[int, _Block] = field(default_factory=dict)
    _made: int = 0

    def run(self, events: Iterable[tuple[int, int]]) -> None:
        """Of each event the number of a memory, and its bytes as it is made, or less than 0 as it is let go."""
        for number, size in events:
            if size > 0:
                self._used[number] = self._take(max(_LEAST, -(-size // _LEAST) * _LEAST))
            else:
                self._give(self._used.pop(number))

    def _take(self, size: int) -> _Block:
        small = size <= _SMALL
        free = self._free[small]
        at = bisect_left(free, _Block(size, -1, small))
        block = free.pop(at) if at < len(free) else self._segment(size)
        if block.size - size >= (_LEAST if small else _SMALL + 1):
            rest = self._block(block.size - size, small, block, block.after)
            block.size = size
            insort(free, rest)
        block.free = False
        self.asked += block.size
        self.most_asked = max(self.most_asked, self.asked)
        return block

    def _segment(self, size: int) -> _Block:
        whole = 2 * MB if size <= _SMALL else 20 * MB if size < 10 * MB else -(-size // (2 * MB)) * 2 * MB
        self.reserved += whole
        return self._block(whole, size <= _SMALL, None, None)

    def _block(self, size: int, small: bool, before: _Block | None, after: _Block | None) -> _Block:
        self._made += 1
        made = _Block(size, self._made, small, before, after)
        if before is not None:
            before.after = made
        if after is not None:
            after.before = made
        return made

    def _give(self, block: _Block) -> None:
        self.asked -= block.size
        block.free = True
        free = self._free[block.small]
        for beside in (block.before, block.after):
            if beside is not None and beside.free:
                free.pop(bisect_left(free, beside))
                first, second = (beside, block) if beside is block.before else (block, beside)
                first.size, first.after = first.size + second.size, second.after
                if second.after is not None:
                    second.after.before = first
                block = first
        insort(free, block)
