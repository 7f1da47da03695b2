"""The plan of the tensor axis, inferred from what a step does: no process, no weights."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from lightning_par.tensor.plan import Split, TensorPlan, make_plan, styles_for
from lightning_par.trial.trial_run import record_step
from tests.helpers.models import MODELS
from tests.helpers.slow import long, slow

C, T = 24, 6


def plan_of(module: nn.Module, *batch: Tensor, ranks: int = 2, wishes: dict[str, str] | None = None) -> TensorPlan:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = module

        def training_step(self, batch: Any) -> Any:
            return self.m(*batch).pow(2).mean()

    step = Step()
    return make_plan(record_step(step, "training_step", batch), ranks, styles_for(step, wishes))


def splits(plan: TensorPlan) -> dict[str, Split]:
    return {name.removeprefix("m."): split for split in plan.splits for name in split.names}


def styles(plan: TensorPlan) -> dict[str, str]:
    return {name: f"{split.style} {split.dim}" for name, split in splits(plan).items()}


class SelfAttention(nn.Module):
    """Fused query, key and value, laid out in one of the ways that people use."""

    def __init__(self, layout: str, heads: int, key_heads: int | None = None) -> None:
        super().__init__()
        self.layout, self.heads, self.d = layout, heads, 4
        self.key_heads = key_heads or heads
        self.qkv = nn.Linear(C, (heads + 2 * self.key_heads) * self.d)
        self.out = nn.Linear(heads * self.d, C)

    def forward(self, x: Tensor) -> Tensor:
        B, H, d = x.shape[0], self.heads, self.d
        y = self.qkv(x)
        if self.layout == "chunk":
            q, k, v = (p.view(B, T, H, d) for p in y.chunk(3, -1))
        elif self.layout == "3Hd":
            q, k, v = y.view(B, T, 3, H, d).unbind(2)
        elif self.layout == "H3d":
            q, k, v = y.view(B, T, H, 3, d).unbind(3)
        elif self.layout == "H(3d)":
            q, k, v = y.view(B, T, H, 3 * d).split(d, -1)
        elif self.layout == "Hd3":
            q, k, v = y.view(B, T, H, d, 3).permute(4, 0, 1, 2, 3)
        else:
            kv = self.key_heads * d
            q, k, v = y.split([H * d, kv, kv], -1)
            q, k, v = q.view(B, T, H, d), k.view(B, T, -1, d), v.view(B, T, -1, d)
            k, v = (z.repeat_interleave(H // self.key_heads, dim=2) for z in (k, v))
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, H * d))


@pytest.mark.parametrize(
    ("layout", "heads", "expected"),
    [
        ("chunk", 4, np.tile(np.repeat([0, 0, 1, 1], 4), 3)),
        ("3Hd", 5, np.tile(np.repeat([0, 0, 0, 1, 1], 4), 3)),
        ("H3d", 5, np.repeat([0, 0, 0, 1, 1], 12)),
        ("H(3d)", 4, np.repeat([0, 0, 1, 1], 12)),
        ("Hd3", 4, np.repeat([0, 0, 1, 1], 12)),
    ],
)
def test_a_head_keeps_its_query_key_and_value_however_they_are_laid_out(
    layout: str, heads: int, expected: np.ndarray
) -> None:
    plan = plan_of(SelfAttention(layout, heads), torch.randn(2, T, C))
    assert styles(plan) == {"qkv.weight": "colwise 0", "qkv.bias": "colwise 0", "out.weight": "rowwise 1"}
    assert splits(plan)["qkv.weight"].positions.owner.tolist() == expected.tolist()
    assert splits(plan)["qkv.bias"].positions is splits(plan)["qkv.weight"].positions


def test_query_heads_stay_with_the_key_head_they_share() -> None:
    plan = plan_of(SelfAttention("grouped", heads=6, key_heads=3), torch.randn(2, T, C))
    query = np.repeat([0, 0, 0, 0, 1, 1], 4)
    key = np.repeat([0, 0, 1], 4)
    assert splits(plan)["qkv.weight"].positions.owner.tolist() == [*query, *key, *key]


def test_one_key_head_for_all_can_not_be_split_and_says_so() -> None:
    plan = plan_of(SelfAttention("grouped", heads=4, key_heads=1), torch.randn(2, T, C))
    reasons = {names[0]: reason for names, _, reason in plan.whole}
    assert "m.qkv.weight" in reasons


def test_torch_attention_is_seen_through() -> None:
    layer = nn.TransformerEncoderLayer(C, 4, 32, batch_first=True)
    found = styles(plan_of(layer, torch.randn(2, T, C)))
    assert found == {
        "self_attn.in_proj_weight": "colwise 0",
        "self_attn.in_proj_bias": "colwise 0",
        "self_attn.out_proj.weight": "rowwise 1",
        "linear1.weight": "colwise 0",
        "linear1.bias": "colwise 0",
        "linear2.weight": "rowwise 1",
    }


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(51, C), nn.Linear(C, 51, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embedding(ids)).flatten(0, 1), ids.flatten())


def test_a_tied_weight_is_one_parameter_split_by_rows_even_where_they_do_not_divide() -> None:
    (split,) = plan_of(Tied(), torch.randint(0, 51, (2, T))).splits
    assert split.names == ("m.embedding.weight", "m.head.weight") and split.dim == 0
    assert [split.part(rank) for rank in range(2)] == [(26, C), (25, C)]


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(C, 32)), nn.Parameter(torch.randn(C, 32))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x @ self.a) @ self.b.t()


def test_weights_used_as_functions_reshaped_too() -> None:
    assert styles(plan_of(Functional(), torch.randn(3, C))) == {"a": "colwise 1", "b": "rowwise 1"}


def test_a_norm_over_the_split_features_keeps_the_layer_whole_and_is_named() -> None:
    module = nn.Sequential(nn.Linear(C, 16), nn.LayerNorm(16), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, C))
    plan = plan_of(module, torch.randn(3, C))
    assert styles(plan) == {"2.weight": "colwise 0", "2.bias": "colwise 0", "4.weight": "rowwise 1"}
    (reason,) = [reason for names, _, reason in plan.whole if names == ("m.0.weight",)]
    assert reason.startswith("`layer_norm` at ") and "needs the whole tensor" in reason


class Probed(nn.Module):
    """Keeps the running mean of its hidden features: a few numbers beside its weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(C, width), nn.Linear(width, C)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.up(x))
        self.mean.lerp_(hidden.detach().mean(0), 0.1)
        return self.down(hidden)


@pytest.mark.parametrize(("width", "expected"), [(4096, ["`lerp_`"]), (16, [])])
def test_an_island_gathers_where_that_is_little_beside_its_weights(width: int, expected: list[str]) -> None:
    plan = plan_of(Probed(width), torch.randn(3, C))
    assert [name.split()[0] for name in plan.gathers] == expected
    assert ("up.weight" in splits(plan)) == bool(expected)


def test_an_odd_number_of_layers() -> None:
    found = styles(plan_of(nn.Sequential(*(nn.Linear(C, C) for _ in range(3))), torch.randn(3, C)))
    assert found["0.weight"] == "colwise 0" and found["1.weight"] == "rowwise 1" and found["2.weight"] == "colwise 0"


def test_the_users_plan_goes_before_the_inferred_one() -> None:
    module = nn.Sequential(nn.Linear(C, 16), nn.GELU(), nn.Linear(16, C))
    assert plan_of(module, torch.randn(3, C), wishes={"m.*": "replicate"}).splits == ()
    found = styles(plan_of(module, torch.randn(3, C), wishes={"m.0": "rowwise", "m.2": "replicate"}))
    assert found == {"0.weight": "rowwise 1"}


def test_where_the_users_plan_needs_a_gather_it_is_listed() -> None:
    module = nn.Sequential(nn.Linear(C, 16), nn.LayerNorm(16))
    plan = plan_of(module, torch.randn(3, C), wishes={"m.0": "colwise"})
    assert styles(plan) == {"0.weight": "colwise 0", "0.bias": "colwise 0"}
    assert [name.split()[0] for name in plan.gathers] == ["`layer_norm`"]


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"m.1": "diagonal"}, "plan['m.1'] = 'diagonal' is no known style. Write one of 'colwise', 'rowwise'"),
        ({"m.O": "colwise"}, "plan['m.O'] matches no module and no parameter of Step. Did you mean"),
        ({"m.0": "colwise"}, "m.0.weight (1, 24) to be colwise over 2 ranks"),
    ],
)
def test_a_plan_that_can_not_be_followed_is_refused(wishes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        plan_of(nn.Sequential(nn.Linear(C, 1), nn.Linear(1, 4)), torch.randn(3, C), wishes=wishes)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("heads", "ranks", "message"),
    [
        (1, 2, "its 1 head of 4 features can't be split"),
        (2, 3, "only 2 groups of features that can be taken apart, fewer than ranks"),
    ],
)
def test_heads_that_can_not_be_split_as_asked_are_refused(heads: int, ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match="m.qkv.weight .* to be colwise over") as refused:
        plan_of(SelfAttention("chunk", heads), torch.randn(2, T, C), ranks=ranks, wishes={"m.qkv": "colwise"})
    assert message in str(refused.value)


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(512, C)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(C, 4, 4 * C, batch_first=True, norm_first=True) for _ in range(layers)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def _calls(layers: int) -> int:
    """How many functions recording and planning call, which no machine makes more or fewer."""
    module, ids, calls = Deep(layers), torch.randint(0, 512, (2, T)), 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        plan = plan_of(module, ids)
    finally:
        sys.setprofile(None)
    assert len(plan.splits) == 1 + 6 * layers
    return calls


@long()
def test_the_work_of_recording_and_planning_grows_as_the_layers_do() -> None:
    plan_of(Deep(1), torch.randint(0, 512, (2, T)))  # torch sets its fake tensors up once
    few, some, many = map(_calls, (3, 6, 14))
    layer = (some - few) / 3
    assert (many - some) / 8 <= 1.02 * layer
    assert layer < 150_000  # a hundred layers take three seconds


class Experts(nn.Module):
    """A mixture of experts, whose weights are stacked, computed in one of the ways that people use."""

    experts, wide = 4, 16

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.router = way, nn.Linear(C, self.experts)
        self.gate_up = nn.Parameter(torch.randn(self.experts, C, 2 * self.wide))
        self.gate_up_bias = nn.Parameter(torch.randn(self.experts, 2 * self.wide))
        self.down = nn.Parameter(torch.randn(self.experts, C, self.wide))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, C)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        return getattr(self, self.way)(tokens, weights, chosen)

    def loop(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        mask = F.one_hot(chosen, self.experts)
        for (expert,) in (mask.sum((0, 1)) > 0).nonzero():
            token, place = torch.where(mask[..., expert])
            h = self.gated(x[token] @ self.gate_up[expert] + self.gate_up_bias[expert])
            out.index_add_(0, token, F.linear(h, self.down[expert]) * weights[token, place, None])
        return out

    def batched(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        ids = chosen.flatten()
        h = torch.bmm(x.repeat_interleave(2, 0).unsqueeze(1), self.gate_up[ids]).squeeze(1)
        h = self.gated(h.add_(self.gate_up_bias[ids]))
        y = torch.bmm(self.down.index_select(0, ids), h.unsqueeze(-1)).squeeze(-1)
        return (y * weights.view(-1, 1)).view(-1, 2, C).sum(1)

    def grouped(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        ids, order = chosen.flatten().sort()
        ends = torch.bincount(ids, minlength=self.experts).cumsum(0, dtype=torch.int32)
        h = self.gated(torch._grouped_mm(x[order // 2], self.gate_up, offs=ends) + self.gate_up_bias[ids])
        y = torch._grouped_mm(h, self.down.transpose(1, 2), offs=ends)
        return (y * weights.flatten()[order, None])[order.argsort()].view(-1, 2, C).sum(1)

    def dense(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        h = self.gated(torch.einsum("tc,ecf->etf", x, self.gate_up) + self.gate_up_bias[:, None])
        y = torch.baddbmm(torch.zeros_like(x).expand(self.experts, -1, -1), h, self.down.transpose(1, 2))
        return torch.einsum("etc,te->tc", y, torch.zeros(len(x), self.experts).scatter(1, chosen, weights))

    def gated(self, both: Tensor) -> Tensor:
        gate, up = both[..., ::2], both[..., 1::2]
        return F.silu(gate) * up


@pytest.mark.parametrize("way", ["loop", "batched", "grouped"])
def test_stacked_experts_are_split_by_features_with_gate_and_up_together(way: str) -> None:
    plan = plan_of(Experts(way), torch.randn(2, T, C))
    assert styles(plan) == {"gate_up": "colwise 2", "down": "rowwise 2"}
    assert splits(plan)["gate_up"].positions.owner.tolist() == [0] * 16 + [1] * 16
    assert splits(plan)["down"].positions.owner.tolist() == [0] * 8 + [1] * 8 and not plan.gathers


def test_experts_that_all_compute_are_split_one_by_one() -> None:
    plan = plan_of(Experts("dense"), torch.randn(2, T, C))
    assert styles(plan) == {"gate_up": "colwise 0", "down": "colwise 0"}
    assert splits(plan)["down"].positions.owner.tolist() == [0, 0, 1, 1] and not plan.gathers


@slow("hf_gpt_oss", "hf_deepseek")
@pytest.mark.parametrize("name", ["hf_mixtral", "hf_gpt_oss", "hf_deepseek"])
def test_a_rank_holds_little_more_than_half_of_a_mixture_of_experts(name: str) -> None:
    module = MODELS[name].module()
    batch = default_collate(MODELS[name].data(0)[:2])
    plan = make_plan(record_step(module, "training_step", batch), 2)
    assert plan.note is None and plan.numel(0) < 0.55 * sum(p.numel() for p in module.parameters())


class Latent(nn.Module):
    """A projection through few features, with a norm written by hand between."""

    def __init__(self, few: int) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(C, few, bias=False), nn.Linear(few, 32, bias=False), nn.Linear(32, C)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.c(F.gelu(self.b(h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))))


def test_no_norm_runs_over_split_features_where_little_is_saved() -> None:
    assert styles(plan_of(Latent(2), torch.randn(3, C))).keys() == {"b.weight", "c.weight"}
    all_of_it = {"a.weight": "colwise 0", "b.weight": "rowwise 1", "c.weight": "colwise 0", "c.bias": "colwise 0"}
    assert styles(plan_of(Latent(64), torch.randn(3, C))) == all_of_it


class Looked(nn.Module):
    """Rows of a table that are picked by an index, and multiplied with another weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Parameter(torch.randn(6, C)), nn.Linear(C, 32), nn.Linear(32, C)

    def forward(self, ids: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.table[ids])))


def test_a_table_that_rows_are_picked_from_does_not_stand_in_the_way() -> None:
    found = styles(plan_of(Looked(), torch.randint(6, (3, 5))))
    assert found == {"up.weight": "colwise 0", "up.bias": "colwise 0", "down.weight": "rowwise 1"}


class Masked(nn.Module):
    """Some of the samples, as many as the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.some, self.down = nn.Linear(C, 32), nn.Linear(C, 32), nn.Linear(32, C)

    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, 0] > 0
        return self.down(self.all(x)[mask] * self.some(x[mask]))


def test_shapes_that_go_by_the_batch_are_those_of_the_batch_in_the_plan_too() -> None:
    x = torch.randn(5, C)
    x[:, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0])
    found = styles(plan_of(Masked(), x))
    assert {name: found[name] for name in found if "weight" in name} == {
        "all.weight": "colwise 0", "some.weight": "colwise 0", "down.weight": "rowwise 1",
    }  # fmt: skip


class BesideMLP(nn.Module):
    """Layers of attention with one key head that all query heads share, whose result is added to that of an MLP in
    place, all by one function of weights."""

    def __init__(self, key_heads: int) -> None:
        super().__init__()
        self.key_heads, self.size = key_heads, (4 + 2 * key_heads) * 6
        self.qkv, self.out = nn.Parameter(torch.randn(self.size, C)), nn.Parameter(torch.randn(C, C))
        self.up, self.down = nn.Parameter(torch.randn(96, C)), nn.Parameter(torch.randn(C, 96))

    def forward(self, x: Tensor) -> Tensor:
        B, T, shared = *x.shape[:2], 4 // self.key_heads
        h = F.layer_norm(x, (C,))
        y = self.apply_to(h, self.qkv).view(B, T, self.key_heads, shared + 2, 6)
        q, k, v = y[:, :, :, :-2], y[:, :, :, [-2]], y[:, :, :, [-1]]
        q, k, v = (z.expand_as(q).flatten(2, 3).transpose(1, 2) for z in (q, k, v))
        a = self.apply_to(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, C), self.out)
        y = self.apply_to(F.gelu(self.apply_to(h, self.up)), self.down)
        y += a
        return F.layer_norm(x + y, (C,))

    def apply_to(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.T


@pytest.mark.parametrize("key_heads", [1, 2])
def test_a_layer_that_must_stay_whole_does_not_keep_the_next_one_whole(key_heads: int) -> None:
    found = styles(plan_of(BesideMLP(key_heads), torch.randn(2, T, C)))
    attention = {"qkv": "colwise 0", "out": "rowwise 1"} if key_heads > 1 else {}
    assert found == {**attention, "up": "colwise 0", "down": "rowwise 1"}


class ByChannel(nn.Module):
    """A convolution of each channel by itself between two layers, as in Mamba and in feed-forwards of images."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.conv, self.down = nn.Linear(C, 32), nn.Conv1d(32, 32, 3, padding=2, groups=32), nn.Linear(32, C)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(self.up(x).transpose(1, 2))[..., :T]
        return self.down(F.silu(h).transpose(1, 2))


def test_channels_that_are_convolved_by_themselves_are_split() -> None:
    found = styles(plan_of(ByChannel(), torch.randn(2, T, C)))
    own = {"conv.weight": "colwise 0", "conv.bias": "colwise 0"}
    assert found == {"up.weight": "colwise 0", "up.bias": "colwise 0", **own, "down.weight": "rowwise 1"}
