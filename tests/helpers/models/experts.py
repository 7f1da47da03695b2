"""Mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.models.blocks import MLP
from tests.helpers.models.case import Case
from tests.helpers.models.dense import mlp
from tests.helpers.models.hugging_face import hugging_face


class Experts(nn.Module):
    """Top-2 of 4 expert MLPs, dispatched by index."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.router, self.head = nn.Linear(12, 16), nn.Linear(16, 4, bias=False), nn.Linear(16, 5)
        self.experts = nn.ModuleList(MLP(16, 24, "swiglu") for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == i)
            y = y.index_add(0, rows, expert(x[rows]) * weights[rows, slot, None])
        return self.head(x + y)


def mixtral(t: Any) -> nn.Module:
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    return t.MixtralForCausalLM(
        t.MixtralConfig(
            **sizes,
            num_key_value_heads=2,
            num_local_experts=4,
            vocab_size=48,
            output_router_logits=True,
            experts_implementation="eager",
        )
    )


def gpt_oss(t: Any) -> nn.Module:
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
    return t.GptOssForCausalLM(
        t.GptOssConfig(
            **sizes, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, vocab_size=48,
            max_position_embeddings=16, sliding_window=4, experts_implementation="batched_mm",
        )
    )  # fmt: skip


def deepseek(t: Any) -> nn.Module:
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    latent = dict(kv_lora_rank=8, q_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8)
    experts = dict(moe_intermediate_size=24, n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1)
    return t.DeepseekV3ForCausalLM(
        t.DeepseekV3Config(
            **sizes, **latent, **experts, num_key_value_heads=4, n_routed_experts=4, num_local_experts=4,
            first_k_dense_replace=1, vocab_size=48, max_position_embeddings=16, experts_implementation="eager",
        )
    )  # fmt: skip


ROWS: dict[str, Case] = {
    "experts": mlp(Experts),
    "hf_mixtral": hugging_face(mixtral),
    "hf_gpt_oss": hugging_face(gpt_oss),
    "hf_deepseek": hugging_face(deepseek),
}
