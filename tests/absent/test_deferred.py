"""A module that is built without its weights, which are then computed: bitwise those of a module built at once."""

from __future__ import annotations

import copy
import gc
import random
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import init
from torch.nn.utils import parametrizations

from lightning_par.absent.deferred import op_recorder
from lightning_par.absent.deferred.build import Built, build
from lightning_par.absent.deferred.deferred_tensor import Deferred, is_deferred
from lightning_par.absent.deferred.materialise import materialise
from lightning_par.absent.deferred.session import Session
from lightning_par.python_state import generators
from tests.helpers.slow import slow


@pytest.fixture(autouse=True)
def _all_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small tensors are deferred, too."""
    monkeypatch.setattr(op_recorder, "SMALL", 0)
    yield


class Net(nn.Module):
    """Gets what ``make`` returns, as a LightningModule does in `configure_model`."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.make = make

    def configure_model(self) -> str:
        self.net = self.make()
        return "done"


def _seed() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)


def _both(make: Callable[[], nn.Module]) -> tuple[Net, Net, Built]:
    """Built at once, built deferred, and how; the weights of the second are still to be computed."""
    _seed()
    at_once = Net(make)
    at_once.configure_model()
    after = generators.global_state()
    _seed()
    deferred = Net(make)
    built = build(deferred, deferred.configure_model)
    assert generators.same_global_state(after), "the generators stand elsewhere"
    assert built.result == "done"
    return at_once, deferred, built


def _equal(a: nn.Module, b: nn.Module) -> None:
    """In every bit, in place and in kind."""
    first, second = ([*m.named_parameters(), *m.named_buffers()] for m in (a, b))
    assert [name for name, _ in first] == [name for name, _ in second]
    for (name, x), (_, y) in zip(first, second, strict=True):
        assert type(x) is type(y) and (x.dtype, x.device, x.shape) == (y.dtype, y.device, y.shape), name
        assert x.stride() == y.stride() and x.requires_grad == y.requires_grad and y.is_leaf, name
        assert torch.equal(x, y), f"{name}: {int((x != y).sum())} of {x.numel()} entries differ"


def _check(make: Callable[[], nn.Module], share: float = 1.0) -> Net:
    """The weights are one device's; at least ``share`` of the parameters was deferred."""
    at_once, deferred, built = _both(make)
    assert built.reason is None
    parameters = list(deferred.parameters())
    assert sum(map(is_deferred, parameters)) >= share * len(parameters)
    ids = [id(p) for p in parameters]
    before = generators.global_state()
    materialise(deferred)
    assert generators.same_global_state(before) and ids == [id(p) for p in deferred.parameters()]
    _equal(at_once, deferred)
    return deferred


def _initialised(initialise: Callable[[Tensor], Any], *shape: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layer = nn.Linear(*(shape or (12, 10)))
        initialise(layer.weight)
        return layer

    return make


INITS = {
    "uniform": init.uniform_,
    "normal": lambda w: init.normal_(w, std=0.02),
    "trunc_normal": init.trunc_normal_,
    "xavier": init.xavier_normal_,
    "kaiming": init.kaiming_uniform_,
    "orthogonal": init.orthogonal_,
    "orthogonal_wide": lambda w: init.orthogonal_(w.t() if False else w.data, gain=2.0),
    "sparse": lambda w: init.sparse_(w, 0.3),
    "eye": init.eye_,
    "data_normal": lambda w: w.data.normal_(0, 0.1),
    "data_slices": lambda w: (w.data[2:5].zero_(), w.data[:, 3].fill_(2.0), w.data[0, 1:].uniform_()),
    "generator": lambda w: init.normal_(w, generator=torch.Generator().manual_seed(8)),
    "bernoulli": lambda w: w.data.bernoulli_(0.3),
    "exponential": lambda w: w.data.exponential_(),
    "from_list": lambda w: w.data[0].copy_(torch.tensor([float(i) for i in range(12)])),
    "from_numpy": lambda w: w.data.copy_(torch.from_numpy(np.random.randn(10, 12))),
    "from_python": lambda w: w.data.fill_(random.random()),
    "new_data": lambda w: setattr(w, "data", torch.randn(10, 12).abs() * 2),
    "new_shape": lambda w: setattr(w, "data", torch.randn(3, 4)),
    "new_real_data": lambda w: setattr(w, "data", torch.from_numpy(np.ones((10, 12), dtype=np.float32))),
    "product": lambda w: w.data.copy_(torch.randn(10, 5) @ torch.randn(5, 12)),
    "multinomial": lambda w: w.data.copy_(torch.multinomial(torch.rand(10, 12), 12).float()),
    "dropped_out": lambda w: w.data.copy_(nn.functional.dropout(w.data, 0.5)),
    "foreach": lambda w: torch._foreach_mul_([w.data, w.data[1:3].clone()], 3.0),
    "out": lambda w: torch.mul(torch.randn(10, 12), 2.0, out=w.data),
    "index_put": lambda w: w.data.__setitem__(torch.tensor([0, 3]), 5.0),
    "boolean_index": lambda w: w.data.__setitem__(w.data > 0, 0.5),
    "where": lambda w: w.data.copy_(torch.where(w.data > 0, w.data, torch.zeros(()))),
    "norm": lambda w: w.data.div_(w.data.norm(dim=1, keepdim=True)),
    "item": lambda w: w.data.mul_(w.data.abs().max().item()),
    "branch": lambda w: w.data.neg_() if w.data.sum() > -1e9 else None,
    "tolist": lambda w: w.data.fill_(w.data[0].tolist()[3]),
    "transposed_in_place": lambda w: w.data.t_().normal_(),
    "doubled": lambda w: setattr(w, "data", w.data.double()),
    "seeded_within": lambda w: (torch.manual_seed(9), w.data.normal_()),
    "state_kept": lambda w: (
        (s := torch.get_rng_state()), w.data.normal_(), torch.set_rng_state(s), w.data[0].uniform_()
    ),
}  # fmt: skip


@slow(but=["branch", "data_slices", "from_list", "index_put", "kaiming", "new_data", "normal", "product", "sparse"])
@pytest.mark.parametrize("name", INITS)
def test_initialisations(name: str) -> None:
    _check(_initialised(INITS[name]))


def _odd_sizes() -> nn.Module:
    """Above 16 entries normal numbers are drawn in blocks, below one by one; strided tensors always one by one."""
    layers = nn.ModuleList(nn.Linear(n, 1, bias=False) for n in (1, 15, 16, 17, 31, 33))
    for layer in layers:
        init.normal_(layer.weight)
    strided = nn.Linear(8, 8)
    with torch.no_grad():
        strided.weight[:, ::2].normal_()
        strided.weight.t().uniform_()
    return nn.ModuleList([*layers, strided])


def _tied() -> nn.Module:
    embedding, head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, head)


def _fused() -> nn.Module:
    """Three parameters of one draw, and a layer that is a copy of another."""
    fused = torch.randn(24, 8)
    layers = [nn.Linear(8, 8) for _ in range(3)]
    with torch.no_grad():
        for layer, part in zip(layers, fused.chunk(3)):
            layer.weight.copy_(part)
    fused.zero_()  # later than it was read
    return nn.Sequential(*layers, copy.deepcopy(layers[0]))


def _read_between_writes() -> nn.Module:
    """Each of two tensors is computed from the other, as they stood in between."""
    a, b = nn.Linear(6, 6), nn.Linear(6, 6)
    with torch.no_grad():
        for _ in range(5):
            a.weight.add_(b.weight @ a.weight)
            b.weight.mul_(0.5).add_(a.weight)
    return nn.Sequential(a, b)


def _mixed_dtypes() -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        double = nn.Linear(5, 5)
    finally:
        torch.set_default_dtype(before)
    return nn.ModuleList([double, nn.Linear(5, 5).half(), nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(3, 3)])


def _complex() -> nn.Module:
    module = nn.Module()
    module.rotation = nn.Parameter(torch.polar(torch.ones(4, 6), torch.rand(4, 6)))
    module.turned = nn.Parameter(torch.randn(24).view(4, 6).t())
    module.register_buffer("angles", torch.view_as_real(torch.fft.fft(torch.randn(6, dtype=torch.complex64))))
    return module


def _weight_norm() -> nn.Module:
    normed = parametrizations.weight_norm(nn.Linear(6, 4))
    return nn.ModuleList([normed, parametrizations.spectral_norm(nn.Linear(6, 4))])


class _Held(nn.Module):
    """Tensors in attributes, lists and closures, beside parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.mask = torch.triu(torch.ones(4, 4), 1).bool()
        self.scales = [torch.rand(3), {"a": torch.rand(2)}]
        self.register_buffer("positions", torch.arange(4), persistent=False)
        noise = torch.randn(4)
        self.add = lambda x: x + noise


MODULES: dict[str, Callable[[], nn.Module]] = {
    "odd_sizes": _odd_sizes,
    "tied": _tied,
    "fused": _fused,
    "read_between_writes": _read_between_writes,
    "mixed_dtypes": _mixed_dtypes,
    "complex": _complex,
    "weight_norm": _weight_norm,
    "held": _Held,
    "lstm": lambda: nn.LSTM(4, 6, 2, bidirectional=True),
    "transformer": lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose1d(2, 2, 3)),
    "padded_embedding": lambda: nn.Embedding(10, 4, padding_idx=0),
    "frozen": lambda: nn.Linear(4, 4).requires_grad_(False),
    "channels_last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    _check(MODULES[name])


def test_what_is_no_parameter_is_real_when_the_constructor_is_done() -> None:
    at_once, deferred, _ = _both(_Held)
    one, other = at_once.net, deferred.net
    assert type(other.mask) is Tensor and torch.equal(one.mask, other.mask)
    assert torch.equal(one.scales[0], other.scales[0]) and torch.equal(one.scales[1]["a"], other.scales[1]["a"])
    assert torch.equal(one.add(torch.zeros(4)), other.add(torch.zeros(4)))
    assert is_deferred(other.layer.weight) and is_deferred(other.positions)


def test_a_tied_parameter_stays_one() -> None:
    net = _check(_tied).net
    assert net[0].weight is net[1].weight


def test_a_view_that_is_kept_shares_memory_with_its_parameter() -> None:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 6)
            self.flat = self.layer.weight.detach().view(-1)

    deferred = _check(Viewed, share=0.5)
    with torch.no_grad():
        deferred.net.layer.weight.fill_(7.0)
    assert torch.equal(deferred.net.flat, torch.full((24,), 7.0))


def test_no_function_of_a_parameter_runs_that_it_does_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> nn.Module:
        layers = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50))
        for layer in layers:
            init.normal_(layer.weight)  # what the constructor drew before is written over
        return layers

    _, deferred, _ = _both(make)
    weight = deferred.net[1].weight
    assert isinstance(weight, Deferred)
    names = [op.func._schema.name for op in weight.store.history.backwards()]
    assert names == ["aten::normal_"] and weight.store.history.origin is None


def test_data_that_went_into_a_tensor_is_given_up_with_it() -> None:
    _, deferred, _ = _both(lambda: nn.Linear(600, 600))
    weight, data = deferred.net.weight, torch.ones(600, 600)
    given_up = weakref.ref(data.untyped_storage())
    with torch.no_grad():
        weight[:100].zero_()
        weight.copy_(data).mul_(2.0)
        half = weight.double()[:300]
    gc.disable()  # which finds what refers to itself
    try:
        del data
        materialise(deferred)
        assert given_up() is not None and torch.equal(half.value(), torch.full((300, 600), 2.0).double())
        del half
        assert given_up() is None
    finally:
        gc.enable()


def test_real_hugging_face_models() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, vocab_size=40)
    _check(lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)))
    _check(lambda: transformers.BertForMaskedLM(transformers.BertConfig(**sizes)))


# -------------------------------------------------------------------------------------------------------- small tensors


def test_small_tensors_are_real_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_recorder, "SMALL", 400)
    net = _check(lambda: nn.Linear(20, 10), share=0.5).net
    assert type(net.bias) is nn.Parameter
    with Session():
        assert not is_deferred(torch.linspace(0, 1, 100)) and is_deferred(torch.linspace(0, 1, 101))


def test_a_real_tensor_takes_values_of_a_deferred_one() -> None:
    real = torch.zeros(3)
    with Session():
        deferred = torch.full((3,), 2.0)
        real.copy_(deferred)
        deferred.zero_()
    assert torch.equal(real, torch.full((3,), 2.0))


# ---------------------------------------------------------------------------------------------------- after the session


def test_what_is_done_to_a_deferred_module_later_counts() -> None:
    at_once, deferred, _ = _both(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    weights = {name: torch.randn(x.shape).to(x.dtype) for name, x in at_once.state_dict().items()}
    for net in (at_once, deferred):
        assert not net.load_state_dict(weights).missing_keys
        net.double()
        with torch.no_grad():
            net.net[0].weight.mul_(2.0)
    assert is_deferred(deferred.net[0].weight)
    materialise(deferred)
    _equal(at_once, deferred)


def test_attributes_that_the_user_hung_on_a_parameter_stay() -> None:
    def make() -> nn.Module:
        layer = nn.Linear(3, 3)
        layer.weight.group = "first"  # type: ignore[attr-defined]
        return layer

    assert _check(make).net.weight.group == "first"


def test_hashes_tell_what_differs() -> None:
    def digest(seed: int, scale: float) -> str:
        torch.manual_seed(seed)
        with Session():
            return torch.randn(5).mul_(scale).digest()  # type: ignore[attr-defined]

    assert digest(1, 2.0) == digest(1, 2.0)
    assert len({digest(1, 2.0), digest(2, 2.0), digest(1, 3.0)}) == 3


# --------------------------------------------------------------------------------------------------------- falling back


def _shares_with_numpy() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.weight.detach().numpy()[:] = 5.0
    return layer


def _computes_with_gradients() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.start = layer.weight.sum()  # type: ignore[assignment]
    return layer


class _Marked(nn.Parameter):
    pass


def _own_kind_of_parameter() -> nn.Module:
    module = nn.Module()
    module.weight = torch.Tensor._make_subclass(_Marked, torch.randn(4, 4))
    return module


def _staged(staging: Any) -> Callable[[], nn.Module]:
    """Copies from memory that is then used for something else."""

    def make() -> nn.Module:
        layers = nn.ModuleList(nn.Linear(600, 600, bias=False) for _ in range(2))
        source = torch.from_numpy(staging)
        with torch.no_grad():
            for number, layer in enumerate(layers):
                staging[:] = number
                layer.weight.copy_(source)
        return layers

    return make


@pytest.mark.parametrize(
    "make, why",
    [
        (_shares_with_numpy, "numpy would share the memory of a tensor at .*test_deferred.py"),
        (_computes_with_gradients, "a tensor is computed with a gradient"),
        (_own_kind_of_parameter, "Error: "),
        (lambda: torch.jit.script(nn.Linear(3, 3)), "something holds net.weight"),
        (_staged(np.zeros((600, 600), dtype=np.float32)), r"data of shape \(600, 600\) changed"),
    ],
)
def test_what_cannot_be_deferred_is_built_whole(make: Callable[[], nn.Module], why: str) -> None:
    at_once, deferred, built = _both(make)
    assert built.reason is not None and built.warning() is not None
    assert re.search(why, built.reason)
    assert not any(map(is_deferred, deferred.parameters()))
    _equal(at_once, deferred)


def test_falling_back_begins_where_the_first_attempt_began() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.seen: list[str] = []
            self.own = torch.Generator().manual_seed(1)

        def configure_model(self) -> None:
            assert not hasattr(self, "second")
            self.seen.append("here")
            self.second = nn.Linear(2, 2)
            init.normal_(self.second.weight, generator=self.own)
            self.first.extra = nn.Parameter(torch.randn(2))
            self.second.weight.detach().numpy()

    _seed()
    one, other = Growing(), Growing()
    other.load_state_dict(one.state_dict())
    state = generators.global_state()
    one.configure_model()
    generators.set_global_state(state)
    assert build(other, other.configure_model).reason is not None
    assert other.seen == ["here"]
    _equal(one, other)


def test_the_users_own_error_is_raised() -> None:
    def make() -> nn.Module:
        nn.Linear(3, 3)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        build(Net(make), Net(make).configure_model)


def test_large_tensors_made_of_data_are_told() -> None:
    def make() -> nn.Module:
        module = nn.Linear(3, 3)
        module.table = nn.Parameter(torch.from_numpy(np.random.randn(600, 600)).float())
        return module

    at_once, deferred, built = _both(make)
    assert built.whole == (("net.table", 1440000),)
    assert "net.table (1.4 MB) were built whole" in str(built.warning())
    materialise(deferred)
    _equal(at_once, deferred)


def test_what_was_there_before_stays_as_it_is() -> None:
    net = Net(lambda: nn.Linear(3, 3))
    net.before = nn.Linear(800, 800)
    weight = net.before.weight
    built = build(net, net.configure_model)
    assert built.warning() is None and net.before.weight is weight and type(weight) is nn.Parameter


def test_without_draws_weights_leave_generators_where_they_are() -> None:
    holder, states = nn.Module(), []
    for draws in (False, True):
        torch.manual_seed(3)
        before = torch.get_rng_state()
        built = build(holder, lambda: (nn.Linear(256, 256), torch.randn(256, 256)), draws=draws)
        assert built.reason is None
        states.append(torch.equal(before, torch.get_rng_state()))
    assert states == [True, False]
