"""Tensors that an optimizer trains and that are no parameters of the module: nobody syncs their gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_par.optim.stand_ins import with_inner


def refuse_unregistered(optimizer: Any, module: nn.Module) -> None:
    """To be called where several ranks have gradients of the module's parameters that are synced, or sent.

    Raises:
        ValueError: ``optimizer`` trains something else, which each rank would train by what it has of the gradient.

    Example::

        refuse_unregistered(torch.optim.SGD(module.parameters(), lr=0.1), module)
    """
    known = {id(p) for p in module.parameters()}
    groups = [group for one in with_inner(optimizer) for group in getattr(one, "param_groups", ())]
    for x in [x for group in groups for x in group["params"]]:
        if id(x) not in known and x.requires_grad and x.is_leaf:
            raise ValueError(
                f"{type(optimizer).__name__} trains {_name(x, module)} of shape {tuple(x.shape)}, which is no "
                f"parameter of {type(module).__name__}: each rank would train it by its own part of the gradient. "
                "Assign it to an attribute of a module as an nn.Parameter, and layers as they are or in an "
                "nn.ModuleList, so that module.parameters() has it."
            )


def _name(x: Tensor, module: nn.Module) -> str:
    places = ((path, name) for path, m in module.named_modules() for name, held in vars(m).items() if held is x)
    path, name = next(places, ("", ""))
    return f"`self.{path}{'.' * bool(path)}{name}`" if name else "a tensor"
