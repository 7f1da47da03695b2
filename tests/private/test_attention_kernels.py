"""Torch's fused attention. What they compute is tested with `lightning_par.sequence.kernel`, which calls them."""

from __future__ import annotations

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_par.private import attention_kernels
from lightning_par.private.operators import schema_of

_OPS = {
    "cpu": "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool "
    "is_causal=False, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)",
    "cpu_backward": "(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
    "Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, *, Tensor? attn_mask=None, float? scale=None) -> "
    "(Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    "flash": "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool "
    "is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor "
    "cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor rng_state, Tensor unused, Tensor debug_attn_mask)",
    "flash_backward": "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor "
    "out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool "
    "is_causal, Tensor philox_seed, Tensor philox_offset, *, float? scale=None) -> (Tensor grad_query, Tensor "
    "grad_key, Tensor grad_value)",
    "efficient": "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool "
    "compute_log_sumexp, float dropout_p=0., bool is_causal=False, *, float? scale=None) -> (Tensor output, Tensor "
    "log_sumexp, Tensor philox_seed, Tensor philox_offset)",
    "efficient_backward": "(Tensor grad_out_, Tensor query, Tensor key, Tensor value, "
    "Tensor attn_bias, Tensor out, Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, float dropout_p, "
    "bool[4] grad_input_mask, bool is_causal=False, *, float? scale=None) -> (Tensor, Tensor, Tensor, Tensor)",
}


@pytest.mark.parametrize("name", _OPS)
def test_private_kernels_are_what_they_were(name: str) -> None:
    schema = str(schema_of(getattr(attention_kernels, name).default))
    assert schema[schema.index("(") :] == _OPS[name]


def test_which_kinds_of_kernels_are_allowed_is_told() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert attention_kernels.allowed() == (False, False, True)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        assert attention_kernels.allowed() == (True, True, False)
