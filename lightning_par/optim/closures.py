"""The closures among what an optimizer's step is given: functions that evaluate the loss anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Call = Callable[..., Any]


def with_closures(new: Callable[[Call], Call], args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """``args`` and ``kwargs`` with ``new(closure)`` for each closure in them; a module or a class is none.

    Example::

        args, kwargs = with_closures(torch.enable_grad(), (closure,), {"scale": 2.0})
    """

    def changed(x: Any) -> Any:
        return new(x) if callable(x) and not isinstance(x, (nn.Module, type)) else x

    return tuple(map(changed, args)), {name: changed(x) for name, x in kwargs.items()}
