"""Functions as a GPU's kernels run them, on fakes of a CPU's: where a CPU has no kernel, torch writes them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_DROPOUT = 4  # its place among the arguments of attention


class GpuKernels(TorchFunctionMode):
    """Inside, what autograd keeps of attention and of `rms_norm` is as on a GPU, and how their results are laid out.

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
        if func is F.scaled_dot_product_attention:
            if len(args) > _DROPOUT:
                args = (*args[:_DROPOUT], 0.0, *args[_DROPOUT + 1 :])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        elif func in (F.rms_norm, torch.rms_norm):
            return _rms_norm(func, *args, **kwargs)
        return func(*args, **kwargs)


def _rms_norm(
    func: Any, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if weight is not None and weight.dtype != input.dtype:
        return func(input, normalized_shape, weight, eps)  # type: ignore[no-any-return]  # no kernel takes that
    with torch.no_grad():
        dtype = func(input, normalized_shape, weight, eps).dtype
    with torch.autocast(input.device.type, enabled=False):
        return F.layer_norm(input, normalized_shape, weight).to(dtype)
