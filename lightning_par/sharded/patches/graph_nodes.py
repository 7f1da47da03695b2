"""``x.grad_fn``: what user code puts on a node of autograd's graph meets what it would on one device, or is refused."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from lightning_par.private.module_hooks import begins_module, is_module_end, module_that_marks_ends
from lightning_par.sharded.graph_node import as_asked
from lightning_par.sharded.patches.replacement import Replacement, Use


def patch() -> Replacement:
    """Of `torch.Tensor.grad_fn`. Sharded tensors have their own."""
    return Replacement(Tensor, "grad_fn", _asked)


class _NoNode:
    """What torch finds as the end of a module that another stage of a pipeline calls, where it is hooked."""

    def name(self) -> str:
        return "BackwardHookFunctionBackward"

    def register_hook(self, hook: Any) -> None:
        """That stage does it."""


def of_another_stage(module: nn.Module) -> _NoNode:
    """What the hooks of ``module`` find as its end here, where another stage calls it.

    Raises:
        NotImplementedError: it has layers, which may be on several.
    """
    if any(True for _ in module.parameters()):
        raise taken_apart(module)
    return _NoNode()


def taken_apart(module: nn.Module) -> Exception:
    """What to say of a ``module`` with full backward hooks whose ends are in two stages."""
    return NotImplementedError(
        f"A {type(module).__name__} has a full backward hook, and its layers are taken apart by the pipeline, so "
        "that no rank has both of its ends. Register it on the layers, or use TensorParallelStrategy."
    )


def _asked(plain: Any, use: Use) -> Any:
    from lightning_par.pipeline.run.located import Run

    @property  # type: ignore[misc]
    def grad_fn(self: Tensor) -> Any:
        node = plain.__get__(self)
        if not use.on:
            return node
        asker = sys._getframe(1)
        hooked = module_that_marks_ends(asker)
        if hooked is not None and Run.current is not None and (begins := begins_module(asker)) is not None:
            Run.current.module_end(hooked, begins)
        if hooked is not None and Run.current is not None and not is_module_end(node):
            return of_another_stage(hooked)
        return as_asked(node, self, asker)

    return grad_fn
