"""What modules in units hold, and what of it the step's own code replaces, as by ``self.net[0].scale = x``.

Each rank runs that code up to the end of its stages, and the rank that has the unit may not come to it. Of plain values
all ranks are told; buffers, weights and modules are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_par.pipeline.trial.side_inputs import UnitError
from lightning_par.private.modules import BUFFERS, MODULES, PARAMETERS
from lightning_par.sharded.rules.lookup import user_line

_KINDS = {BUFFERS: "buffer", PARAMETERS: "parameter", MODULES: "module"}


class UnitHoldings:
    """What units hold before a trial run of a step, and what they have replaced of it themselves.

    Args:
        module: that the trial runs.
        units: their FQNs.

    Example::

        holdings = UnitHoldings(module, ["net.0"])
        module.net[0].scale = torch.ones(1)
        holdings.refuse()  # UnitError, if `scale` is a buffer
    """

    def __init__(self, module: nn.Module, units: Collection[str]) -> None:
        self._held: dict[str, list[_Holding]] = {}
        for path in units:
            named = [*module.get_submodule(path).named_modules(prefix=path)]
            within = [(name, vars(m)) for name, m in named if not isinstance(m, torch.jit.ScriptModule)]
            self._held[path] = [_Holding(name, kind, held[kind]) for name, held in within for kind in _KINDS]
            self._held[path] += [_Holding(name, "", held) for name, held in within]
        self._lines: dict[tuple[int, str], str] = {}

    def assigned(self, module: nn.Module, name: str) -> None:
        """The step's own code is about to set an attribute of a module in a unit."""
        for kind in _KINDS:
            if name in vars(module)[kind]:
                self._lines[id(vars(module)[kind]), name] = user_line()

    @contextmanager
    def call(self, path: str) -> Iterator[None]:
        """The unit ``path`` runs inside, which may replace what is its own."""
        before = [dict(holding.now) for holding in self._held[path]]
        yield
        for holding, was in zip(self._held[path], before):
            holding.took(was)

    def changed(self) -> set[str]:
        """The units in which the run, which has ended, has replaced plain attributes."""
        return {path for path, held in self._held.items() if any(not x.kind and x.replaced() for x in held)}

    def refuse(self) -> None:
        """The run has ended.

        Raises:
            UnitError: its own code has replaced a buffer, a weight or a module.
        """
        for path, held in self._held.items():
            for holding in held:
                key = holding.replaced() if holding.kind else None
                if key is not None:
                    line = self._lines.get((id(holding.now), key))
                    _refuse("" if line is None else f"{line}: ", path, f"{holding.name}.{key}", holding.kind)


class _Holding:
    """One dict of a module: its attributes, or those of one kind."""

    def __init__(self, name: str, kind: str, now: dict[str, Any]) -> None:
        self.name, self.kind, self.now = name, kind, now
        self._known = dict(now)

    def took(self, was: dict[str, Any]) -> None:
        """Since it was so, its own unit has run."""
        for key in {**was, **self.now}:
            if self.now.get(key) is not was.get(key):
                self._known[key] = self.now.get(key)

    def replaced(self) -> str | None:
        """A key under which something else is than the unit has put there."""
        keys = (key for key in {**self._known, **self.now} if self.now.get(key) is not self._known.get(key))
        return min((key for key in keys if self.kind or not self._is_own(key)), default=None)

    @staticmethod
    def _is_own(key: str) -> bool:
        """Whether an attribute is what a class keeps for itself, or the mode, of which all ranks are told apart."""
        return key.startswith("_") or key == "training"


def _refuse(place: str, unit: str, name: str, kind: str) -> None:
    if kind == PARAMETERS:
        raise UnitError(
            f"{place}the step assigns the parameter {name!r}, as by `=` or load_state_dict(assign=True). Other stages "
            "of the pipeline go on with the one that was there. Make it in __init__, and write into it: by "
            "`p.copy_(value)` under torch.no_grad(), or by load_state_dict without `assign`.",
            None,  # no matter what of the unit is taken by itself
        )
    if kind == MODULES:
        raise UnitError(f"{place}the step assigns the module {name!r}. Make it in __init__.", None)
    raise UnitError(
        f"{place}the step replaces the buffer {name!r}. Other stages of the pipeline don't have it. Assign it in the "
        "forward of the module that it belongs to, or in on_train_batch_end, where all ranks see all buffers, or use "
        "TensorParallelStrategy.",
        unit,
    )
