"""Functions as a GPU's kernels run them, on fakes of a CPU's: where a CPU has no kernel, torch writes them out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_par.private.pytree import tree_map
from lightning_par.sharded.functions import name_of

_DROPOUT = 4  # its place among the arguments of attention

_SINGLE = frozenset("""
__pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss
cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss huber_loss
interpolate kl_div l1_loss layer_norm log log10 log1p log2 log_softmax logsumexp margin_ranking_loss mse_loss
multi_margin_loss multilabel_margin_loss native_layer_norm nll_loss norm normalize pdist poisson_nll_loss pow prod
reciprocal renorm rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss softmax softmin softplus sum tan
triplet_margin_loss upsample linalg_matrix_norm linalg_vector_norm
""".split())  # fmt: skip
"""What autocast runs in single precision on a GPU: `AT_FORALL_FP32` and `AT_FORALL_FP32_SET_OPT_DTYPE` in torch's
``ATen/autocast_mode.h``, and what calls these. On a CPU it leaves most of them in the precision of products."""


class GpuKernels(TorchFunctionMode):
    """Inside, what autograd keeps of functions is as on a GPU, how their results are laid out, and their precision.

    Results have the same shapes and dtypes, no more: attention drops nothing, since no kernel of a CPU drops, and those
    of a GPU draw again in backward; a norm is another one, of which as much is kept.

    Example::

        x = torch.ones(1, 2, 3, 4)
        with GpuKernels():
            y = F.scaled_dot_product_attention(x, x, x, dropout_p=1.0)
        assert torch.equal(x, y)
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_autocast_enabled("cpu") and name_of(func) in _SINGLE:
            args, kwargs = tree_map(_single, (args, kwargs))
        if func is F.scaled_dot_product_attention:
            if len(args) > _DROPOUT:
                args = (*args[:_DROPOUT], 0.0, *args[_DROPOUT + 1 :])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        elif func is F.dropout:
            return _dropout(*args, **kwargs)
        elif func in (F.rms_norm, torch.rms_norm):
            return _rms_norm(func, *args, **kwargs)
        return func(*args, **kwargs)


def kernels(gpu: bool) -> AbstractContextManager[Any]:
    """Inside, kernels are a GPU's, or a CPU's. What backward runs again is within no mode that torch was in before: it
    wants it anew."""
    return GpuKernels() if gpu else nullcontext()


def _single(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() and x.itemsize == 2 else x


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or inplace or not 0.0 < p < 1.0:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]  # which keeps a byte for each element


def _rms_norm(
    func: Any, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if weight is not None and weight.dtype != input.dtype:
        return func(input, normalized_shape, weight, eps)  # type: ignore[no-any-return]  # no kernel takes that
    with torch.no_grad():
        dtype = func(input, normalized_shape, weight, eps).dtype
    with torch.autocast(input.device.type, enabled=False):
        return F.layer_norm(input, normalized_shape, weight).to(dtype)
