"""What a trial run finds where optimizers, their schedules and loggers are: it may read numbers, and nothing happens.

The numbers are those that the step will find: of the optimizers that there are, or, before there are any, of those that
the copy of the module configures for its own fake parameters.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_par.private.modes import no_modes
from lightning_par.private.pytree import tree_leaves

_PLAIN = (bool, int, float, str)


class Stand:
    """Takes the place of a logger or an optimizer: whatever is asked of it, nothing happens.

    Args:
        kind: the class of what it stands for, which `isinstance` finds, as with Lightning's own wrappers.
    """

    def __init__(self, kind: type | None = None) -> None:
        vars(self)["_kind"] = kind

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        return vars(self).get("_kind") or type(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # `optimizer.step(closure)` runs the closure, whose events count.
        for value in (*args, *kwargs.values()):
            if callable(value) and not isinstance(value, (Stand, Tensor, nn.Module)):
                return value()
        return self

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *exception: Any) -> None: ...

    def __iter__(self) -> Any:
        return iter(())

    def __getitem__(self, key: Any) -> Any:
        return self

    def __float__(self) -> float:
        return 1.0

    def __mul__(self, other: Any) -> Any:
        return other * 1.0

    __rmul__ = __mul__


class HeldLogger(Stand):
    """Takes the place of a logger of the trainer's that code holds by itself; ``asked`` hears of calls."""

    def __init__(self, kind: type | None = None) -> None:
        super().__init__(kind)
        self.asked: Callable[[], None] = lambda: None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.asked()
        return super().__call__(*args, **kwargs)


class OptimizerStand(Stand):
    """An optimizer that does nothing, and has the groups of parameters of a real one."""

    def __init__(self, groups: list[dict[str, Any]], kind: type | None = None) -> None:
        super().__init__(kind)
        self.param_groups = groups


class ScheduleStand(Stand):
    """A learning rate schedule that does nothing, and has the numbers of a real one."""

    def __init__(self, real: Any) -> None:
        super().__init__(type(real))
        vars(self).update({name: x for name, x in vars(real).items() if isinstance(x, _PLAIN)}, scheduler=self)
        vars(self).update({name: [*x] for name, x in vars(real).items() if _is_list_of_numbers(x)})
        with contextlib.suppress(Exception):  # one of the user's own may have none
            rates = [*real.get_last_lr()]
            vars(self).update(_last_lr=rates, get_last_lr=lambda: [*rates])


class Optimizers:
    """What stands for the optimizers of a copy of a module, and for their schedules, found when they are asked for.

    Args:
        module: the copy.
        real: gives the optimizers and the schedules that there are by now.
        copies: of parameters, by the ids of the real ones.
        wrapper: Lightning's class of optimizers, of which they are, too, in steps.

    Example::

        optimizers = Optimizers(copy, lambda: ([], []), {}, LightningOptimizer)
        assert optimizers.optimizers[0].param_groups[0]["lr"] == 0.1
    """

    def __init__(
        self,
        module: Any,
        real: Callable[[], tuple[list[Any], list[Any]]],
        copies: Mapping[int, Any],
        wrapper: type | None,
    ) -> None:
        self._module, self._real, self._copies, self._wrapper = module, real, copies, wrapper
        self._found: tuple[list[Any], list[Any]] | None = None

    @property
    def optimizers(self) -> list[Any]:
        return self._stands()[0]

    @property
    def schedules(self) -> list[Any]:
        return self._stands()[1]

    def _stands(self) -> tuple[list[Any], list[Any]]:
        if self._found is None:
            with no_modes():
                optimizers, schedules = self._real()
                if not optimizers:
                    optimizers, schedules = self._configured()
                # here, as a rate may be a tensor: its copy is no function of the step's
                stands = [OptimizerStand([*self._groups(x)], self._wrapped(type(x))) for x in optimizers]
            self._found = (stands, [*map(ScheduleStand, schedules)]) if stands else ([Stand()], [Stand()])
        return self._found

    def _wrapped(self, kind: type) -> type:
        """The class of an optimizer of ``kind`` as Lightning's wrapper makes it."""
        return kind if self._wrapper is None else type(f"Lightning{kind.__name__}", (self._wrapper, kind), {})

    def _configured(self) -> tuple[list[Any], list[Any]]:
        try:
            parts = tree_leaves(self._module.configure_optimizers())
        except Exception:  # user code on fake parameters
            return [], []
        optimizers = [x for x in parts if hasattr(x, "param_groups")]
        return optimizers, [x for x in parts if hasattr(x, "get_last_lr") and not hasattr(x, "param_groups")]

    def _groups(self, optimizer: Any) -> Iterator[dict[str, Any]]:
        for group in optimizer.param_groups:
            own = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            yield {**own, "params": [self._copies.get(id(p), p) for p in group["params"]]}


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(x, _PLAIN) for x in value)


def numbers_of(optimizers: list[Any]) -> tuple[Any, ...]:
    """The plain numbers of the groups of ``optimizers``, by which a step may go."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return tuple((key, x) for group in groups for key, x in group.items() if isinstance(x, _PLAIN))
