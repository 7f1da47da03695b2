"""Trials of the facts of `lightning_par.sharded.functions`: one for each fact, of a call of a function.

A new fact needs a trial in one of these modules, and a function that takes other arguments than one or two tensors a
line in `tests.fact_trials.calls`.
"""

from __future__ import annotations

from tests.fact_trials import draws, entries, graph, operators, python, shapes, sums
from tests.fact_trials.trial import TRIALS

__all__ = ["TRIALS", "draws", "entries", "graph", "operators", "python", "shapes", "sums"]
