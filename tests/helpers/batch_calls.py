"""Calls of functions that treat each sample by itself, or sum over samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

N, C, T, L = 7, 4, 5, 8
_generator = torch.Generator().manual_seed(3)


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def _integers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=_generator)


@dataclass(frozen=True)
class Call:
    """A function of samples and of whole tensors; ``dim`` is where the samples are."""

    run: Callable[..., Any]
    samples: tuple[Tensor, ...]
    wholes: tuple[Tensor, ...] = ()
    dim: int = 0


x, image, classes, weights = _normal(N, C), _normal(N, C, L, L), _integers(C, N), torch.rand(C, dtype=torch.float64)
ignored = classes.clone()
ignored[[0, 3, 4]] = -100
seen, masked = _normal(N, T, C), torch.rand(N, 1, T, T, generator=_generator) < 0.8
masked[..., 0] = True
lstm = torch.nn.LSTM(C, 3, num_layers=2, bidirectional=True).double()
lstm_first = torch.nn.GRU(C, 3, batch_first=True).double()
encoder = torch.nn.TransformerEncoderLayer(C, 2, 8, dropout=0.0, batch_first=True).double()
decoder = torch.nn.TransformerDecoderLayer(C, 2, 8, dropout=0.0).double()
batch_norm = torch.nn.BatchNorm2d(C).double().eval()
late = torch.nn.Transformer(C, 2, 1, 1, 8, dropout=0.0).double()


def _of_module(module: torch.nn.Module, *samples: Tensor, dim: int = 0, pick: int | None = None) -> Call:
    """Its parameters' gradients count, too."""
    names = [name for name, _ in module.named_parameters()]

    def run(*given: Tensor) -> Any:
        samples_given, parameters = given[: len(samples)], given[len(samples) :]
        out = torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), samples_given)
        return out if pick is None else out[pick]

    return Call(run, samples, tuple(p.detach() for p in module.parameters()), dim)


def _penalty(x: Tensor, w: Tensor) -> Tensor:
    x = x * 1
    y = torch.tanh(x @ w)
    (slope,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    return (slope.norm(2, dim=1) - 1).pow(2).mean()


CALLS: dict[str, Call] = {
    "conv1d": Call(lambda x, w, b: F.conv1d(x, w, b, padding=1), (seen,), (_normal(2, T, 3), _normal(2))),
    "conv2d": Call(lambda x, w, b: F.conv2d(x, w, b), (image,), (_normal(2, C, 3, 3), _normal(2))),
    "conv_transpose2d": Call(lambda x, w: F.conv_transpose2d(x, w, stride=2), (image,), (_normal(C, 2, 3, 3),)),
    "max_pool2d": Call(lambda x: F.max_pool2d(x, 2), (image,)),
    "max_pool2d indices": Call(lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), (image,)),
    "adaptive_avg_pool2d": Call(lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1), (image,)),
    "adaptive_max_pool1d": Call(lambda x: F.adaptive_max_pool1d(x, 2), (seen,)),
    "interpolate": Call(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (image,)),
    "batch_norm of evaluation": _of_module(batch_norm, image),
    "group_norm": Call(lambda x, w: F.group_norm(x, 2, w), (image,), (_normal(C),)),
    "instance_norm": Call(F.instance_norm, (image,)),
    "layer_norm": Call(lambda x, w: F.layer_norm(x, (C,), w), (seen,), (_normal(C),)),
    "local_response_norm": Call(lambda x: F.local_response_norm(x, 2), (image,)),
    "lstm": _of_module(lstm, _normal(T, N, C), dim=1, pick=0),
    "gru batch_first": _of_module(lstm_first, seen, pick=0),
    "gru last state": _of_module(lstm_first, seen, pick=1),
    "transformer": _of_module(late, _normal(T, N, C), _normal(3, N, C), dim=1),
    "encoder layer": _of_module(encoder, seen),
    "decoder layer": _of_module(decoder, _normal(T, N, C), _normal(3, N, C), dim=1),
    "lstm_cell": _of_module(torch.nn.LSTMCell(C, 3).double(), x, pick=0),
    "gru_cell": _of_module(torch.nn.GRUCell(C, 3).double(), x),
    "bilinear": _of_module(torch.nn.Bilinear(C, C, 3).double(), x, x + 1),
    "embedding_bag": Call(lambda i, w: F.embedding_bag(i, w), (_integers(9, N, T),), (_normal(9, C),)),
    "embedding": Call(lambda i, w: F.embedding(i, w), (_integers(9, N, T),), (_normal(9, C),)),
    "attention": Call(F.scaled_dot_product_attention, tuple(_normal(N, 2, T, C) for _ in range(3))),
    "attention masked": Call(lambda q: F.scaled_dot_product_attention(q, q, q, masked), (_normal(N, 2, T, C),)),
    "attention of (T, T)": Call(lambda q, m: F.scaled_dot_product_attention(q, q, q, m), (seen,), (_normal(T, T),)),
    "pixel_shuffle": Call(lambda x: F.pixel_shuffle(x, 2), (image,)),
    "pad": Call(lambda x: F.pad(x, (1, 1, 2, 0)), (image,)),
    "unfold": Call(lambda x: F.fold(F.unfold(x, 2), (L, L), 2), (image,)),
    "grid_sample": Call(lambda x, t: F.grid_sample(x, F.affine_grid(t, x.shape)), (image, _normal(N, 2, 3))),
    "cosine_similarity": Call(F.cosine_similarity, (x, x + 1)),
    "pairwise_distance": Call(F.pairwise_distance, (x, x + 1)),
    "cdist": Call(torch.cdist, (seen, _normal(N, 2, C))),
    "bmm": Call(torch.bmm, (seen, seen.mT + 1)),
    "baddbmm": Call(lambda b, x, y: torch.baddbmm(b, x, y), (_normal(N, 1, 1), seen, seen.mT + 1)),
    "einsum": Call(lambda x, w: torch.einsum("btc,cd->btd", x, w), (seen,), (_normal(C, 3),)),
    "einsum ellipsis": Call(lambda x, w: torch.einsum("...tc,cd->...td", x, w), (seen,), (_normal(C, 3),)),
    "triu": Call(torch.triu, (seen,)),
    "cumsum": Call(lambda x: x.cumsum(1), (seen,)),
    "sort": Call(lambda x: x.sort(1).values, (seen,)),
    "topk": Call(lambda x: x.topk(2, -1).values, (seen,)),
    "one_hot": Call(lambda i: F.one_hot(i, C), (classes,)),
    "gather": Call(lambda x, i: x.gather(1, i), (x, _integers(C, N, 2))),
    "gather whole index": Call(lambda x: x.gather(1, classes.unsqueeze(1)), (x,)),
    "scatter_add": Call(lambda x, s: x.scatter_add(1, classes.unsqueeze(1), s), (x, _normal(N, 1))),
    "last token": Call(lambda x: x[torch.arange(N), classes], (seen,)),
    "index_select": Call(lambda x: x.index_select(1, torch.tensor([2, 0])), (seen,)),
    "picked columns": Call(lambda x: x[:, [2, 0, 0]], (seen,)),
    "masked": Call(lambda x: x.masked_fill(ignored.unsqueeze(1) < 0, 0.0), (x,)),
    "where": Call(lambda x: torch.where(ignored[:, None] < 0, x, -x), (x,)),
    "repeat": Call(lambda x: x.repeat(1, 2).tile(1, 2), (x,)),
    "expand": Call(lambda x: x[:, None].expand(-1, 3, -1), (x,)),
    "stack": Call(lambda x, y: torch.stack([x, y], 1), (x, x + 1)),
    "hstack": Call(lambda x, y: torch.hstack([x, y]), (x, x + 1)),
    "fft": Call(lambda x: torch.fft.rfft2(x).abs(), (image,)),
    "complex": Call(lambda x: torch.view_as_complex(x.unflatten(1, (2, 2)).contiguous()).imag, (x,)),
    "glu": Call(F.glu, (x,)),
    "roll": Call(lambda x: x.roll(1, 1).flip(-1), (seen,)),
    "bucketize": Call(lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0]).double()), (x,)),
    "diagonal": Call(lambda x: torch.diagonal(x, 0, 1, 2), (seen,)),
    "det": Call(lambda x: torch.linalg.det(x[:, :C]), (seen,)),
    "kthvalue": Call(lambda x: x.kthvalue(2, 1).values, (seen,)),
    "special": Call(torch.special.i0e, (x,)),
    "renorm of rows": Call(lambda x: torch.renorm(x, 2, 0, 0.5), (x,)),
    "tensordot": Call(lambda x, w: torch.tensordot(x, w, 1), (seen,), (_normal(C, 2),)),
    "gradient penalty": Call(_penalty, (x,), (_normal(C, 1),)),
    # Sums over samples: shares.
    "mean": Call(lambda x: x.mean(), (seen,)),
    "mean of samples": Call(lambda x: x.mean(0), (seen,)),
    "norm p=1": Call(lambda x: x.norm(1), (x,)),
    "outer": Call(lambda x, y: x.T @ y, (x, x + 1)),
    "einsum over samples": Call(lambda x, y: torch.einsum("bi,bj->ij", x, y), (x, x + 1)),
    "inner": Call(torch.tensordot, (x, x + 1), (), 0),
    "cross_entropy": Call(lambda x: F.cross_entropy(x, ignored), (x,)),
    "cross_entropy weights": Call(lambda x: F.cross_entropy(x, ignored, weights, label_smoothing=0.1), (x,)),
    "cross_entropy sum": Call(lambda x: F.cross_entropy(x, ignored, weights, reduction="sum"), (x,)),
    "cross_entropy none": Call(lambda x: F.cross_entropy(x, ignored, weights, reduction="none"), (x,)),
    "cross_entropy probabilities": Call(lambda x, p: F.cross_entropy(x, p.softmax(1), weights), (x, x + 1)),
    "cross_entropy tokens": Call(lambda x: F.cross_entropy(x.mT, _tokens), (seen,)),
    "cross_entropy (T, N)": Call(lambda x: F.cross_entropy(x.permute(0, 2, 1), _tokens.T), (_normal(T, N, C),), (), 1),
    "cross_entropy flat": Call(lambda x: F.cross_entropy(x.reshape(-1, C), _tokens.reshape(-1)), (seen,)),
    "nll_loss": Call(lambda x: F.nll_loss(x.log_softmax(1), ignored, weights), (x,)),
    "mse_loss": Call(lambda x: F.mse_loss(x, _wanted), (x,)),
    "mse_loss weighted": Call(lambda x: F.mse_loss(x, _wanted, weight=_wanted.abs()), (x,)),
    "bce weight": Call(
        lambda x: F.binary_cross_entropy_with_logits(x, _wanted.sigmoid(), weights, pos_weight=weights), (x,)
    ),
    "kl_div": Call(lambda x: F.kl_div(x.log_softmax(1), _wanted.softmax(1), reduction="batchmean"), (x,)),
    "gaussian_nll_loss": Call(lambda x, v: F.gaussian_nll_loss(x, _wanted, v.exp()), (x, x[:, 0].clone())),
    "cosine_embedding_loss": Call(lambda x, y: F.cosine_embedding_loss(x, y, _wanted[:, 0].sign()), (x, x + 1)),
    "triplet_margin_loss": Call(F.triplet_margin_loss, (x, x + 1, x - 1)),
    "margin_ranking_loss": Call(lambda x, y: F.margin_ranking_loss(x, y, _wanted.sign()), (x, x.flip(0))),
    "hinge_embedding_loss": Call(lambda x: F.hinge_embedding_loss(x, _wanted.sign()), (x,)),
    "multi_margin_loss": Call(lambda x: F.multi_margin_loss(x, classes, weight=weights), (x,)),
    "multilabel_margin_loss": Call(lambda x: F.multilabel_margin_loss(x, _integers(C, N, C) * 0), (x,)),
    "multilabel_soft_margin_loss": Call(lambda x: F.multilabel_soft_margin_loss(x, _wanted.sigmoid().round()), (x,)),
    "ctc_loss": Call(lambda x: F.ctc_loss(x.log_softmax(-1), _spelt, _heard, _lengths), (_normal(T, N, C),), (), 1),
    "ctc_loss joined": Call(
        lambda x: F.ctc_loss(x.log_softmax(-1), _joined, (T,) * N, tuple(_lengths.tolist())),
        (_normal(T, N, C),), (), 1,
    ),
}  # fmt: skip
CALLS["inner"] = Call(lambda x, y: torch.inner(x.flatten(), y.flatten()), (x, x + 1))
_tokens, _wanted = _integers(C, N, T), _normal(N, C)
_tokens[2, 1:] = -100
_spelt, _lengths = _integers(C - 1, N, 2) + 1, torch.tensor([1, 2, 2, 1, 2, 1, 2])
_heard = torch.full((N,), T)
_joined = torch.cat([row[:n] for row, n in zip(_spelt, _lengths)])
