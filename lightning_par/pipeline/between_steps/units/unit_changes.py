"""What a layer that is called outside a step changes beside what it is given: what it holds, what its own code reaches,
and what hooks on it do. User code reads these on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lightning_par.mesh.known_objects import Known
from lightning_par.pipeline.effects.told_changes import Changed, Told, leave_what_cannot_travel
from lightning_par.pipeline.effects.unit_reach import add_hooks
from lightning_par.pipeline.effects.user_hooks import ADVICE, words
from lightning_par.private.modes import DisableTorchFunctionSubclass
from lightning_par.private.module_hooks import hooks_on, hooks_on_all
from lightning_par.python_state.registered_hooks import HookHolders, HooksCell, Removed
from lightning_par.python_state.snapshot import Snapshot


@dataclass
class Left:
    """What a call has left behind, on its way to the ranks that did not run it.

    Attributes:
        changed: objects that it changed.
        hooks: that saw it, as `UnitChanges.hooks`.
        removed: those that are gone since, as they removed themselves.
        trained: whether weights require a gradient, of which they did the opposite before.
    """

    changed: Changed
    hooks: tuple[tuple[str, int], ...] = ()
    removed: Removed = field(default_factory=dict)
    trained: dict[str, bool] = field(default_factory=dict)


class UnitChanges:
    """The state around one call of a unit, to be made on all ranks before it.

    Args:
        path: the unit.
        unit: itself.
        apart: modules within units, which have their own ranks, with their names by id.
        packages: installed packages that count as the user's.

    Attributes:
        hooks: how many of the user's hooks see the call, by module.

    Example::

        changes = UnitChanges("layers.0", layer, {}, frozenset())
        changes.look()  # where it runs
        layer.calls += 1
        left = changes.left(known, device)
        ...
        changes.put(left, rank, source)  # elsewhere
    """

    def __init__(self, path: str, unit: nn.Module, apart: Mapping[int, str], packages: frozenset[str]) -> None:
        self._path, self._unit, self._packages = path, unit, packages
        self._modules = [*unit.named_modules(prefix=path)]
        own = {id(m) for _, m in self._modules}
        self._apart = {key: name for key, name in apart.items() if key not in own}
        found = [(name, len(hooks_on(m))) for name, m in self._modules]
        self.hooks = (*((name, n) for name, n in (*found, ("all modules", len(hooks_on_all()))) if n),)
        self._hung = HooksCell(HookHolders(unit, weights=False)) if self.hooks else None
        self._held: set[str] = set()
        self._trained: dict[str, bool] = {}

    @cached_property
    def _state(self) -> Snapshot:
        state = Snapshot([], self._packages, self._apart, hooks=False)
        state.add_units(self._modules)
        self._held = set(state.cells)
        add_hooks(state, self._modules)
        for n, hook in enumerate(hooks_on_all()):
            state.add(f"hook {n} of all modules", hook)
        return state.compare_contents()

    def look(self) -> None:
        """The call follows."""
        self._state.lend_iterators()
        self._trained = self._which_are_trained()

    def _which_are_trained(self) -> dict[str, bool]:
        with DisableTorchFunctionSubclass():  # weights of other stages would ask who reads
            return {name: p.requires_grad for name, p in self._unit.named_parameters()}

    def objects(self) -> dict[str, Any]:
        """All that is there, by names that ranks share."""
        return self._state.objects

    def known(self, known: Known) -> Known:
        """``known`` with all that was there before, where the call ran; it travels by its name."""
        known.names, known.objects = {**self._state.names, **known.names}, {**self._state.objects, **known.objects}
        return known

    def left(self, known: Known, device: torch.device) -> Left:
        """What the call has changed, where it ran, as far as it can travel.

        Args:
            known: what all ranks have.
            device: where the process group's tensors live.

        Raises:
            TypeError: what hooks have stored can't be sent to the other ranks.
        """
        self._state.settle_iterators()
        told = Told({0: Changed.since(self._state, self._held, self._path).with_graphs()})
        if told.calls[0].any:
            leave_what_cannot_travel(told, known, device, {})
        if told.refused:
            raise TypeError(" ".join(told.refused))
        trained = {n: flag for n, flag in self._which_are_trained().items() if flag != self._trained.get(n, flag)}
        return Left(told.calls[0], self.hooks, {} if self._hung is None else self._hung.removed(), trained)

    def put(self, left: Left, rank: int, source: int) -> None:
        """Let all that the call has changed on ``source`` be so on this ``rank``, too.

        Raises:
            RuntimeError: other hooks are there than here.
        """
        if left.hooks != self.hooks:
            raise RuntimeError(
                f"Hooks on {self._path!r} and what is in it are on pipeline rank {source} {words(left.hooks)}, and on "
                f"rank {rank} {words(self.hooks)}. They run where the layer is. {ADVICE}"
            )
        for name, change in {**left.changed.shared, **left.changed.own}.items():
            self._state.cells[name].apply(change)
        if self._hung is not None:
            self._hung.remove(left.removed)
        with DisableTorchFunctionSubclass():
            for name, flag in left.trained.items():
                self._unit.get_parameter(name).requires_grad_(flag)

    def put_again(self, left: Left, names: Collection[str]) -> None:
        """Where the call ran: what it has stored under these ``names`` is as it is in ``left``."""
        for name, change in {**left.changed.shared, **left.changed.own}.items():
            if name in names:
                self._state.cells[name].apply_again(change)
