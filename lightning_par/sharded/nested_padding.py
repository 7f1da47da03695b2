"""The nested-tensor path of `nn.TransformerEncoder`, which torch takes only where the weights are plain."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.private.functions import mask_is_left_aligned
from lightning_par.sharded.tensor import ShardedTensor


def pad_as_nested(module: nn.Module) -> list[Any]:
    """`nn.TransformerEncoder` in evaluation leaves zeros where the sequence is padded, if all tensors are plain.

    Returns:
        Handles of the hooks that do so where some are sharded; in a copy of the module, too, whose weights are fake.
    """
    encoders = [m for m in module.modules() if isinstance(m, nn.TransformerEncoder)]
    split = [any(isinstance(w, ShardedTensor) for w in m.layers[0].parameters()) for m in encoders]
    return [
        m.register_forward_hook(functools.partial(_zero_padding, one), with_kwargs=True)
        for m, one in zip(encoders, split, strict=True)
    ]


def _zero_padding(
    split: bool, encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> Tensor | None:
    given = {**dict(zip(("src", "mask", "src_key_padding_mask"), args, strict=False)), **kwargs}
    src, padding = given["src"], given.get("src_key_padding_mask")
    first = encoder.layers[0]
    weights = list(first.parameters())
    if padding is None:
        return None
    nested = (
        (split or any(isinstance(x, ShardedTensor) for x in (src, *weights)))
        and getattr(encoder, "use_nested_tensor", False)
        and torch.backends.mha.get_fastpath_enabled()
        and given.get("mask") is None
        and not first.training
        and src.dim() == 3
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in (src, *weights)))
        and not torch.is_autocast_enabled()
    )
    if not nested:
        return None
    padded = padding if padding.dtype == torch.bool else padding != 0
    if getattr(encoder, "mask_check", True) and not mask_is_left_aligned(src, ~padded):
        return None
    nothing = output.new_zeros(1, 1, output.shape[-1])
    return torch.where(padded.unsqueeze(-1), nothing if encoder.norm is None else encoder.norm(nothing), output)
