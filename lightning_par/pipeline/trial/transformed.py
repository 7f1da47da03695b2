"""A function of the user's that is transformed, as by ``torch.vmap``: one event, whatever it does and closes over."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_par.pipeline.plan.no_schedule import NoScheduleError
from lightning_par.pipeline.program.program import is_located
from lightning_par.pipeline.trial.step_values import StepValues
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.sharded.rules.lookup import user_line


class ClosesOverModelError(Exception):
    """A transformed function that is given tensors of the batch alone uses parameters, too."""


class Transformed:
    """What a transformed function may use.

    Args:
        given: its arguments.

    Attributes:
        given: ids of the tensors that it is given.
        takes: whether it depends on the model.
    """

    def __init__(self, given: Any) -> None:
        inputs = tensors_in(given)
        self.given = {id(x) for x in inputs}
        self.takes = any(map(is_located, inputs))

    def closes_over(self, x: Tensor, values: StepValues) -> bool:
        """Whether ``x``, which it uses, is a parameter that it was not given.

        Raises:
            ClosesOverModelError: that was not known.
            NoScheduleError: it is another value of the model.
        """
        known = values.is_parameter(x) or id(x) in values.keys
        if not is_located(x) or id(x) in self.given or not known:
            return False
        if not self.takes:
            raise ClosesOverModelError
        if not values.is_parameter(x):
            raise NoScheduleError(
                f"{user_line()}: a function that is given to torch.vmap or torch.func uses a value of the model that "
                "may be on another stage of the pipeline. Hand it over as an argument: "
                "torch.vmap(f, in_dims=(0, None))(x, value)."
            )
        return True
