"""Values that a step tells, keeps, or writes into its buffers: a pipeline takes them to its last stage, which tells the
others of them as the step ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from lightning_par.private.modes import no_modes
from lightning_par.private.storage import memory_of
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.sharded.functions import writes_into
from lightning_par.sharded.rules.gather_report import user_line
from lightning_par.trial.fake_functions import is_fake
from lightning_par.trial.recording import metric_update

if TYPE_CHECKING:
    from lightning_par.planner.recording.recorded import RecordedStep


class Told(NamedTuple):
    """A value that is told or kept.

    Attributes:
        value: its id.
        path: of the module whose call tells it, or that keeps it.
    """

    value: int
    path: str


def hear_told(copy: nn.Module, tell: Callable[[Any], None]) -> None:
    """``tell`` is called with what ``copy``, a trial's LightningModule, logs and prints from now on."""
    if not hasattr(copy, "automatic_optimization"):
        return

    @no_modes()
    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        tell(value)

    @no_modes()
    def log_dict(values: Any, *args: Any, **kwargs: Any) -> None:
        tell(dict(values))

    @no_modes()
    def print_(*args: Any, **kwargs: Any) -> None:
        tell((args, kwargs))

    vars(copy).update(log=log, log_dict=log_dict, print=print_)


def hear_gathers(copy: nn.Module, tell: Callable[[str], None]) -> None:
    """``tell`` is called with the lines at which ``copy``, a trial's LightningModule, gathers what replicas have."""
    gathers = getattr(copy, "all_gather", None)
    if gathers is None or not hasattr(copy, "automatic_optimization"):
        return

    def all_gather(*args: Any, **kwargs: Any) -> Any:
        tell(user_line())
        return gathers(*args, **kwargs)

    vars(copy).update(all_gather=all_gather)


def kept_by(copy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The values that attributes of modules hold as the step ends, each with the name of the module."""
    for path, module in copy.named_modules():
        for value in vars(module).values():
            for x in tensors_in(value):
                if is_fake(x) and not isinstance(x, nn.Parameter):
                    yield path, x


def told_values(step: RecordedStep, units: Callable[[str], bool], outside: Callable[[int], bool]) -> frozenset[int]:
    """Ids of the values of the model that count as ``step`` ends.

    Args:
        step: as recorded.
        units: whether a module, by its name, is a unit or lies in one.
        outside: whether an event, by its number, is of no unit.
    """
    found = {told.value for told in step.recording.heard.told if not units(told.path)}
    own = {memory_of(x) for x in (*step.recording.parameters.values(), *step.recording.batch)}
    for number, event in enumerate(step.events):
        into = event.args[:1] if writes_into(event.name) else ()
        for x in tensors_in(into):
            if memory_of(x) not in own and outside(number):
                found.add(id(x))  # the memory of a buffer
        if event.func is metric_update and outside(number):
            found.update(id(x) for x in event.inputs)
        given = {memory_of(x) for x in event.inputs}
        own.update(memory for x in event.outputs if (memory := memory_of(x)) not in given)
    return frozenset(found & step.of_model)
