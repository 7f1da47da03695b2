"""The table of functions that run on local tensors.

A rule takes the torch function and its arguments, of which at least one is sharded, and returns the result, or
`NotImplemented` where these can't be handled locally: then everything is gathered and the function runs whole.
Inside a rule a plain tensor argument is either cut to this rank's part (`scatter`) or passed through `enter`, so that
its gradient is summed: with that, only a rule's forward can be wrong. One module holds the rules of one kind.
"""

from __future__ import annotations

from lightning_par.sharded.rules import (  # noqa: F401
    attention_heads,
    autograd,
    contract,
    convolution,
    cross_entropy,
    draws,
    foreach,
    gather_scatter,
    grouped_matmul,
    layers,
    module_queries,
    per_sample,
    pointwise,
    recurrent,
    reduce,
    row_loss,
    shape,
    slices,
)
from lightning_par.sharded.rules.lookup import dispatch, on_gather, rule

__all__ = ["dispatch", "on_gather", "rule"]
