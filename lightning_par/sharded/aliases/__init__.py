"""Memory that one device has once and a rank twice: a view that had to be a copy, and what it was taken of.

A slice of a sharded dim, a token of a sharded sequence, the view that a function without a rule takes of a gathered
tensor: one device has views there. Each such copy is noted, and right after a function wrote into it, or into what it
was taken of, the other is written, too, so that both hold what they would on one device, and have its gradient. As
long as nobody writes in place nothing is done and nothing is sent.

What is noted hangs on the memory itself, and ends with it.
"""

from lightning_par.sharded.aliases.copies import is_among, is_any, look, note, settle, written
from lightning_par.sharded.aliases.data_links import link
from lightning_par.sharded.aliases.frames import gathered, innermost
from lightning_par.sharded.aliases.memory import Memory
from lightning_par.sharded.aliases.overlaps import lies_in, overlapping
from lightning_par.sharded.aliases.writes import count_write, keep_cut, renew_cuts, writes_into

__all__ = [
    "Memory",
    "count_write",
    "gathered",
    "innermost",
    "is_among",
    "is_any",
    "keep_cut",
    "lies_in",
    "link",
    "look",
    "note",
    "overlapping",
    "renew_cuts",
    "settle",
    "writes_into",
    "written",
]
