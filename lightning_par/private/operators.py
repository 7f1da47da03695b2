"""The operations that a `TorchDispatchMode` meets."""

from __future__ import annotations

from operator import attrgetter

import torch

schema_of = attrgetter("_schema")
"""What an operation takes, writes and returns; what is public tells the name alone."""

Operator = torch._ops.OpOverload
"""The class of one; what takes functions, as a loop that is traced does, is of another."""

HOMES = ("torch._ops", "torch.ops")
"""How the ``__module__`` of an operation begins, by which it is told from a function of torch."""
