"""What an LSTM's kernel on CPUs keeps for backward. No public name tells its size, and torch's shapes have it as 0."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod, sqrt
from typing import Any

import torch

from lightning_par.private.modes import no_modes

layer: Any = torch.ops.aten.mkldnn_rnn_layer.default
"""One layer in one direction: makes its outputs, its last states, and a workspace, which autograd keeps."""

# The most that is run: entries of weights, multiplications, entries of one value of all steps and samples.
_WEIGHTS, _PRODUCTS, _VALUES = 2**20, 2**27, 2**18
_PADDED = 64  # what the kernel may add to the features of a value


def workspace_bytes(args: Sequence[Any]) -> int:
    """The size of the workspace that `layer` makes of ``args`` where gradients are wanted.

    The kernel runs on zeros of these shapes. Where that would take more than some 10 ms and 20 MB, they are cut, in
    features first and in time last, and what is found is scaled up: a workspace of some MB comes out within 5 %, of a
    layer of very few features within 7 %.

    Args:
        args: of `layer`; tensors need no values.

    Raises:
        RuntimeError: the kernel can't run so.

    Example::

        x, states = torch.zeros(7, 4, 8), torch.zeros(4, 16)
        weights = [torch.zeros(shape) for shape in ((64, 8), (64, 16), (64,), (64,))]
        args = (x, *weights, states, states, False, [], 2, 16, 1, True, False, False, True)
        assert workspace_bytes(args) == layer(*args)[3].numel()
    """
    x, hidden = args[0], int(args[10])
    steps, samples, features = map(int, x.shape)  # whatever `batch_first` says
    gates = args[1].shape[0] // hidden
    wide = max(1.0, sqrt(gates * hidden * (features + hidden) / _WEIGHTS))
    i, h = max(1, round(features / wide)), max(1, round(hidden / wide))
    few = max(1, min(_PRODUCTS // (gates * h * (i + h)), _VALUES // (max(i, h) + _PADDED)))
    t = min(steps, few)
    n = min(samples, ceil(few / t))
    shapes = [(t, n, i), (gates * h, i), (gates * h, h), (gates * h,), (gates * h,), (n, h), (n, h)]
    with no_modes(), torch.enable_grad():  # else it makes none
        given = [torch.zeros(shape, dtype=x.dtype, device="cpu") for shape in shapes]
        made = layer(*given, *args[7:10], h, *args[11:])[3].numel()
    return round(made * prod((steps, samples, hidden)) / prod((t, n, h)))
