"""What a run of the user's step may change besides computing: watched, undone, or told.

A step runs several times on every rank of a pipeline, and counts once. See `lightning_par.pipeline.effects` for what
becomes of the run that counts.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_par import private
from lightning_par.pipeline import cells
from lightning_par.pipeline.cells import Cell, MappingCell
from lightning_par.pipeline.changes import Change
from lightning_par.pipeline.effects import Effects
from lightning_par.pipeline.metrics import Around, StandIns, calling
from lightning_par.pipeline.outputs import Recorder, recorded, silent, speaking

DEPTH = 3  # containers and objects within one another that are looked into
_ITEMS = 64  # of one container that get a spare
_LOOKED_AT = 1000  # items of one container whose insides are watched
_OWN = frozenset(vars(nn.Module())) - {"training"}
_LIGHTNING = frozenset("_trainer _fabric _fabric_optimizers _device_mesh _compiler_ctx _metric_attributes".split())
_METRIC = frozenset("_defaults _reductions _persistent _update_signature update compute forward dist_sync_fn".split())
_SKIPPED = _OWN | _LIGHTNING
_ATOMS = frozenset((int, float, bool, str, bytes, complex, type(None), type, torch.dtype, torch.device, torch.Size))
_FOREIGN = frozenset("""
builtins types functools pathlib enum datetime re inspect logging threading multiprocessing concurrent weakref abc io
torch lightning pytorch_lightning lightning_fabric lightning_par transformers tokenizers numpy
""".split())  # fmt: skip


class Watch:
    """The Python state of the modules outside units, so that a run of the step can be undone, or told.

    Args:
        lightning_module: whose step is run.
        modules: the container-level modules by FQN, ``lightning_module`` itself (``""``) and metrics included.
        around: called for each outermost call of a metric's ``forward``, ``update`` or ``compute`` as ``around(name,
            metric, call, args, kwargs)``; what it returns is the call's result. ``call`` is the metric's own method in
            a run that counts, and gives a value of the same structure, without touching the metric, in one that
            does not.

    Example::

        watch = Watch(module, [("", module)])
        with watch.undone():
            module.training_step(batch, 0)
        with watch.told() as effects:
            effects.result = module.training_step(batch, 0)
        effects = effects.travel(axis, source=axis.size - 1)
        apply(effects, module, watch, show=axis.rank == 0)
    """

    def __init__(
        self, lightning_module: Any, modules: Sequence[tuple[str, nn.Module]], around: Around | None = None
    ) -> None:
        self.lightning_module = lightning_module
        self.modules = list(modules)
        self.around = around
        self._stand_ins = StandIns()
        self._spares: dict[int, tuple[Tensor, int, Tensor, int]] = {}
        self._last: dict[int, tuple[Tensor, int, Tensor, int]] = {}  # of the run before
        self._inside: list[tuple[str, Change]] = []  # what hooks of units changed in the run that is on

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Whatever the run inside does to the state is undone; its logs, prints and metric updates do nothing.

        Raises:
            RuntimeError: the run changed a tensor in place that is too large to be copied.
        """
        snapshot = self.snapshot()
        try:
            with silent(self.lightning_module), calling(snapshot.metrics, self.around, self._stand_ins.call):
                yield
        finally:
            overwritten = snapshot.restore()
            self._keep_inside(snapshot)
        if overwritten:
            raise RuntimeError(_too_large(overwritten))

    @contextlib.contextmanager
    def told(self) -> Iterator[Effects]:
        """The run inside counts: afterwards the `Effects` hold what it did, and the state is put back here, too."""
        snapshot, effects = self.snapshot(), Effects()
        recorder = Recorder(self.lightning_module, effects.logs, effects.printed, snapshot.names)
        try:
            with recorded(self.lightning_module, recorder), calling(snapshot.metrics, self.around, None):
                yield effects
            for name, cell in snapshot.cells.items():
                change = cell.change()
                if change is not None and cell.fixed:
                    places = ", ".join(map(cell.place, [*change.entries, *change.deleted]))
                    effects.refused.append(f"The step assigns modules or parameters: {places}. Make them in __init__.")
                elif change is not None:
                    effects.state[name] = change
                    effects.places[name] = cell.dotted
        finally:
            overwritten = snapshot.restore()
            self._keep_inside(snapshot)
            self._spares, self._last = {}, {}  # what the run stored may be one of them
        if overwritten:
            effects.refused.append(_too_large(overwritten))

    @contextlib.contextmanager
    def inside(self, unit: nn.Module, prints: bool) -> Iterator[None]:
        """A unit runs inside, on this rank alone: what its hooks store stays here, though the run be undone.

        Args:
            unit: the unit.
            prints: whether what it prints is printed.
        """
        with speaking() if prints else contextlib.nullcontext():
            if not any(private.has_hooks(module) for module in unit.modules()):
                yield
                return
            snapshot = self.snapshot(lend=False)
            yield
        changes = [(name, cell.change_unlent()) for name, cell in snapshot.cells.items() if not cell.fixed]
        self._inside += [(name, change) for name, change in changes if change is not None]
        snapshot.restore()

    def _keep_inside(self, snapshot: Snapshot) -> None:
        changes, self._inside = self._inside, []
        for name, change in changes:
            if name in snapshot.cells:
                snapshot.cells[name].apply(change)

    def snapshot(self, lend: bool = True) -> Snapshot:
        """What the modules hold now; with ``lend`` their tensors are stood in for until `Snapshot.restore`."""
        if lend:
            self._last, self._spares = self._spares, {}  # what no module holds any more is let go
        return Snapshot(self.modules, self if lend else None)

    def spare(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor`` to run on, the last run's if neither has changed since."""
        known = self._spares.get(id(tensor)) or self._last.get(id(tensor))
        if known is not None:
            original, version, spare, spare_version = known
            unchanged = cells.version_of(tensor) == version >= 0 and cells.version_of(spare) == spare_version
            if original is tensor and unchanged:
                self._spares[id(tensor)] = known
                return spare
        spare = tensor.detach().clone()
        self._spares[id(tensor)] = tensor, cells.version_of(tensor), spare, cells.version_of(spare)
        return spare


class Snapshot:
    """Every cell that the modules reach, by name, and the metrics among them."""

    def __init__(self, modules: Sequence[tuple[str, nn.Module]], spares: Watch | None) -> None:
        self.cells: dict[str, Cell] = {}
        self.metrics: dict[str, nn.Module] = {}
        self.names: dict[int, str] = {}  # of the owners
        self._spares = spares
        with _plainly():
            for fqn, module in modules:
                self._add_module(f"self.{fqn}" if fqn else "self", module)

    def restore(self) -> list[str]:
        """Put everything back.

        Returns:
            The names of tensors that could not be put back, having no copy.
        """
        overwritten: list[str] = []
        for cell in self.cells.values():
            overwritten += cell.overwritten()
            cell.restore()
        return overwritten

    def _add_module(self, name: str, module: nn.Module) -> None:
        if id(module) in self.names:
            return
        self.names[id(module)] = name
        skipped = _SKIPPED
        if isinstance(module, Metric) or hasattr(module, "_groups_checked"):
            self.metrics[name] = module
            skipped = _SKIPPED | _METRIC
        self._add(MappingCell(name, module, vars(module), skipped), skipped, DEPTH)
        self._add(MappingCell(f"{name}._buffers", module, module._buffers), frozenset(), DEPTH, buffers=True)
        for fixed in ("_modules", "_parameters"):
            self.cells[f"{name}.{fixed}"] = MappingCell(name, module, vars(module)[fixed], fixed=True)

    def _add(self, cell: Cell, skipped: frozenset[str], depth: int, buffers: bool = False) -> None:
        self.cells[cell.name] = cell
        items = [(key, x) for key, x in cells.items_of(cell) if type(x) not in _ATOMS]
        if cell.dotted:
            items = [(key, x) for key, x in items if key not in skipped]
        few = len(items) <= _ITEMS
        if not few and not buffers:
            cell.versions = {key: (x, cells.version_of(x)) for key, x in items if type(x) is Tensor}
            items = [(key, x) for key, x in items if key not in cell.versions][:_LOOKED_AT]
        for key, value in items:
            if type(value) is Tensor:
                small = buffers or value.numel() <= cells.SMALL
                cell.lend(key, value, self._spares if small and not value.requires_grad else None)
            elif depth:
                self._add_object(cell.place(key), value, depth)

    def _add_object(self, name: str, value: Any, depth: int) -> None:
        if id(value) in self.names:
            return
        if isinstance(value, nn.Module):
            if isinstance(value, Metric):
                self._add_module(name, value)
            return
        cell = cells.cell_of(name, value)
        if cell is None and _is_users(value):
            cell = MappingCell(name, value, vars(value))
        if cell is None:
            return
        self.names[id(value)] = name
        if isinstance(cell.before, (dict, list)):
            self._add(cell, frozenset(), depth - 1)
        else:
            self.cells[name] = cell


def _is_users(value: Any) -> bool:
    """Whether a value is an object of a plain class, whose attributes are its state."""
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (type, BaseException, Tensor))
        and not callable(getattr(kind, "__get__", None))
        and kind.__module__.partition(".")[0] not in _FOREIGN
        and value is not sys.modules.get(getattr(value, "__name__", ""))
    )


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """No mode sees what is done inside, and copies count their changes."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(private.no_modes())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        yield


def _too_large(places: list[str]) -> str:
    return (
        f"The step changes a tensor in place that is too large to be copied for every run: {', '.join(places)}. "
        "Register it as a buffer, or assign a new tensor."
    )
