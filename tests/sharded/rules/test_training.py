"""What a training step does with sharded parameters and islands, beyond calling functions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_par.mesh.ledger import ledger
from lightning_par.mesh.positions import Positions
from lightning_par.sharded import patches
from lightning_par.sharded.tensor import ShardedTensor, sharded_parameter
from tests.helpers.thread_ranks import ThreadAxis, run_ranks

OWNERS = {"even": [0, 0, 0, 1, 1, 1], "uneven": [0, 1, 1, 1, 1, 1], "zigzag": [0, 1, 1, 1, 0, 0], "empty": [1] * 6}


def _shard(module: nn.Module, axis: ThreadAxis, dims: dict[str, int], owners: list[int]) -> nn.Module:
    """Put sharded parameters in place of those named."""
    for name, dim in dims.items():
        owner, _, leaf = name.rpartition(".")
        parent = module.get_submodule(owner)
        parent._parameters[leaf] = sharded_parameter(parent._parameters[leaf], dim, Positions.of(owners), axis)
    return module


class _MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)
        self.norm = nn.LayerNorm(4)
        self.double()
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.b(F.gelu(self.a(x))))


SPLIT = {"a.weight": 0, "a.bias": 0, "b.weight": 1}


def _batch() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def _whole(x: Tensor | None) -> Any:
    return x.full_tensor() if isinstance(x, ShardedTensor) else x


def _both(run: Callable[[nn.Module], Any], owners: list[int], expected: Any = None) -> None:
    """``run`` on the plain and on the split MLP returns equal tensors."""
    reference = [x.detach() for x in run(_MLP())]

    def on_rank(axis: ThreadAxis) -> list[Tensor]:
        return [_whole(x.detach()) for x in run(_shard(_MLP(), axis, SPLIT, owners))]

    for results in run_ranks(2, on_rank):
        assert len(results) == len(reference)
        for result, whole in zip(results, reference):
            torch.testing.assert_close(result, whole, rtol=1e-11, atol=1e-12)


owners = pytest.mark.parametrize("owners", OWNERS.values(), ids=OWNERS)


def _gradients(model: nn.Module) -> list[Tensor]:
    model(_batch()).pow(2).sum().backward()
    return [p.grad for p in model.parameters()]


@owners
def test_gradients_of_an_island(owners: list[int]) -> None:
    _both(_gradients, owners)


def test_an_island_costs_one_all_reduce_each_way() -> None:
    def step(axis: ThreadAxis) -> None:
        model = _shard(_MLP(), axis, SPLIT, OWNERS["even"])
        model(_batch().requires_grad_()).sum().backward()
        assert not axis.gathered

    with ledger() as moved:
        run_ranks(2, step)
    assert moved.counts() == {("tensor", "leave", "all_reduce"): 2, ("tensor", "enter", "all_reduce"): 2}


@owners
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("foreach", [True, False, None])
def test_clip_grad_norm(owners: list[int], norm_type: float, foreach: bool | None) -> None:
    def clip(model: nn.Module) -> list[Tensor]:
        grads = _gradients(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type, foreach=foreach)
        return [norm, *grads, *(p.grad for p in model.parameters())]

    _both(clip, owners)


@owners
def test_grad_norm_and_clip_value(owners: list[int]) -> None:
    def clip(model: nn.Module) -> list[Tensor]:
        grads = _gradients(model)
        norms = [
            nn.utils.get_total_norm(grads),
            *(g.norm(2) for g in grads),
            *(p.grad.data.norm(1) for p in model.parameters()),
        ]
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        return [*norms, *(p.grad for p in model.parameters())]

    _both(clip, owners)


@owners
@pytest.mark.parametrize("infinite", [False, True])
def test_scaler_unscales_and_sees_an_overflow_on_any_rank(owners: list[int], infinite: bool) -> None:
    def unscale(model: nn.Module) -> list[Tensor]:
        _gradients(model)
        if infinite:
            grad = model.a.bias.grad
            grad[5] = float("inf")
            model.a.bias.grad = grad
        found, scale = torch.zeros(1), torch.full((1,), 0.25)
        torch._amp_foreach_non_finite_check_and_unscale_([p.grad for p in model.parameters()], found, scale)
        assert bool(found) is infinite
        return [found, *(p.grad for p in model.parameters())]

    _both(unscale, owners)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("infinite", [False, True])
def test_grad_scaler_skips_the_step_on_all_ranks(foreach: bool, infinite: bool) -> None:
    def step(model: nn.Module) -> list[Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=foreach)
        scaler.scale(model(_batch()).pow(2).sum()).backward()
        if infinite:
            grad = model.a.bias.grad
            grad[0] = float("inf")
            model.a.bias.grad = grad
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (2.0 if infinite else 4.0)
        return list(model.parameters())

    _both(step, OWNERS["uneven"])


@owners
def test_deepcopy_and_state_dict(owners: list[int]) -> None:
    def copies(model: nn.Module) -> list[Tensor]:
        other = copy.deepcopy(model)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert type(p) is type(q) and p is not q and isinstance(q, nn.Parameter) and q.requires_grad and q.is_leaf
            assert p.shape == q.shape
        with torch.no_grad():
            model.a.weight.zero_()
        state = other.state_dict()
        assert all(not x.requires_grad for x in state.values())
        return [*state.values(), *_gradients(other)]

    _both(copies, owners)


@owners
def test_load_state_dict(owners: list[int]) -> None:
    torch.manual_seed(0)
    state = {name: torch.randn_like(x) for name, x in _MLP().state_dict().items()}

    def load(model: nn.Module) -> list[Tensor]:
        parameters = list(model.parameters())
        assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
        assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
        return [*model.parameters(), *_gradients(model)]

    _both(load, owners)


def test_load_state_dict_names_a_wrong_shape() -> None:
    def load(axis: ThreadAxis) -> None:
        model = _shard(_MLP(), axis, SPLIT, OWNERS["even"])
        with pytest.raises(RuntimeError, match="size mismatch for a.weight"):
            model.load_state_dict({**_MLP().state_dict(), "a.weight": torch.zeros(3, 4)})

    run_ranks(2, load)


@owners
def test_autograd_grad(owners: list[int]) -> None:
    def grads(model: nn.Module) -> list[Tensor]:
        x = _batch().requires_grad_()
        hidden = F.gelu(model.a(x))
        loss = model.norm(model.b(hidden)).pow(2).sum()
        of_inputs = torch.autograd.grad(loss, [x, model.norm.weight], retain_graph=True)
        of_sharded = torch.autograd.grad(loss, [hidden, model.a.weight, model.b.weight], retain_graph=True)
        (of_hidden,) = torch.autograd.grad(hidden, x, grad_outputs=torch.ones_like(hidden))
        return [*of_inputs, *of_sharded, of_hidden]

    _both(grads, owners)


@owners
def test_double_backward(owners: list[int]) -> None:
    def penalty(model: nn.Module) -> list[Tensor]:
        x = _batch().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        (slope.norm(dim=-1) - 1).pow(2).mean().backward()
        return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    _both(penalty, owners)


@owners
def test_double_backward_with_a_gather(owners: list[int]) -> None:
    def penalty(model: nn.Module) -> list[Tensor]:
        x = _batch().requires_grad_()
        hidden = model.a(x).tanh()
        hidden = hidden.index_select(1, torch.tensor([5, 0, 3])) * hidden[:, ::2].cumsum(1)  # both gather
        (slope,) = torch.autograd.grad(hidden.pow(2).sum(), x, create_graph=True)
        slope.pow(3).sum().backward()
        return [x.grad, model.a.weight.grad, model.a.bias.grad]

    _both(penalty, owners)


@owners
def test_swap_tensors_keeps_identity(owners: list[int]) -> None:
    def swap(axis: ThreadAxis) -> None:
        model, whole = _MLP(), _MLP().a.weight
        parameter = model.a.weight
        torch.utils.swap_tensors(parameter, sharded_parameter(parameter, 0, Positions.of(owners), axis))
        assert parameter is model.a.weight is next(model.parameters())
        assert isinstance(parameter, ShardedTensor) and isinstance(parameter, nn.Parameter)
        assert torch.equal(parameter.full_tensor(), whole)
        model(_batch()).sum().backward()
        assert parameter.grad is not None and parameter.grad.shape == (6, 4)

    run_ranks(2, swap)


def test_hooks_meet_sharded_gradients() -> None:
    def backward(axis: ThreadAxis) -> None:
        model = _shard(_MLP(), axis, SPLIT, OWNERS["zigzag"])
        seen: list[Any] = []
        hidden = model.a(_batch())
        hidden.register_hook(lambda grad: seen.append(grad.shape) or grad * 0)
        model.a.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))
        model.b(hidden).sum().backward()
        assert seen == [(3, 6), (6, 4)]
        assert not model.a.weight.grad.any()

    run_ranks(2, backward)


def test_initialisation_draws_what_one_device_draws() -> None:
    def draw(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(3)
        nn.init.normal_(model.a.weight)
        nn.init.kaiming_uniform_(model.b.weight, a=5**0.5)
        with torch.no_grad():
            model.a.bias.uniform_(-1, 1)
        return [*model.parameters(), torch.rand(2)]

    _both(draw, OWNERS["zigzag"])


def test_embedding_max_norm_shrinks_the_sharded_rows() -> None:
    ids, table = torch.tensor([[0, 3], [3, 5]]), 2 * torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    expected_table = table.clone()
    expected = F.embedding(ids, expected_table, max_norm=1.0)

    def embed(axis: ThreadAxis) -> None:
        for dim, owner in ((0, OWNERS["zigzag"]), (1, [0, 1, 1, 0])):
            weight = sharded_parameter(table, dim, Positions.of(owner), axis)
            out = F.embedding(ids, weight, max_norm=1.0)
            torch.testing.assert_close(_whole(out).detach(), expected)
            torch.testing.assert_close(weight.full_tensor().detach(), expected_table)

    run_ranks(2, embed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.softmax(-1),
        lambda x: F.log_softmax(x, -1),
        lambda x: x.logsumexp(-1),
        lambda x: (300 * x).mean(),
        lambda x: (300 * x).norm(dim=-1),
        lambda x: x.sum(-1),
        lambda x: F.cross_entropy(x, torch.arange(len(x)) % 60),
        lambda x: F.cross_entropy(x, x.float().softmax(-1).to(x.dtype)),
        lambda x: F.mse_loss(x, torch.zeros_like(x)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_as_exact_as_one_devices(call: Any, dtype: torch.dtype, autocast: bool) -> None:
    x = torch.randn(128, 60, generator=torch.Generator().manual_seed(0)).to(torch.float32 if autocast else dtype) * 4
    with torch.autocast("cpu", dtype, enabled=autocast):
        one = call(x)
    exact = call(x.double())
    limit = 2 * (one.double() - exact).abs().max() + 1e-6 * exact.abs().max()

    def on_rank(axis: ThreadAxis) -> None:
        positions = Positions.of([0] * 20 + [1] * 40)
        part = x.index_select(1, positions.index(axis.rank, x.device))
        with torch.autocast("cpu", dtype, enabled=autocast):
            result = call(ShardedTensor(part, 1, positions, axis))
        assert result.dtype == one.dtype
        assert (_whole(result).double() - exact).abs().max() <= limit

    run_ranks(2, on_rank)


class _RunAgain(torch.autograd.Function):
    """As reversible blocks do: forward leaves no graph, backward runs the layers again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return x.grad, None


def _checkpointed_again(x: Tensor) -> Tensor:
    weight = torch.linspace(1, 2, 6, dtype=x.dtype, requires_grad=True)  # what is kept for its gradient is x
    return checkpoint(lambda x: x * weight * 2, x, use_reentrant=False)  # type: ignore[no-any-return]


REGIONS: dict[str, Callable[[Callable[[Tensor], Any], Tensor], Tensor]] = {
    "reentrant checkpoint": lambda run, x: checkpoint(run, x, use_reentrant=True),
    "its output added": lambda run, x: torch.cat([x, x], 1)[:, :6] + checkpoint(run, x, use_reentrant=True),
    "two outputs": lambda run, x: checkpoint(lambda x: (run(x), x * 2), x, use_reentrant=True)[0],
    "a checkpoint": lambda run, x: checkpoint(run, x, use_reentrant=False),
    "one in another": lambda run, x: checkpoint(lambda x: _checkpointed_again(run(x)), x, use_reentrant=False),
    "run again": lambda run, x: _RunAgain.apply(x, run),
}


@owners
@pytest.mark.parametrize("name", REGIONS)
def test_a_region_that_ends_sharded_and_runs_again_in_backward(name: str, owners: list[int]) -> None:
    def run(model: Any) -> list[Any]:
        x = model.norm(_batch()) + 1
        hidden = REGIONS[name](lambda x: F.gelu(model.a(x)), x)
        (model.b(hidden) ** 2).sum().backward()
        return [hidden, *(p.grad for p in model.parameters())]

    with patches.SHARDED.installed():
        _both(run, owners)


@owners
def test_backward_from_sharded_tensors_into_some_inputs_alone(owners: list[int]) -> None:
    def run(model: Any) -> list[Any]:
        hidden = F.gelu(model.a(_batch()))
        seed = torch.arange(18, dtype=torch.float64).view(3, 6)
        hidden.backward(seed, retain_graph=True, inputs=[model.a.weight])
        torch.autograd.backward([hidden, hidden.sum()], [seed, None], inputs=model.a.bias)
        return [model.a.weight.grad, model.a.bias.grad]

    _both(run, owners)
