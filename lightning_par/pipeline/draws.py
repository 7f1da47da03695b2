"""Random numbers of a stage: keyed by (seed, step, microbatch, event), whatever the other stages drew."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_par.random import mix, streams

_DRAWING = frozenset("""
dropout dropout_ alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d feature_dropout rand_like randn_like
randint_like bernoulli bernoulli_ uniform_ normal_ normal exponential_ random_ cauchy_ geometric_ log_normal_
multinomial poisson rrelu rrelu_ gumbel_softmax scaled_dot_product_attention multi_head_attention_forward
""".split())  # fmt: skip


def drawing(key: Sequence[int], what: Any) -> contextlib.AbstractContextManager[None]:
    """Inside, draws of torch's generators come from a stream of their own; afterwards these stand where they stood.

    Args:
        key: what the stream is keyed by.
        what: the torch function or module that is about to run; one that draws nothing costs nothing.
    """
    draws = what.training if isinstance(what, nn.Module) else getattr(what, "__name__", "") in _DRAWING
    return _drawing(key) if draws else contextlib.nullcontext()


@contextlib.contextmanager
def _drawing(key: Sequence[int]) -> Any:
    seed = mix(*key)
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    state = torch.get_rng_state()
    device_state = torch.cuda.get_rng_state() if cuda else None
    event, streams.event = streams.event, key[-1] * 1000
    torch.default_generator.manual_seed(seed)
    if cuda:
        torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        streams.event = event
        torch.set_rng_state(state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state)
