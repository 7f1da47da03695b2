"""CUDA's fused cells of an LSTM and a GRU, computed by hand: a CPU has none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_libraries: list[Any] = []  # what was registered goes with them


def install() -> None:
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    library.impl("_thnn_fused_lstm_cell", _lstm, "CUDA")
    library.impl("_thnn_fused_lstm_cell_backward_impl", _lstm_backward, "CUDA")
    library.impl("_thnn_fused_gru_cell", _gru, "CUDA")
    library.impl("_thnn_fused_gru_cell_backward", _gru_backward, "CUDA")


def _lstm(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Any = None, hidden_bias: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    gates = input_gates + hidden_gates
    for bias in (input_bias, hidden_bias):
        gates = gates if bias is None else gates + bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_backward(
    grad_hy: Any, grad_cy: Any, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Any, Any, Any]:
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    y = cy.tanh()
    h = torch.zeros_like(cy) if grad_hy is None else grad_hy
    c = h * o * (1 - y * y) + (0 if grad_cy is None else grad_cy)
    gates = torch.cat([c * g * i * (1 - i), c * cx * f * (1 - f), c * i * (1 - g * g), h * y * o * (1 - o)], 1)
    return gates, c * f, gates.sum(0) if has_bias else None


def _gru(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: Any = None, hidden_bias: Any = None
) -> tuple[Tensor, Tensor]:
    from_input = (input_gates if input_bias is None else input_gates + input_bias).chunk(3, 1)
    from_hidden = (hidden_gates if hidden_bias is None else hidden_gates + hidden_bias).chunk(3, 1)
    r, z = ((a + b).sigmoid() for a, b in zip(from_input[:2], from_hidden[:2], strict=True))
    n = (from_input[2] + r * from_hidden[2]).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, from_hidden[2]], 1)


def _gru_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Any, ...]:
    r, z, n, hx, hn = workspace.chunk(5, 1)
    new = grad_hy * (1 - z) * (1 - n * n)
    reset, update = new * hn * r * (1 - r), grad_hy * (hx - n) * z * (1 - z)
    of_input, of_hidden = torch.cat([reset, update, new], 1), torch.cat([reset, update, new * r], 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, grad_hy * z, *biases
