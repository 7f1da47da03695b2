"""Modules that the user compiled and that can't be one graph: their layers are compiled one by one in their place.

No graph goes across the messages of a step, so what such a module does itself runs as it is written. It is the
LightningModule itself, of ``Trainer.fit(torch.compile(module))``, or one that is cut over stages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_par.pipeline.run.located import Run
from lightning_par.private.compiler import (
    Compiler,
    compiler_of,
    compiler_of_function,
    is_compiled_wrapper,
    own_frame,
    uncompiled,
)
from lightning_par.private.module_calls import (
    drop_calls,
    get_call,
    is_within_call,
    plain_call,
    reset_call,
    set_call,
    set_inner_call,
)
from lightning_par.strategies.part import Part

if TYPE_CHECKING:
    from lightning_par.strategies.namespace import Namespace
    from lightning_par.trial.first_step import FirstStep


class _AsWritten:
    """The call of a module that is cut over stages."""

    def __init__(self, module: nn.Module) -> None:
        self.plain = plain_call(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copy of the module is called as it is

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if Run.current is not None:  # there all that is not in units runs so
            return self.plain(*args, **kwargs)
        with uncompiled():
            return self.plain(*args, **kwargs)


class _CompiledUnit:
    """The call of a unit, compiled as the module around it was."""

    def __init__(self, unit: nn.Module, original: Callable[..., Any], compiler: Compiler) -> None:
        self.original = original
        self.compiled = compiler(own_frame(original, unit.forward))

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)


def _compiled(unit: nn.Module, compiler: Compiler, plain: Callable[..., Any]) -> Callable[..., Any]:
    by_itself = isinstance(plain, FunctionType) and compiler_of_function(plain) is not None
    return plain if by_itself else _CompiledUnit(unit, plain, compiler)


def compile_units(module: nn.Module, units: Collection[str], whole: Compiler | None = None) -> list[str]:
    """Compile the ``units`` in compiled modules, in place of these. To be called before units are intercepted.

    Args:
        module: the LightningModule.
        units: the modules that are called as a whole.
        whole: what compiled ``module`` itself, if anything.

    Returns:
        The names of the compiled modules that run as written but for units.
    """
    inner = {id(unit): unit for path in units for unit in module.get_submodule(path).modules()}
    compilers = {} if whole is None else dict.fromkeys(units, whole)
    paths = {id(module.get_submodule(path)): path for path in units}
    cut = []
    for name, container in [*module.named_modules()]:  # the outer before the inner
        compiler = None if id(container) in inner else compiler_of(container)
        if compiler is not None:
            cut.append(name)
            compilers.update({paths[id(m)]: compiler for m in container.modules() if id(m) in paths})
            set_call(container, _AsWritten(container))
    for path, compiler in compilers.items():
        unit = module.get_submodule(path)
        if not is_compiled_wrapper(unit):
            set_inner_call(unit, partial(_compiled, unit, compiler))
    return cut


class CompiledPart(Part):
    """The layers of a LightningModule that the user compiled.

    Args:
        compiler: what it was compiled by.
        namespace: whose Lightning it is.
        in_stages: whether each rank runs layers of its own, which are compiled where they are dealt out.
    """

    def __init__(self, compiler: Compiler, namespace: Namespace, in_stages: bool) -> None:
        self.compiler = compiler
        self.namespace = namespace
        self.in_stages = in_stages

    def check(self, trainer: Any, module: nn.Module) -> None:
        self.namespace.from_pytorch("utilities.rank_zero", "rank_zero_info")(
            f"{type(module).__name__} is compiled layer by layer, and its steps run as written: no graph can go across "
            "the messages between ranks."
        )

    def apply(self, first: FirstStep) -> None:
        if not self.in_stages:
            restore_calls(first.module)  # after a run that failed
            compile_units(first.module, [*_layers(first.module)], self.compiler)

    def undo(self, module: nn.Module, callbacks: Iterable[Any]) -> None:
        restore_calls(module)


def _layers(module: nn.Module, path: str = "") -> Iterator[str]:
    """The modules with parameters that are called as a whole: the outermost, within which no other call is set."""
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        inner = [m for m in child.modules() if m is not child]
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)) or any(map(is_within_call, inner)):
            yield from _layers(child, below)
        elif next(child.parameters(), None) is not None:
            yield below


def restore_calls(module: nn.Module) -> None:
    """Undo `compile_units`, after units were released."""
    for m in module.modules():
        call = get_call(m)
        if isinstance(call, _AsWritten):
            reset_call(m, call.plain)
        drop_calls(m, _CompiledUnit)
