"""What code that runs within a unit reaches, the user's own or hooks on its modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import nn

from lightning_par.private.lightning_modules import trainer_of
from lightning_par.private.metrics import has_states
from lightning_par.private.module_hooks import hooks_on, hooks_on_all
from lightning_par.python_state.reachable import Reach
from lightning_par.python_state.snapshot import Snapshot
from lightning_par.python_state.user_code import is_users_code

if TYPE_CHECKING:
    from lightning_par.pipeline.effects.watched_run import Watch


def users_within(unit: nn.Module, path: str, packages: frozenset[str]) -> list[tuple[str, nn.Module]]:
    """The modules in ``unit`` in which code of the user's runs, their own or hooks on them; and its metrics."""
    return [
        (name, m)
        for name, m in unit.named_modules(prefix=path)
        if is_users_code(type(m).__module__, packages) or hooks_on(m) or has_states(m)
    ]


def is_within(name: str, units: Iterable[str]) -> bool:
    """Whether the object called ``name`` is one of ``units``, or held by one."""
    return any(name == unit or name.startswith((f"{unit}.", f"{unit}[")) for unit in units)


_SAYING = frozenset("log log_dict print logger loggers log_metrics experiment".split())


def may_say(watch: Watch) -> bool:
    """Whether code in a unit reaches the LightningModule, the trainer or a logger, and names what logs, though no trial
    has met a log: as every hundredth step, or where a value is no number."""
    module, trainer = watch.lightning_module, trainer_of(watch.lightning_module)
    loggers = () if trainer is None else trainer.loggers
    apart = {id(module): "self", id(trainer): "trainer", **{id(logger): "logger" for logger in loggers}}
    for path in watch.units:
        inner = users_within(module.get_submodule(path), path, watch.packages)
        if not inner and not hooks_on_all():
            continue
        reach = Reach(watch.packages, apart)
        reach.add_modules(inner)
        if reach.names.keys().isdisjoint(apart):
            continue
        reach.add("kind", type(module))  # whose methods may log
        if not reach.words.isdisjoint(_SAYING):
            return True
    return False


LENT = "argument "
"""What the names of modules that a unit is given begin with."""


def add_hooks(state: Snapshot, modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Look at what the user's hooks on ``modules`` hold."""
    for name, m in modules:
        for n, hook in enumerate(hooks_on(m)):
            state.add(f"hook {n} of {name}", hook)


def state_of(unit: nn.Module, path: str, packages: frozenset[str], lent: Sequence[nn.Module] = ()) -> Snapshot | None:
    """All that code which runs in a unit reaches, modules ``lent`` to it too; None if none of it is the user's."""
    inner = users_within(unit, path, packages)
    if not inner and not hooks_on_all():
        return None
    state = Snapshot([], packages)
    add_hooks(state, inner)
    state.add_units(inner)
    state.add_modules([(f"{LENT}{n} of {path}", m) for n, m in enumerate(lent)])
    return state.compare_contents()
