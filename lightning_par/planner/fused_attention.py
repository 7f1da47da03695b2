"""Attention as a GPU's kernels run it, on fakes of a CPU's."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_DROPOUT = 4  # its place among the arguments


class FusedAttention(TorchFunctionMode):
    """Inside, `scaled_dot_product_attention` drops nothing.

    No kernel of a CPU drops probabilities: torch writes attention out there, keeps all pairs of tokens, and lays the
    result out in another way. Those of GPUs draw again in backward what they have dropped.

    Example::

        x = torch.ones(1, 2, 3, 4)
        with FusedAttention():
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
        return func(*args, **kwargs)
