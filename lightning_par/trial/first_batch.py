"""A look at the first batch, before Lightning has set the data up, that leaves no trace in the run.

The model is split before the loops request their loaders, and the split needs the shapes that a step will see.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader

from lightning_par.mesh.batch_broadcast import broadcast_batch
from lightning_par.private.lightning_modules import before_batch_transfer
from lightning_par.private.loaders import data_source, mode_of, request_loader
from lightning_par.private.trainer import resumes
from lightning_par.python_state import generators
from lightning_par.python_state.kept import kept
from lightning_par.python_state.snapshot import Snapshot
from lightning_par.python_state.user_code import is_library, packages_of
from lightning_par.strategies.entry_points import STEPS, fetches_itself
from lightning_par.strategies.namespace import Namespace
from lightning_par.trial.loader_peek import NoBatchError, Replaced, UnrepeatableError, first_batch
from lightning_par.trial.loader_settings import read_by
from lightning_par.trial.module_copy import copied

_log = logging.getLogger(__name__)
TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks around the transfer of a batch, in the order in which Lightning calls them."""


def peek_batch(trainer: Any, module: Any, resuming: bool = False) -> Any:
    """The batch that the running entry point's step will get first, as the step will get it; None if there is none.

    All ranks must call it, and all get the first rank's batch. No sample is consumed and no generator of random
    numbers moves: a map-style loader is sampled beside its iterator; of iterables copies are begun; one that can't be
    copied begins, and the run goes on with it. ``train_dataloader()`` and the like are called once, unless they draw
    random numbers, a checkpoint is resumed, whose state they may read, or a setting that they read has changed when
    Lightning asks for its loader: then they are called again in its time, and what they did here is undone.

    Args:
        trainer: in an entry point, its ``strategy.setup_environment()`` done.
        module: whose batch transfer hooks are applied.
        resuming: whether a checkpoint will be loaded that is not yet.

    Raises:
        ValueError: looking would change what the run gets; on all ranks.
    """
    step = getattr(module, STEPS[trainer.state.fn.value])
    strategy = trainer.strategy
    source = data_source(trainer)
    vars(source).pop("dataloader", None)  # of a run that ended before it came to its data
    with generators.kept():
        peeked = _request(trainer, module, source, strategy.namespace, resuming)
        batch = peeked.batch if peeked is not None and strategy.groups.world.tells() else None
        batch = broadcast_batch(batch, strategy.groups.world, strategy.root_device)
        if isinstance(batch, _Refused):
            raise ValueError(batch.reason)
        if batch is not None and not fetches_itself(step):  # of which Lightning prepares nothing
            batch = _prepared(trainer, module, strategy.precision_plugin.convert_input(batch))
    return batch


def _prepared(trainer: Any, module: Any, batch: Any) -> Any:
    """``batch`` after the user's hooks around its transfer, of whose run nothing else is left."""
    strategy = trainer.strategy
    owners = (x for x in (trainer.datamodule, module) if x is not None)
    theirs = [x for x in owners if any(is_users(x, hook) for hook in TRANSFERS)]
    if not theirs:
        return strategy.batch_to_device(batch, dataloader_idx=0)
    weights = {id(p) for p in module.parameters()}  # too much to be copied for hooks that are about batches
    with kept(module, theirs, weights, is_copy=False):
        batch = before_batch_transfer(module, copied(batch))
        return strategy.batch_to_device(batch, dataloader_idx=0)


def is_users(owner: Any, hook: str) -> bool:
    """Whether ``hook`` is other than Lightning's own: of the user's class, or put on the object."""
    method = getattr(owner, hook, None)
    return not is_library(getattr(getattr(method, "__func__", None), "__module__", None) or "")


def count_loaders(trainer: Any) -> int:
    """How many loaders the running entry point goes through one after another; asked after `peek_batch`."""
    again = vars(data_source(trainer)).get("dataloader")
    return again.loaders if isinstance(again, _Again) else 1


def _request(trainer: Any, module: Any, source: Any, namespace: Namespace, resuming: bool) -> _Peeked | None:
    """Ask the user's hook for the loader; arrange what Lightning gets when it asks, later."""
    if not source.is_defined() or _skips(trainer, module):
        return None
    before, state = generators.global_state(), _state(module, source)
    try:
        loader = request_loader(namespace, source)
    except Exception:
        state.restore()
        return None  # a hook may need what exists only once the run has begun; there it raises again, or not
    fixed = generators.same_global_state(before) and not resuming and not resumes(trainer)
    if not fixed:
        state.restore()
    read = read_by(source)
    peeked = _Peeked()
    if trainer.strategy.groups.world.tells():
        with generators.kept([loader]):
            peeked = _peek(loader, trainer.state.fn.value, namespace)

    def request_again() -> Any:
        vars(source).pop("dataloader", None)
        return peeked.put_back(loader if fixed and read == read_by(source) else source.dataloader())

    combined = _combined(loader, trainer.state.fn.value, namespace)
    source.dataloader = _Again(request_again, _count(combined), combined.iterables)
    return peeked


def _state(module: Any, source: Any) -> Snapshot:
    """What the user's hook may change, which is put back where the hook is called again."""
    if not source.is_module():
        return Snapshot([])
    state = Snapshot(
        [(f"self.{name}" if name else "self", m) for name, m in module.named_modules()], packages_of(module)
    )
    state.add("data", source.instance)
    return state


@dataclass(frozen=True)
class _Again:
    """What Lightning asks for the loader, later."""

    request: Callable[[], Any]
    loaders: int
    given: Any  # what the user's hook gave

    def __call__(self) -> Any:
        return self.request()


def _count(combined: Any) -> int:
    return len(combined.flattened) if mode_of(combined) == "sequential" else 1


def _combined(loaders: Any, entry: str, namespace: Namespace) -> Any:
    combined_loader = namespace.from_pytorch("utilities.combined_loader", "CombinedLoader")
    mode = "max_size_cycle" if entry == "fit" else "sequential"
    return loaders if isinstance(loaders, combined_loader) else combined_loader(loaders, mode)


def _skips(trainer: Any, module: Any) -> bool:
    stage = {"fit": "train", "validate": "val"}.get(trainer.state.fn.value, trainer.state.fn.value)
    return getattr(trainer, f"limit_{stage}_batches") == 0


@dataclass(frozen=True)
class _Refused:
    """Travels in the place of a batch."""

    reason: str


@dataclass
class _Peeked:
    """What was seen, and the streams that had to begin for it."""

    batch: Any = None
    begun: Replaced = field(default_factory=list)
    combine: Callable[[Any], Any] | None = None

    def put_back(self, loader: Any) -> Any:
        """``loader``, with streams that have begun going on."""
        if not self.begun or self.combine is None:
            return loader
        combined = self.combine(loader)
        combined.flattened = [self._restored(leaf) for leaf in combined.flattened]
        return combined

    def _restored(self, loader: Any) -> Any:
        for stream, begun in self.begun:
            if loader is stream:
                return begun
            if isinstance(loader, DataLoader) and loader.dataset is stream:
                object.__setattr__(loader, "dataset", begun)  # DataLoader forbids the plain assignment
        return loader


def _peek(loader: Any, entry: str, namespace: Namespace) -> _Peeked:
    combined_loader = namespace.from_pytorch("utilities.combined_loader", "CombinedLoader")

    peeked = _Peeked(combine=lambda loaders: _combined(loaders, entry, namespace))
    combined = _combined(loader, entry, namespace)
    sequential = mode_of(combined) == "sequential"
    may_begin = entry != "predict"  # there Lightning makes DataLoaders anew, from the arguments they were made with
    batches = []
    for one in combined.flattened:
        try:
            batch = first_batch(one, may_begin, peeked.begun)
        except NoBatchError:
            if sequential:
                continue
            return peeked
        except UnrepeatableError as error:
            peeked.batch = _Refused(str(error))
            return peeked
        except Exception as error:
            _log.warning("The first batch could not be read before the run: %s: %s", type(error).__name__, error)
            return peeked
        if sequential:
            peeked.batch = batch
            return peeked
        batches.append(batch)
    if batches:
        shape_of = combined_loader(combined.iterables)
        shape_of.flattened = batches
        peeked.batch = shape_of.iterables
    return peeked
