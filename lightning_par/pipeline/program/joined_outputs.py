"""Whether what microbatches log, return and store can be put together to what the whole batch's step would have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from lightning_par.pipeline.effects.console import Said, SayingCall
from lightning_par.pipeline.effects.logged_outputs import Recorder
from lightning_par.pipeline.program.program import Key
from lightning_par.python_state.nested_tensors import tensors_in


class LoggedValues:
    """Takes what a dry run says, and tells another recorder, if there is one.

    Args:
        recorder: the other one.

    Attributes:
        logged: what was given to ``self.log`` and to loggers.
        printed: what was given to ``self.print``.

    Example::

        said = LoggedValues(None)
        said.log("loss", torch.ones(()))
        assert len(said.logged) == 1
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        self.logged: list[Any] = []
        self.printed: list[Any] = []

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self.logged.append(value)
        if self._recorder is not None:
            self._recorder.log(name, value, *args, **kwargs)

    def print(self, *args: Any, **kwargs: Any) -> None:
        self.printed.append(args)
        if self._recorder is not None:
            self._recorder.print(*args, **kwargs)

    def hear(self, said: Said) -> None:
        if isinstance(said, SayingCall):
            self.logged.append((said.args, said.kwargs))
        if self._recorder is not None:
            self._recorder.hear(said)


def unjoined(
    values: Iterable[Any], names: Mapping[int, Key], joins: frozenset[Key], is_state: Callable[[Tensor], bool]
) -> Key | None:
    """The first value of the model in ``values`` that is neither a sum over samples nor samples.

    Args:
        values: what a step logs, returns and stores.
        names: the model's values by the id of what stands for them.
        joins: those that can be joined.
        is_state: whether a tensor is held by the module.
    """
    for x in tensors_in([*values]):
        key = names.get(id(x))
        if key is None and is_state(x):
            key = (-1, 0)
        if key is not None and key not in joins:
            return key
    return None
