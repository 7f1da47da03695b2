"""The operations that a `TorchDispatchMode` meets."""

from __future__ import annotations

from operator import attrgetter

schema_of = attrgetter("_schema")
"""What an operation takes, writes and returns; what is public tells the name alone."""

HOMES = ("torch._ops", "torch.ops")
"""How the ``__module__`` of an operation begins, by which it is told from a function of torch."""
