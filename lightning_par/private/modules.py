"""What modules keep of their weights and buffers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_par.private.dict_versions import version_of_dict

PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"
"""The attributes in which a module keeps its own; what is public walks those within, too, or hides what is None."""

parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter(PARAMETERS)
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter(BUFFERS)
modules_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter(MODULES)


def named_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """As ``[*module.named_modules()]``, which takes several times as long: its generators nest as modules do."""
    found: dict[int, tuple[str, nn.Module]] = {}
    return [*found.values()] if _add_modules(module, "", found) else [*module.named_modules()]


def _add_modules(module: nn.Module, name: str, found: dict[int, tuple[str, nn.Module]]) -> bool:
    """Whether no class says otherwise."""
    if type(module).named_modules is not nn.Module.named_modules:
        return False
    found[id(module)] = name, module
    prefix = f"{name}." if name else ""
    return all(
        child is None or id(child) in found or _add_modules(child, prefix + own, found)
        for own, child in module.__dict__[MODULES].items()
    )


def named_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """As ``[*module.named_parameters()]``; see `named_modules`."""
    if type(module).named_parameters is not nn.Module.named_parameters:
        return [*module.named_parameters()]
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for path, m in named_modules(module):
        for name, p in m.__dict__[PARAMETERS].items():
            if p is not None and id(p) not in found:
                found[id(p)] = f"{path}.{name}" if path else name, p
    return [*found.values()]


class ModuleTree:
    """`named_modules`, `named_parameters` and buffers of a module that is asked in every step: what is held by which
    module is compared with the last time, which takes a tenth of a walk.

    Args:
        module: the root.

    Example::

        tree = ModuleTree(module)
        assert tree.parameters() == [*module.named_parameters()]
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._modules: list[tuple[str, nn.Module]] = []
        self._within: list[nn.Module] = []
        self._kinds: list[type] = []
        self._classes: list[type] = []
        self._as_ever: list[Any] = []  # what `_walks` gives where no class says otherwise
        self._children = _Held(())
        self._parameters: tuple[list[tuple[str, nn.Parameter]], _Held] | None = None
        self._buffers: tuple[list[tuple[str, Tensor]], _Held] | None = None
        self._names: tuple[tuple[Any, ...], dict[int, str]] = (), {}

    def modules(self) -> list[tuple[str, nn.Module]]:
        """As ``[*module.named_modules()]``; the same list as before where nothing has changed."""
        if not self._is_as_it_was():
            self._modules, self._parameters, self._buffers = named_modules(self.module), None, None
            self._within = [m for _, m in self._modules]
            self._kinds = [*map(type, self._within)]
            self._classes = [*set(self._kinds)]
            self._as_ever = [_walks(nn.Module)] * len(self._classes)
            self._children = _Held(map(modules_of, self._within))
        return self._modules

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """As ``[*module.named_parameters()]``; the same list as before where nothing has changed."""
        self.modules()
        held = [*map(parameters_of, self._within)]
        if self._parameters is None or not self._parameters[1].is_in(held):
            self._parameters = named_parameters(self.module), _Held(held)
        return self._parameters[0]

    def buffers(self) -> list[tuple[str, Tensor]]:
        """As ``[*module.named_buffers()]``; the same list as before where nothing has changed."""
        self.modules()
        held = [*map(buffers_of, self._within)]
        if self._buffers is None or not self._buffers[1].is_in(held):
            self._buffers = [*self.module.named_buffers()], _Held(held)
        return self._buffers[0]

    def names(self) -> dict[int, str]:
        """Of all of these, by their ids; of something that is two of them the buffer's name, or the parameter's."""
        parts = self.modules(), self.parameters(), self.buffers()
        if len(self._names[0]) != len(parts) or not all(map(is_, self._names[0], parts)):
            self._names = parts, {id(x): name for named in parts for name, x in named}
        return self._names[1]

    def _is_as_it_was(self) -> bool:
        within, kinds = self._within, self._kinds
        return (
            bool(within)
            and all(map(is_, map(type, within), kinds))
            and [*map(_walks, self._classes)] == self._as_ever
            and self._children.is_in([*map(modules_of, within)])
        )


_walks: Callable[[type], Any] = attrgetter("named_modules", "named_parameters", "named_buffers")
"""By what a class tells which modules, parameters and buffers are within; most leave it to torch."""


_keys, _values = methodcaller("keys"), methodcaller("values")  # a scripted module's dicts are none, and have these


class _Held:
    """The keys and objects that some dicts hold."""

    def __init__(self, dicts: Iterable[dict[str, Any]]) -> None:
        held = self._dicts = [*dicts]
        self._sizes = [*map(len, held)]
        self._keys = [*chain.from_iterable(map(_keys, held))]
        self._values = [*chain.from_iterable(map(_values, held))]
        self._counted = all(type(x) is dict for x in held)  # by Python: most of the time their versions tell it all
        self._versions = self._now(held)

    def is_in(self, dicts: list[dict[str, Any]]) -> bool:
        """Whether these dicts hold just that."""
        if len(dicts) != len(self._dicts) or not all(map(is_, dicts, self._dicts)):
            return False
        now = self._now(dicts)
        if self._counted and now == self._versions:
            return True
        same = (
            [*map(len, dicts)] == self._sizes
            and [*chain.from_iterable(map(_keys, dicts))] == self._keys
            and all(map(is_, chain.from_iterable(map(_values, dicts)), self._values))
        )
        self._versions = now if same else self._versions
        return same

    def _now(self, dicts: list[dict[str, Any]]) -> list[int]:
        return [*map(version_of_dict, dicts)] if self._counted else []


def hand_on_metadata(state: Any, new: Any) -> None:
    """Let a state dict have the versions of modules that another has: a module hangs them on what it returns."""
    if hasattr(state, "_metadata"):
        new._metadata = state._metadata


class DerivedWeight(NamedTuple):
    """A weight that a layer computes of others before each call, and keeps, with its graph, until the next.

    Attributes:
        name: of the layer's attribute.
        of: the names of the parameters and buffers that it is computed of.
        compute: computes it anew.
    """

    name: str
    of: tuple[str, ...]
    compute: Callable[[], Tensor]


def derived_weights(module: nn.Module) -> list[DerivedWeight]:
    """Those of the hooks of ``torch.nn.utils``: the older `weight_norm` and `spectral_norm`, and `prune`."""
    from torch.nn.utils.prune import BasePruningMethod
    from torch.nn.utils.spectral_norm import SpectralNorm
    from torch.nn.utils.weight_norm import WeightNorm

    found: list[DerivedWeight] = []
    of: tuple[str, ...]
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            of = f"{hook.name}_g", f"{hook.name}_v"
            found.append(DerivedWeight(hook.name, of, functools.partial(hook.compute_weight, module)))
        elif isinstance(hook, SpectralNorm):
            of = f"{hook.name}_orig", f"{hook.name}_u", f"{hook.name}_v"
            found.append(DerivedWeight(hook.name, of, functools.partial(hook.compute_weight, module, False)))
        elif isinstance(hook, BasePruningMethod):
            of = f"{hook._tensor_name}_orig", f"{hook._tensor_name}_mask"
            found.append(DerivedWeight(hook._tensor_name, of, functools.partial(hook.apply_mask, module)))
    return found


def forget_weak_references(rnn: nn.RNNBase) -> None:
    """Drop an RNN's weak references to its weights, which forbid to swap them."""
    rnn._flat_weight_refs = []


def renew_weak_references(rnn: nn.RNNBase) -> None:
    """Undo `forget_weak_references`, and lay out the weights anew for cuDNN, as the RNN does when it moves: those that
    this process has whole."""
    weights = [getattr(rnn, name, None) for name in rnn._flat_weights_names]
    rnn._flat_weights = weights
    rnn._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in weights]
    if all(type(weight) is nn.Parameter for weight in weights):
        rnn.flatten_parameters()


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether the buffer ``name`` is in state dicts; torch says so in no public way that runs no hook of the user's."""
    return name not in module._non_persistent_buffers_set
