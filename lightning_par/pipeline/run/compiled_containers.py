"""Modules that the user compiled and that are cut over stages: each of their units is compiled in their place.

No graph goes across messages, so what such a module does itself runs as it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any

from torch import nn

from lightning_par.pipeline.run.located import Run
from lightning_par.private.compiler import Compiler, compiler_of, compiler_of_function, is_compiled_wrapper, uncompiled
from lightning_par.private.module_calls import drop_calls, get_call, plain_call, reset_call, set_call, set_inner_call


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

    def __init__(self, original: Any, compiler: Compiler) -> None:
        self.original = original
        self.compiled = compiler(original)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)


def _compiled(plain: Callable[..., Any], compiler: Compiler) -> Callable[..., Any]:
    by_itself = isinstance(plain, FunctionType) and compiler_of_function(plain) is not None
    return plain if by_itself else _CompiledUnit(plain, compiler)


def compile_units(module: nn.Module, units: Collection[str], whole: Compiler | None = None) -> None:
    """Compile the ``units`` in compiled modules, in place of these. To be called before units are intercepted.

    Args:
        module: the LightningModule.
        units: the modules that are called as a whole.
        whole: what compiled ``module`` itself, if anything.
    """
    inner = {id(unit): unit for path in units for unit in module.get_submodule(path).modules()}
    compilers = {} if whole is None else dict.fromkeys(units, whole)
    paths = {id(module.get_submodule(path)): path for path in units}
    for container in [*module.modules()]:  # the outer before the inner
        compiler = None if id(container) in inner else compiler_of(container)
        if compiler is not None:
            compilers.update({paths[id(m)]: compiler for m in container.modules() if id(m) in paths})
            set_call(container, _AsWritten(container))
    for path, compiler in compilers.items():
        unit = module.get_submodule(path)
        if not is_compiled_wrapper(unit):
            set_inner_call(unit, lambda plain, compiler=compiler: _compiled(plain, compiler))  # type: ignore[misc]


def restore_calls(module: nn.Module) -> None:
    """Undo `compile_units`, after units were released."""
    for m in module.modules():
        call = get_call(m)
        if isinstance(call, _AsWritten):
            reset_call(m, call.plain)
        drop_calls(m, _CompiledUnit)
