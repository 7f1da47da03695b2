"""Optimizers whose habits no trial would find: by size, by step, by magnitude, by all parameters together.

Each steps on sharded and on spread parameters as on one device. The ranks are threads.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_par.absent.elsewhere import Elsewhere, is_elsewhere
from lightning_par.absent.origin import Origin
from lightning_par.fsdp.gather_order import GatherOrder
from lightning_par.fsdp.prefetch import Prefetch
from lightning_par.fsdp.stored_parameter import Stored
from lightning_par.mesh.axis import Axis
from lightning_par.mesh.positions import Positions
from lightning_par.optim.optimizers import adopt
from lightning_par.optim.value_places import StagePlaces
from lightning_par.sharded.parameter import sharded_parameter
from lightning_par.sharded.tensor import OutOfSightError, ShardedTensor, full
from lightning_par.strategies.end_of_run import unshard_optimizer_state
from tests.helpers.differences import differences
from tests.helpers.sequence_ranks import sub_axis
from tests.helpers.slow import in_turn, slow
from tests.helpers.thread_ranks import ThreadAxis, run_ranks

STEPS = 6
SHAPES = {"a": (12, 8), "b": (8,), "c": (8, 8), "d": (5, 3, 2), "e": (3, 4), "f": (6, 10), "g": (1,)}
DIMS = {"a": 0, "b": 0, "c": 1, "d": 0, "f": 1, "g": 0}  # e is whole
STAGES = {"a": (0,), "b": (0,), "c": (1,), "d": (1,), "e": (0, 1), "f": (1,)}  # g is on all ranks of three

Rule = Callable[[Any, Any], None]
RULES: dict[str, Rule] = {}


class Ruled(Optimizer):
    """Does what a rule says; the step that is counted is the user's."""

    def __init__(self, params: Any, rule: str, lr: float = 0.1) -> None:
        super().__init__(params, dict(lr=lr))
        self.rule, self.count, self.memory = rule, 0, {}
        self.names = {id(p): i for i, p in enumerate(p for g in self.param_groups for p in g["params"])}
        self.start = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    def pairs(self) -> list[tuple[Tensor, dict[str, Any]]]:
        return [(p, self.state[p]) for g in self.param_groups for p in g["params"] if p.grad is not None]

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        with torch.enable_grad():
            loss = closure()
        self.count += 1
        RULES[self.rule](self, closure)
        return loss


SAME_GRADIENTS = ("updates_one_flat_vector", "evaluates_again", "searches_a_line", "unfollowed")


def rule(function: Rule) -> Rule:
    RULES[function.__name__] = function
    return function


@rule
def factored_from_a_size(o: Any, _: Any) -> None:
    for p, state in o.pairs():
        squared = p.grad.square() + 1e-30
        if p.ndim == 2 and min(p.shape) >= 8:
            for name, dim in (("row", 1), ("column", 0)):
                mean = squared.mean(dim)
                state.setdefault(name, torch.zeros_like(mean)).mul_(0.9).add_(mean, alpha=0.1)
            v = state["row"][:, None] * state["column"] / state["row"].mean()
        else:
            v = state.setdefault("v", torch.zeros_like(squared)).mul_(0.9).add_(squared, alpha=0.1)
        p.sub_(0.1 * p.grad / (v.sqrt() + 1e-8))


@rule
def clips_all_from_a_norm(o: Any, _: Any) -> None:
    norm = torch.stack([p.grad.norm() for p, _ in o.pairs()]).norm()
    factor = (20.0 / (norm + 1e-6)).clamp(max=1)
    for p, _ in o.pairs():
        p.sub_(factor * p.grad, alpha=0.1)


@rule
def clips_with_torch(o: Any, _: Any) -> None:
    torch.nn.utils.clip_grad_norm_([p for p, _ in o.pairs()], 5.0)
    torch.nn.utils.clip_grad_value_([p for p, _ in o.pairs()], 0.5)
    for p, _ in o.pairs():
        p.add_(p.grad, alpha=-0.1)


@rule
def changes_after_some_steps(o: Any, _: Any) -> None:
    for p, _ in o.pairs():
        p.add_(p.grad / p.grad.norm() if o.count > 4 else p.grad.sign(), alpha=-0.01)


@rule
def counts_steps_in_tensors(o: Any, _: Any) -> None:
    for p, state in o.pairs():
        step = state.setdefault("step", torch.tensor(0.0))
        average = state.setdefault("average", torch.zeros_like(p)).lerp_(p.grad, 0.1)
        step += 1
        update = average / (1 - 0.9 ** step.item())
        p.sub_(update * (p.norm() / update.norm()).clamp(max=1.0).item() if step > 3 else update, alpha=0.1)


@rule
def by_size(o: Any, _: Any) -> None:
    for p, _ in o.pairs():
        scale = 1 / p.numel() ** 0.5 if p.numel() > 20 else 1.0
        scale *= 0.5 if p.shape[0] % 4 == 0 else 1.0
        scale *= 2.0 if p.ndim == 2 and p.shape[0] == p.size(1) else 1.0
        p.sub_(p.grad.sign() if len(p) > 6 else p.grad, alpha=0.1 * scale * max(1, p.size(0) / p.size(-1)) ** 0.5)


@rule
def by_magnitude(o: Any, _: Any) -> None:
    for p, _ in o.pairs():
        g = p.grad
        if g.abs().max() > 50:
            g = g / g.norm() * float(g.numel()) ** 0.5
        if not torch.isfinite(g).all():
            continue
        p.sub_(g, alpha=0.1)


@rule
def skips_all_if_one_is_large(o: Any, _: Any) -> None:
    if any(p.grad.abs().amax().item() > 300 for p, _ in o.pairs()):
        return
    for p, _ in o.pairs():
        p.sub_(p.grad, alpha=0.1)


@rule
def by_count_of_parameters(o: Any, _: Any) -> None:
    pairs = o.pairs()
    for i, (p, _) in enumerate(pairs):
        p.sub_(p.grad if i % 2 else p.grad.sign(), alpha=0.1 / len(pairs) / len(o.param_groups[0]["params"]))


@rule
def by_identity(o: Any, _: Any) -> None:
    for p, _ in o.pairs():
        p.sub_(p.grad, alpha=0.01 * (1 + o.names[id(p)]))


@rule
def sums_over_all_in_python(o: Any, _: Any) -> None:
    d = o.memory.setdefault("d", 1e-3)
    for p, state in o.pairs():
        start = state.setdefault("start", p.clone())
        o.memory["found"] = o.memory.get("found", 0.0) + torch.dot(p.grad.flatten(), (start - p).flatten()).item()
        o.memory["size"] = o.memory.get("size", 0.0) + p.grad.abs().sum().item()
        p.sub_(p.grad.sign(), alpha=0.1 * d)
    o.memory["d"] = max(d, 2 * o.memory["found"] / o.memory["size"])


@rule
def trust_ratios(o: Any, _: Any) -> None:
    for p, state in o.pairs():
        average = state.setdefault("average", torch.zeros_like(p))
        average.mul_(0.9).add_(p.grad, alpha=0.1)
        norm, size = p.norm(), average.norm()
        ratio = torch.where(norm > 0, torch.where(size > 0, norm / size, 1.0), 1.0)
        p.add_(average * ratio, alpha=-0.1)


@rule
def keeps_a_window_of_norms(o: Any, _: Any) -> None:
    window = o.memory.setdefault("window", deque(maxlen=3))
    norm = sum(p.grad.pow(2).sum() for p, _ in o.pairs()) ** 0.5
    window.append(norm)
    mean = sum(window) / len(window)
    for p, _ in o.pairs():
        p.sub_(p.grad * torch.minimum(mean / norm, torch.ones(())), alpha=0.1)


@rule
def centralizes(o: Any, _: Any) -> None:
    for p, _ in o.pairs():
        g = p.grad
        if g.dim() > 1:
            g.add_(-g.mean(dim=tuple(range(1, g.dim())), keepdim=True))
        p.add_(g, alpha=-0.1)


@rule
def clips_units(o: Any, _: Any) -> None:
    def norm(x: Tensor) -> Tensor:
        return x.norm() if x.ndim <= 1 else x.norm(dim=tuple(range(1, x.ndim)), keepdim=True)

    for p, _ in o.pairs():
        most = norm(p.detach()).clamp_(min=1e-3).mul_(0.1)
        g = norm(p.grad)
        p.sub_(torch.where(g > most, p.grad * (most / g.clamp(min=1e-6)), p.grad))


@rule
def orthogonalizes(o: Any, _: Any) -> None:
    for p, state in o.pairs():
        momentum = state.setdefault("momentum", torch.zeros_like(p.grad))
        momentum.lerp_(p.grad, 0.1)
        if p.ndim < 2:
            p.sub_(momentum.sign(), alpha=0.01)
            continue
        x = momentum.view(momentum.size(0), -1)
        tall = x.size(0) > x.size(1)
        x = x.T if tall else x
        x = x / (x.norm() + 1e-7)
        for _ in range(3):
            a = x @ x.T
            x = 1.5 * x - 0.5 * a @ x
        p.add_((x.T if tall else x).view_as(p), alpha=-0.1)


@rule
def preconditions(o: Any, _: Any) -> None:
    for p, state in o.pairs():
        g = p.grad
        for dim, size in enumerate(g.shape):
            gram = state.setdefault(f"gram{dim}", torch.eye(size) * 1e-3)
            g = g.transpose(0, dim).contiguous()
            flat = g.view(size, -1)
            gram.add_(flat @ flat.t())
            values, vectors = torch.linalg.eigh(gram)
            root = vectors @ values.clamp(min=1e-6).pow(-1 / (2 * p.ndim)).diag() @ vectors.mT
            g = (root @ flat).view(g.shape).transpose(0, dim)
        p.sub_(g, alpha=0.1)


@rule
def writes_through_views(o: Any, _: Any) -> None:
    for p, state in o.pairs():
        flat, grad = p.data.view(-1), p.grad.view(-1)
        flat[::2] -= 0.1 * grad[::2]
        p.data[0] = p.data[0] * 0.9
        average = state.setdefault("average", torch.zeros_like(p))
        average.view(-1)[: p.numel() // 2].add_(grad[: p.numel() // 2])
        for row, of_grad in zip(p, p.grad):
            row.sub_(of_grad, alpha=0.01)
        p.sub_(average, alpha=0.1)


@rule
def updates_one_flat_vector(o: Any, _: Any) -> None:
    pairs = o.pairs()
    flat = torch.cat([p.grad.reshape(-1) for p, _ in pairs])
    momentum = o.state.setdefault("all", {}).setdefault("momentum", torch.zeros_like(flat))
    momentum.mul_(0.9).add_(flat)
    vector = torch.nn.utils.parameters_to_vector([p for p, _ in pairs])
    torch.nn.utils.vector_to_parameters(vector - 0.1 * momentum / momentum.norm(), [p for p, _ in pairs])


@rule
def computes_with_numpy(o: Any, _: Any) -> None:
    for p, _ in o.pairs():
        values = p.detach().numpy()
        values -= 0.1 * p.grad.numpy() / (1 + values.std())


@rule
def draws_noise(o: Any, _: Any) -> None:
    for p, state in o.pairs():
        noise = state.setdefault("noise", torch.empty_like(p)).normal_()
        p.add_(p.grad + 0.1 * torch.randn_like(p) + 0.1 * noise, alpha=-0.1)


@rule
def picks_the_largest(o: Any, _: Any) -> None:
    for p, _ in o.pairs():
        g = p.grad.flatten()
        kept = torch.topk(g.abs(), max(1, g.numel() // 3)).indices
        p.view(-1).index_add_(0, kept, g[kept], alpha=-0.1)
        p[p.grad > p.grad.median()] *= 0.9
        p.masked_fill_(p.abs() > 3, 3.0)


@rule
def takes_lists(o: Any, _: Any) -> None:
    params, grads = [p for p, _ in o.pairs()], [p.grad for p, _ in o.pairs()]
    for p, state in o.pairs():
        state.setdefault("average", torch.zeros_like(p))
    averages = [state["average"] for _, state in o.pairs()]
    for (_, _), ((ps, gs, ms), _) in Optimizer._group_tensors_by_device_and_dtype([params, grads, averages]).items():
        norm = torch.stack(torch._foreach_norm(gs)).norm()
        gs = torch._foreach_mul(gs, (10.0 / norm).clamp(max=1.0))
        ms = torch._foreach_lerp_(ms, gs, 0.1)  # returns what it wrote into
        denominators = torch._foreach_sqrt(torch._foreach_mul(ms, ms))
        torch._foreach_add_(denominators, 1e-3)
        torch._foreach_addcdiv_(ps, ms, denominators, torch.full((len(ps),), -0.1, dtype=torch.float64))
        torch._foreach_mul_(ps, [0.9] * len(ps))


@rule
def makes_its_state_of_shapes(o: Any, _: Any) -> None:
    for p, state in o.pairs():
        if not state:
            state["average"], state["seen"] = torch.zeros(p.shape), p.new_zeros(p.size())
        state["average"].mul_(0.9).add_(p.grad)
        state["seen"].copy_(torch.max(state["seen"], state["average"].abs()))
        p.sub_(state["average"] / (state["seen"] + 1e-3), alpha=0.1)


@rule
def is_cautious(o: Any, _: Any) -> None:
    for p, state in o.pairs():
        momentum = state.setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 0.1)
        mask = (momentum * p.grad > 0).to(p.dtype)
        mask.div_(mask.mean().clamp_(min=1e-3))
        p.sub_(momentum * mask, alpha=0.1)


@rule
def replaces_data_and_gradients(o: Any, _: Any) -> None:
    for p, _ in o.pairs():
        p.grad = p.grad * min(1.0, 1.0 / p.grad.norm().item())
        p.data = p.data - 0.1 * p.grad
        p.grad = p.grad.view(-1).flip(0).view(p.shape)
        p.data.add_(p.grad, alpha=-0.01)
        p.grad = None


@rule
def keeps_lists_in_its_state(o: Any, _: Any) -> None:
    for p, state in o.pairs():
        history = state.setdefault("history", [])
        history.append(p.grad.clone())
        del history[:-3]
        p.sub_(sum(history) / len(history), alpha=0.1)
        o.start[o.names[id(p)]].lerp_(p, 0.5)
        if o.count % 3 == 0:
            p.copy_(o.start[o.names[id(p)]])


@rule
def evaluates_again(o: Any, closure: Any) -> None:
    before = [p.clone() for p, _ in o.pairs()]
    norm = torch.stack([(p * p.grad).norm() for p, _ in o.pairs()]).norm()
    for p, _ in o.pairs():
        p.add_(p.grad * p.square(), alpha=0.1 / (norm + 1e-12).item())
    with torch.enable_grad():
        closure()
    for (p, _), old in zip(o.pairs(), before):
        p.copy_(old)
        p.sub_(p.grad, alpha=0.1)


@rule
def searches_a_line(o: Any, closure: Any) -> None:
    before, grads = [p.clone() for p, _ in o.pairs()], [p.grad.clone() for p, _ in o.pairs()]
    slope, rate, least = sum((g * g).sum().item() for g in grads), 0.5, float(closure())
    while rate > 1e-3:
        for (p, _), old, g in zip(o.pairs(), before, grads):
            p.copy_(old).sub_(g, alpha=rate)
        if float(closure()) < least - 1e-3 * rate * slope:
            break
        rate /= 2


@rule
def averages_blocks(o: Any, _: Any) -> None:
    for p, state in o.pairs():
        blocks = p.grad.reshape(2, -1) if p.numel() % 2 == 0 else p.grad.reshape(1, -1)
        v = state.setdefault("v", torch.zeros(len(blocks), 1)).lerp_(blocks.square().mean(1, keepdim=True), 0.1)
        p.sub_((blocks / (v.sqrt() + 1e-3)).view(p.shape), alpha=0.1)


@rule
def projects(o: Any, _: Any) -> None:
    for p, state in o.pairs():
        if p.ndim != 2:
            p.sub_(p.grad, alpha=0.1)
            continue
        if o.count % 2:
            state["basis"] = torch.linalg.svd(p.grad, full_matrices=False)[0][:, :2]
        low = torch.einsum("ij,ik->jk", state["basis"], p.grad)
        average = state.setdefault("average", torch.zeros_like(low)).lerp_(low, 0.5)
        p.sub_(state["basis"] @ average, alpha=0.1)


@rule
def compares(o: Any, _: Any) -> None:
    pairs = o.pairs()
    for (p, _), (q, _) in zip(pairs, pairs[1:]):
        same = p.shape == q.shape and torch.allclose(p, q)
        p.sub_(p.grad, alpha=0.1 if same or torch.equal(p, p.clone()) else 1.0)
        if q.grad.norm() > p.grad.norm():
            q.mul_(0.9)


@rule
def remembers_addresses(o: Any, _: Any) -> None:
    seen: set[int] = set()
    for p, _ in o.pairs():
        if p.data_ptr() not in seen:
            p.sub_(p.grad, alpha=0.1 * p.untyped_storage().nbytes() / p.nbytes)
        seen.add(p.data_ptr())


@rule
def copies_deeply(o: Any, _: Any) -> None:
    for p, _ in o.pairs():
        old = copy.deepcopy(p)
        p.view(-1)[0] = 0.0
        p.sub_(old.norm() * p.grad, alpha=0.01)


@rule
def moves_numbers_to_parameters(o: Any, _: Any) -> None:
    scale = 1 / (1 + torch.stack([p.grad.norm() for p, _ in o.pairs()]).norm())
    for p, _ in o.pairs():
        p.sub_(p.grad * scale.to(p) * scale.type_as(p).expand_as(p), alpha=0.1)
        p.view_as(p).mul_(0.9)


@rule
def regularizes_by_autograd(o: Any, _: Any) -> None:
    with torch.enable_grad():
        for p, _ in o.pairs():
            (p.square().sum() * 0.1).backward()
    for p, _ in o.pairs():
        p.sub_(p.grad, alpha=0.1)


# ------------------------------------------------------------------------------------------------------------ the ranks


def _value(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(ord(name))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)


def _gradient(name: str, call: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * call + ord(name))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64) * (0.1, 30.0, 1.0, 200.0)[call % 4]


def train(
    parameters: dict[str, Tensor], make: Callable[[list[Tensor]], Optimizer], stages: StagePlaces | None = None
) -> Any:
    """Steps with gradients that depend on the parameters; ends with the whole values and the whole state."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    optimizer = make([*parameters.values()])
    spread = stages is not None or any(isinstance(p, ShardedTensor) for p in parameters.values())
    if spread:
        adopt(optimizer, stages)
    calls, skips = 0, getattr(optimizer, "rule", None) not in SAME_GRADIENTS

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        for name, p in parameters.items():
            if not is_elsewhere(p):
                with torch.no_grad():
                    p.grad = None if (name, calls) == ("d", 2) and skips else p.detach() * 0.1 + _gradient(name, calls)
        return torch.tensor(1.0 / calls if calls % 3 else 5.0)

    for _ in range(STEPS):
        optimizer.step(closure)
    if spread:
        unshard_optimizer_state(optimizer, None if stages is None else stages.axis)
    names = {id(p): name for name, p in parameters.items()}
    state = {names.get(id(key), key): value for key, value in optimizer.state.items()}
    return {name: full(p).detach() for name, p in parameters.items() if not is_elsewhere(p)}, dict(
        sorted(state.items())
    )


class StorageThreadAxis(ThreadAxis):
    stores = gradient_shares = True
    copies = 2

    def __init__(self, size: int, rank: int, meeting: Any, name: str = "data") -> None:
        super().__init__(size, rank, meeting, name)
        self.gathering, self.order = Prefetch(reshard=True), GatherOrder()


def sharded(axis: ThreadAxis, make: Any) -> Any:
    values = {name: _value(name) for name in SHAPES}
    owners = {name: [(i // 2) % 2 for i in range(SHAPES[name][dim])] for name, dim in DIMS.items()}
    parameters: dict[str, Tensor] = {
        name: sharded_parameter(nn.Parameter(x), DIMS[name], Positions.of(owners[name]), axis)
        if name in DIMS
        else nn.Parameter(x)
        for name, x in values.items()
    }
    return train(parameters, make)


def stored(axis: Any, make: Any) -> Any:
    values = {name: nn.Parameter(_value(name)) for name in SHAPES}
    return train({name: x if name == "g" else Stored.of(x, axis, axis) for name, x in values.items()}, make)


def staged(axis: ThreadAxis, make: Any) -> Any:
    parameters: dict[str, Tensor] = {}
    for name in SHAPES:
        x = _value(name)
        holders = STAGES.get(name, (0, 1, 2))
        away = axis.rank not in holders
        origin = Origin(name, holders, axis)
        parameters[name] = Elsewhere(x.shape, x.dtype, x.device, origin, True) if away else nn.Parameter(x)
    places = {id(p): STAGES.get(name) for name, p in parameters.items()}
    return train(parameters, make, StagePlaces(axis, lambda p: places.get(id(p))))


def staged_and_sharded(axis: ThreadAxis, make: Any) -> Any:
    stage, rank = divmod(axis.rank, 2)
    tensor = sub_axis(axis, "tensor", (2 * stage, 2 * stage + 1), rank)
    pipeline = sub_axis(axis, "pipeline", (rank, rank + 2), stage)
    tensor.gradient_shares = pipeline.gradient_shares = False
    parameters: dict[str, Tensor] = {}
    for name in SHAPES:
        x = nn.Parameter(_value(name))
        holders = STAGES.get(name, (0, 1))
        positions = Positions.of([(i // 2) % 2 for i in range(SHAPES[name][DIMS.get(name, 0)])])
        if stage not in holders:
            origin = Origin(name, holders, pipeline, (DIMS[name], positions, tensor) if name in DIMS else None)
            parameters[name] = Elsewhere(x.shape, x.dtype, x.device, origin, True)
        else:
            parameters[name] = sharded_parameter(x, DIMS[name], positions, tensor) if name in DIMS else x
    places = {id(p): STAGES.get(name, (0, 1)) for name, p in parameters.items()}
    return train(parameters, make, StagePlaces(pipeline, lambda p: None if len(places[id(p)]) == 2 else places[id(p)]))


WAYS = {
    "sharded": (2, sharded, ThreadAxis),
    "stored": (2, stored, StorageThreadAxis),
    "staged": (3, staged, ThreadAxis),
    "both": (4, staged_and_sharded, ThreadAxis),
}


@slow(but=in_turn(RULES, list(WAYS)))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", RULES)
def test_a_habit_is_one_devices(name: str, way: str) -> None:
    _compare(lambda params: Ruled(params, name), way)


def _compare(make: Callable[[list[Tensor]], Optimizer], way: str) -> None:
    dtype = torch.get_default_dtype()
    try:
        values, state = train({name: nn.Parameter(_value(name)) for name in SHAPES}, make)
        ranks, function, kind = WAYS[way]
        for own, its_state in run_ranks(ranks, function, make, kind=kind):
            assert not differences({name: values[name] for name in own}, own, 1e-9)
            assert not differences(state, its_state, 1e-9)
    finally:
        torch.set_default_dtype(dtype)


TORCHS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, foreach=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p, t0=2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, line_search_fn="strong_wolfe"),
}


def _clips(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 3.0)


@slow(but=in_turn([f"{hook}-{name}" for name in TORCHS for hook in ("hook", "")], list(WAYS)))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize("hook", [True, False], ids=["hook", ""])
def test_torchs_own_are_one_devices(name: str, hook: bool, way: str) -> None:
    def make(params: list[Tensor]) -> Optimizer:
        optimizer = TORCHS[name](params)
        if hook:
            optimizer.register_step_pre_hook(_clips)
        return optimizer

    _compare(make, way)


def maps_rows_after_draws(o: Any, closure: Any) -> None:
    """A try to follow it has counted and drawn when it fails."""
    o.tries = getattr(o, "tries", 0) + 1
    noise = [torch.randn_like(p) for p, _ in o.pairs()]
    if o.count == 1:
        with torch.enable_grad():
            closure()
        noise = [x + torch.randn_like(x) for x in noise]
    norm = torch.vmap(lambda row: row / (row.norm() + 1))
    for (p, _), x in zip(o.pairs(), noise):
        p.sub_(norm(p.grad + x), alpha=0.1 * o.tries)


@pytest.mark.parametrize("way", ["sharded", "stored"])
def test_code_that_can_not_be_followed_counts_and_draws_once(way: str) -> None:
    with mock.patch.dict(RULES, unfollowed=maps_rows_after_draws):
        _compare(lambda params: Ruled(params, "unfollowed"), way)


@pytest.mark.parametrize("way", ["staged", "both"])
def test_code_that_can_not_be_followed_is_refused_where_stages_hold_parameters(way: str) -> None:
    with mock.patch.dict(RULES, unfollowed=maps_rows_after_draws), pytest.raises(AssertionError) as failed:
        _compare(lambda params: Ruled(params, "unfollowed"), way)
    assert "RuntimeError: Ruled hands tensors to code that can't be followed" in str(failed.value)


def test_an_error_of_the_closure_is_the_users_own() -> None:
    positions = Positions.of([0, 0, 1, 1])
    p = sharded_parameter(nn.Parameter(torch.ones(4)), 0, positions, Axis("tensor", (0, 1), 0, None))
    optimizer, calls = Ruled([p], "regularizes_by_autograd"), []

    def closure() -> None:
        calls.append(optimizer.count)
        raise OutOfSightError("of the training step")

    adopt(optimizer)
    with pytest.raises(OutOfSightError, match="^of the training step$"):
        optimizer.step(closure=closure)
    assert calls == [0] and optimizer.param_groups[0]["params"][0] is p
