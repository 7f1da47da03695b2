"""What modules keep of their weights and buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from lightning_par.private.modules import (
    BUFFERS,
    MODULES,
    PARAMETERS,
    DerivedWeight,
    ModuleTree,
    buffers_of,
    derived_weights,
    forget_weak_references,
    hand_on_metadata,
    is_persistent,
    modules_of,
    named_modules,
    named_parameters,
    parameters_of,
    renew_weak_references,
)


def test_an_rnns_weights_can_be_swapped() -> None:
    rnn = nn.LSTM(2, 3)
    forget_weak_references(rnn)
    torch.utils.swap_tensors(rnn.weight_ih_l0, nn.Parameter(torch.zeros(12, 2)))
    renew_weak_references(rnn)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(rnn.weight_ih_l0, nn.Parameter(torch.zeros(12, 2)))


@pytest.mark.parametrize(
    "make", [nn.utils.weight_norm, nn.utils.spectral_norm, lambda layer: prune.l1_unstructured(layer, "weight", 2)]
)
def test_weights_that_a_layers_hooks_compute_are_known(make: Any) -> None:
    layer = make(nn.Linear(2, 2))
    layer(torch.ones(2))
    (weight,) = derived_weights(layer)
    assert isinstance(weight, DerivedWeight)
    assert weight.name == "weight" and torch.equal(weight.compute(), layer.weight)
    assert {*weight.of} <= {*layer.state_dict()}
    assert not derived_weights(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))


def test_a_buffer_says_whether_it_is_persistent() -> None:
    module = torch.nn.Module()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("made", torch.zeros(1), persistent=False)
    assert [name for name in ("kept", "made") if is_persistent(module, name)] == list(module.state_dict())


def test_a_module_has_its_own_in_these_dicts() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Identity())
    norm = module[0]
    module.register_module("none", None)
    assert modules_of(module) == {"0": norm, "1": module[1], "none": None} and not parameters_of(module)
    assert parameters_of(norm) == {"weight": norm.weight, "bias": norm.bias}
    assert buffers_of(norm) == dict(norm.named_buffers())
    kinds = {MODULES: modules_of, PARAMETERS: parameters_of, BUFFERS: buffers_of}
    assert all(vars(module)[name] is function(module) for name, function in kinds.items())


def test_versions_of_modules_are_handed_on() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    new = type(state)(state)
    hand_on_metadata(state, new)
    hand_on_metadata({}, new)  # of a user's own
    module = nn.BatchNorm1d(2)
    # Without a version, `num_batches_tracked` may be missing, as it is in old files.
    del new["num_batches_tracked"]
    assert module.load_state_dict(new, strict=False).missing_keys == ["num_batches_tracked"]
    assert not module.load_state_dict(dict(new), strict=False).missing_keys


class _OwnNames(nn.Linear):
    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        yield "renamed", self


@pytest.mark.parametrize("other", [nn.ReLU, lambda: _OwnNames(1, 1)])
def test_modules_and_parameters_are_named_as_torch_names_them(other: Any) -> None:
    shared = nn.Linear(2, 2)
    module = nn.Sequential(shared, nn.ModuleDict({"a": shared, "b": nn.Sequential(nn.Linear(2, 2), other())}))
    module.register_parameter("none", None)
    module[1]["b"][0].weight = shared.weight
    module.register_module("nothing", None)
    assert named_modules(module) == [*module.named_modules()]
    found, expected = named_parameters(module), [*module.named_parameters()]
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert all(a is b for (_, a), (_, b) in zip(found, expected, strict=True))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.tied = self.a


class Renamed(Net):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return ((f"mine.{name}", p) for name, p in super().named_parameters(*args, **kwargs))


def _swap(module: Net) -> None:
    module.a, module.norm = module.norm, module.a  # type: ignore[assignment]


CHANGES: dict[str, Callable[[Net], Any]] = {
    "nothing": lambda module: None,
    "another layer": lambda module: setattr(module, "a", nn.Linear(2, 2)),
    "a layer more": lambda module: module.norm.add_module("within", nn.Linear(2, 2)),
    "a layer less": lambda module: delattr(module, "tied"),
    "layers change places": _swap,
    "another weight": lambda module: setattr(module.a, "weight", nn.Parameter(torch.zeros(2, 2))),
    "a weight less": lambda module: module.a.register_parameter("bias", None),
    "another buffer": lambda module: setattr(module.norm, "running_mean", torch.ones(2)),
    "a buffer more": lambda module: module.register_buffer("seen", torch.zeros(1)),
    "another name": lambda module: setattr(module, "b", module._modules.pop("a")),
    "another class": lambda module: setattr(module, "__class__", Renamed),
}


class Scripted(Net):
    """Torch keeps what a scripted module holds in objects of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scripted = torch.jit.script(nn.Linear(2, 2))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
@pytest.mark.parametrize("kind", [Net, Renamed, Scripted])
@pytest.mark.parametrize("change", CHANGES)
def test_a_tree_is_what_a_walk_finds(change: str, kind: type[Net]) -> None:
    def same() -> bool:
        walked = [*module.named_modules()], [*module.named_parameters()], [*module.named_buffers()]
        names = {id(x): name for named in walked for name, x in named}  # type: ignore[attr-defined]
        return walked == (tree.modules(), tree.parameters(), tree.buffers()) and names == tree.names()

    module = kind()
    tree = ModuleTree(module)
    assert same()
    before = tree.modules(), tree.parameters(), tree.buffers()
    CHANGES[change](module)
    assert same()
    if change == "nothing" and kind is Net:
        assert all(x is y for x, y in zip(before, (tree.modules(), tree.parameters(), tree.buffers()), strict=True))
