"""What makes the host wait for the device, counted with the line that asked for it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from tests.gpu_rules.sites import site

Waits = Counter[tuple[str, str, str]]
"""How often, by what was done ("wait", "d2h" and "h2d": copies, of which those that are "non_blocking" wait for
nothing), torch's operator, and the line."""
_open: list[Waits] = []


@contextlib.contextmanager
def counted() -> Iterator[Waits]:
    """Counts while open::

    with counted() as waits:
        x.item()
    assert [what for what, _, _ in waits] == ["wait"]
    """
    counter: Waits = Counter()
    _open.append(counter)
    try:
        yield counter
    finally:
        _open.remove(counter)


def tell(what: str, op: str, nbytes: int = 0) -> None:
    if _open:
        key = what, op, site()
        for counter in _open:
            counter[key] += 1


def blocking(waits: Waits) -> Waits:
    """Those for which the host stands still until the device has come there.

    A copy to the device is one too where its memory is not pinned, but waits for nothing that was computed.
    """
    return Counter({key: count for key, count in waits.items() if key[0] in ("wait", "d2h")})
