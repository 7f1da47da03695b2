"""What a step did, where no other rank is there to hear of it or to tell, as in a dry run.

Every rank has run the step's own code without any values of the model, so that it knows in what form those arrive that
the source sends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_par.mesh.axis import Axis
from lightning_par.mesh.known_objects import Known
from lightning_par.pipeline.effects.console import Said
from lightning_par.pipeline.effects.logged_outputs import OutputRecorder, Recorder
from lightning_par.pipeline.trial.placeholders import AbsentNumber
from lightning_par.private.fake_tensors import FakeTensor, active_fakes
from lightning_par.python_state.changes import Change, MappingChange
from lightning_par.python_state.nested_tensors import map_tensors
from lightning_par.python_state.referents import holds
from lightning_par.sharded.aliases.frames import innermost

if TYPE_CHECKING:
    from lightning_par.pipeline.effects.effects import Effects

_VALUE = "a value"


class WithoutValues(Known):
    """As ``known``, to which what stands for values is known, too: those can always be sent.

    Args:
        known: what all ranks have.
        names: of the objects that it has, by their ids here.

    Example::

        assert pack(fake, device, True, WithoutValues(Known(), {})).tensors == []
    """

    def __init__(self, known: Known, names: Mapping[int, str]) -> None:
        super().__init__(names)
        self._known = known

    def name_of(self, value: Any) -> str | None:
        name = self.names.get(id(value))
        if name is not None and (name in self.objects or name in self._known.objects):
            return name
        stands = isinstance(value, FakeTensor) or _is_absent(value)
        return self._known.name_of(value) or (_VALUE if stands else None)

    def named(self, name: str) -> Any:
        return None if name == _VALUE else self.objects[name] if name in self.objects else self._known.named(name)


class AbsentRecorder(OutputRecorder):
    """Notes what a run without values says, as it is, and tells another recorder, if there is one.

    Args:
        module: the LightningModule.
        effects: where it is noted.
        names: gives the names of watched objects by id.
        other: the other recorder.
    """

    def __init__(
        self, module: nn.Module, effects: Effects, names: Callable[[], dict[int, str]], other: Recorder | None
    ) -> None:
        super().__init__(module, effects.logs, effects.said, names)
        self._other = other

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        super().log(name, value, *args, **kwargs)
        if self._other is not None:
            self._other.log(name, value, *args, **kwargs)

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._other is not None:
            self._other.print(*args, **kwargs)

    def hear(self, said: Said) -> None:
        self.said.append(said)
        if self._other is not None:
            self._other.hear(said)

    def _logged(self, name: str, value: Any) -> Any:
        return value if isinstance(value, Tensor) else super()._logged(name, value)


def sent_alone(here: Effects, axis: Axis, source: int, known: Known) -> Effects:
    """What arrives of ``here``, which is what the source did, or what this rank did without values in its place."""
    axis.broadcast_object(None, "effects", source)
    mine = axis.rank == source

    def arrived(x: Tensor) -> Tensor:
        if known.name_of(x) not in (None, _VALUE):
            return x
        x = x.detach() if mine else torch.zeros(tuple(x.shape), dtype=x.dtype, device=x.device)
        return axis.broadcast_(x, "effects", source)

    told: Effects = map_tensors(arrived, replace(here, names={}, kept=[]))
    if mine:
        return told
    state = {name: kept for name, change in told.state.items() if (kept := _of_this_run(change)) is not None}
    return replace(told, logs=[x for x in told.logs if not _stands(x)], said=[], state=state)


def _of_this_run(change: Change) -> Change | None:
    """``change`` without what holds stand-ins of the run without values, where they are not seen; None if it does."""
    if isinstance(change, MappingChange):
        return replace(change, entries={key: x for key, x in change.entries.items() if not _stands(x)})
    return None if _stands(change) else change


def _stands(value: Any) -> bool:
    return holds(value, _is_absent)


def _is_absent(x: Any) -> bool:
    """Whether ``x`` stands for a value in a run without values, whose fakes are those of a trial."""
    if isinstance(x, AbsentNumber):
        return True
    held = innermost(x) if isinstance(x, Tensor) else None
    return isinstance(held, FakeTensor) and held.fake_mode is not active_fakes()
