"""Buffers of units in the step's own code, which may do no more with them than update weights and buffers by them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.pipeline.program.program import Key, StepEvent, makers_of
from lightning_par.pipeline.trial.side_inputs import UnitError
from lightning_par.private.fake_tensors import FakeTensorMode
from lightning_par.private.modules import buffers_of
from lightning_par.python_state.nested_tensors import map_tensors, tensors_in
from lightning_par.sharded.rules.lookup import user_line


class UnitBuffers:
    """Stand-ins of the buffers of units, as values of the model: one rank alone has what these hold in a step.

    Args:
        copy: of the module, that is recorded.
        units: their paths.
        mode: of the stand-ins.
        made: called with each stand-in, and the name of its buffer.

    Attributes:
        units: by id, the buffers, with the unit of each.

    Example::

        buffers = UnitBuffers(copy, ["net.0.1"], FakeTensorMode(), lambda x, name: names.update({id(x): name}))
        (x,), _ = buffers.stood_in((copy.net[0][1].running_mean,), {})
    """

    def __init__(
        self, copy: nn.Module, units: Collection[str], mode: FakeTensorMode, made: Callable[[Tensor, str], None]
    ) -> None:
        self._copy, self._mode, self._made = copy, mode, made
        self.units = {id(b): path for path in units for b in copy.get_submodule(path).buffers()}
        self._names = {id(b): name for name, b in copy.named_buffers() if id(b) in self.units}
        self._stand_ins: dict[int, Tensor] = {}
        self._behind: dict[int, Tensor] = {}  # by id of a stand-in: the buffer

    def stood_in(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What a function of the step's own code is given, with stand-ins in it.

        Raises:
            UnitError: a buffer in it has been replaced since by its unit, on whose rank alone it is there.
        """
        if self.units.keys().isdisjoint(map(id, tensors_in((args, kwargs)))):
            return args, kwargs
        return map_tensors(self._for, args), map_tensors(self._for, kwargs)

    def handed_back(self, result: Any) -> Any:
        """What a function returns that has written into its first argument: the buffer itself, to which ``+=`` sets the
        attribute that it was taken from."""
        return self._behind.get(id(result), result)

    def _for(self, x: Tensor) -> Tensor:
        unit = self.units.get(id(x))
        if unit is None:
            return x
        name = self._names[id(x)]
        path, _, own = name.rpartition(".")
        if buffers_of(self._copy.get_submodule(path)).get(own) is not x:
            raise _error(user_line(), unit)
        if id(x) not in self._stand_ins:
            with self._mode:
                fake = torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device=x.device)
            self._stand_ins[id(x)], self._behind[id(fake)] = fake, x
            self._made(fake, name)
        return self._stand_ins[id(x)]

    def by_unit(self) -> dict[str, list[str]]:
        """The names of the buffers of which there are stand-ins, by unit."""
        found: dict[str, list[str]] = defaultdict(list)
        for key in self._stand_ins:
            found[self.units[key]].append(self._names[key])
        return found

    def check_outside(self, given: Any) -> None:
        """A unit, a log, or what reads values, is given ``given`` by the step's own code.

        Raises:
            UnitError: a buffer of a unit is in it, which other ranks don't have.
        """
        unit = next((self.units[id(x)] for x in tensors_in(given) if id(x) in self.units), None)
        if unit is not None:
            raise _error(user_line(), unit)

    def refuse_read(
        self, keys: Iterable[Key | None], uses: Sequence[tuple[str, int]], events: Sequence[StepEvent]
    ) -> None:
        """Refuse that the step goes on by values which are made of buffers: a trial has stand-ins of these alone.

        Raises:
            UnitError: one of the values ``keys`` is made of one.
        """
        if self._stand_ins:
            makers = set[int]().union(*(makers_of(events, key[0]) for key in keys if key is not None))
            self.refuse_uses([use for use in uses if use[1] in makers], events)

    def refuse_uses(self, uses: Sequence[tuple[str, int]], events: Sequence[StepEvent]) -> None:
        """Refuse what is left of ``uses`` of parameters and buffers, by event, once updates are set apart.

        Raises:
            UnitError: a buffer is among them.
        """
        names = {self._names[key]: self.units[key] for key in self._stand_ins}
        for name, index in uses:
            if name in names:
                raise _error(events[min(index, len(events) - 1)].place, names[name])


def _error(place: str, unit: str) -> UnitError:
    return UnitError(
        f"{place}: the step uses a buffer of {unit!r} outside of its forward. Other stages of the pipeline don't have "
        "it. Use it in the forward of the module that it belongs to, update it where nothing else of the step uses it, "
        "as in on_train_batch_start, or use TensorParallelStrategy.",
        unit,
    )
