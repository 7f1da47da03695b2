"""Hooks of the user's on the calls of units and on gradients: ranks have the same, and learn of new ones together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import compress

from torch import nn

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.handshake import Meeting
from lightning_par.private.leaf_hooks import hooked, number_of_leaf_hooks
from lightning_par.private.modes import DisableTorchFunctionSubclass
from lightning_par.private.module_hooks import (
    backward_hooks_on_all,
    has_hooks,
    hooks_on_all,
    may_have_hooks,
    number_of_backward_hooks,
    number_of_hooks,
)
from lightning_par.python_state.registered_hooks import HookHolders, HooksCell

ADVICE = "Register and remove hooks on all ranks alike, and let one rank alone use what they keep."
"""What to do where ranks have other hooks."""


class Hooks:
    """How many hooks there are on the modules within units, as all ranks know it.

    Args:
        module: the LightningModule, spread.
        units: the FQNs of its units.
        axis: the pipeline axis.
        meeting: of its ranks.

    Attributes:
        known: the modules that have some, with their number.

    Example::

        hooks.agree()  # on all ranks, before each step
    """

    def __init__(self, module: nn.Module, units: Collection[str], axis: Axis, meeting: Meeting) -> None:
        self.axis, self.meeting = axis, meeting
        self.known: tuple[tuple[str, int], ...] = ()
        within = {id(m) for unit in units for m in module.get_submodule(unit).modules()}
        self._modules = [(name, m, id(m) in within) for name, m in module.named_modules()]
        self._parameters = [*module.named_parameters()]
        self._first = True
        self._cell = HooksCell(HookHolders(module))

    @property
    def on_parameters(self) -> bool:
        return any(name.startswith("the parameter ") for name, _ in self.known)

    @property
    def on_backwards(self) -> bool:
        """Whether some meet gradients of modules' inputs or outputs."""
        return any(name.startswith("the backward of ") for name, _ in self.known)

    def agree(self) -> None:
        """See whether hooks have come or gone. All ranks must call it; they talk at first, and where there are some.

        A hook that removes itself as its layer runs is gone on the rank of the layer alone: the others remove theirs.

        Raises:
            RuntimeError: they came on some ranks alone.
        """
        now = self.now()
        if self._first:
            self._first = False
            self._compare(self.axis.all_gather_object(now, "hooks"))
        elif self.known or now:
            if self.known:
                self.meeting("came to a step with hooks", ADVICE)
            else:  # the others know of none, and may not come
                self.meeting.at_any_time(f"came to a step with hooks {words(now)}", ADVICE)
            told = self.axis.all_gather_object((now != self.known, self._cell.removed()), "hooks")
            if any(moved for moved, _ in told):
                for _, removed in told:
                    self._cell.remove(removed)
                now = self.now()
                self._compare(self.axis.all_gather_object(now, "hooks"))
        if self.known or now:
            self._cell.renew(())
        self.known = now

    def _compare(self, told: Sequence[tuple[tuple[str, int], ...]]) -> None:
        for rank, theirs in enumerate(told):
            if theirs != told[0]:
                raise RuntimeError(
                    f"Hooks on modules are on pipeline rank 0 {words(told[0])}, and on rank {rank} "
                    f"{words(theirs)}. Each would see the modules of its rank alone. {ADVICE}"
                )

    def any_of(self, reason: str | None, may_differ: bool = False) -> str | None:
        """The ``reason`` of the first rank that has one, where hooks, or what else ``may_differ``, go by the rank.

        All ranks must call it.
        """
        if not self.known and not may_differ:
            return reason
        self.meeting("studied a step anew", "Let all ranks do the same in a step.")  # one alone would wait for ever
        return next((told for told in self.axis.all_gather_object(reason, "hooks") if told), None)

    def now(self) -> tuple[tuple[str, int], ...]:
        """The modules that have some now, with their number."""
        modules = [*compress(self._modules, may_have_hooks([m for _, m, _ in self._modules]))]  # most have none
        found = [(name, number_of_hooks(m)) for name, m, within in modules if within and has_hooks(m)]
        found += [(f"the backward of {name}", n) for name, m, _ in modules if (n := number_of_backward_hooks(m))]
        with DisableTorchFunctionSubclass():  # weights of other stages would ask who reads
            parameters = hooked(self._parameters)
            found += [(f"the parameter {name}", n) for name, p in parameters if (n := number_of_leaf_hooks(p))]
        everywhere, backwards = len(hooks_on_all()), len(backward_hooks_on_all())
        found += [("all modules", everywhere)] * (everywhere > backwards)
        return (*found, *[("the backward of all modules", backwards)] * bool(backwards))


def words(hooks: tuple[tuple[str, int], ...]) -> str:
    """Where ``hooks`` are, by module and number."""
    if not hooks:
        return "nowhere"
    return "on " + ", ".join(name if count == 1 else f"{name} ({count})" for name, count in hooks)
