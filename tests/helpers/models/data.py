"""Data sets that the models train on: each function gives seed -> a list of `SAMPLES` samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

SAMPLES = 64


def text(vocab: int = 48, length: int = 8, padded: bool = False) -> Callable[[int], list[Any]]:
    """Samples (tokens, next tokens); where padded, the targets end in -100."""

    def make(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(1, vocab, (SAMPLES, length + 1), generator=generator)
        x, y = ids[:, :-1].clone(), ids[:, 1:].clone()
        if padded:
            for i in range(SAMPLES):
                y[i, length - 1 - i % 5 :] = -100
        return list(zip(x, y, strict=True))

    return make


def ragged(data: Callable[[int], list[Any]]) -> Callable[[int], list[Any]]:
    """Sequences of another length in each batch of 4, and a last batch of 2 samples."""

    def make(seed: int) -> list[Any]:
        samples = data(seed)[: 6 if seed else 14]
        return [tuple(x[: len(x) - i // 4 % 3] for x in sample) for i, sample in enumerate(samples)]

    return make


def dicts(vocab: int = 48, length: int = 8, masked: bool = False, seq2seq: bool = False) -> Callable[[int], list[Any]]:
    """Samples as Hugging Face collators make them: input_ids, labels and, padded at the right, attention_mask."""

    def make(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(2, vocab, (SAMPLES, length), generator=generator)
        target = torch.randint(2, vocab, (SAMPLES, length - 2), generator=generator) if seq2seq else ids.clone()
        mask = torch.ones_like(ids)
        if masked:
            for i in range(SAMPLES):
                valid = length - i % 4
                mask[i, valid:], ids[i, valid:], target[i, valid:] = 0, 0, -100
        names = ("input_ids", "attention_mask", "labels") if masked else ("input_ids", "labels")
        columns = (ids, mask, target) if masked else (ids, target)
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    return make


def vectors(features: int = 12, classes: int = 5) -> Callable[[int], list[Any]]:
    """Samples (features, class), or (features, value) where classes is 0."""

    def make(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(SAMPLES, features, generator=generator)
        if classes:
            return list(zip(x, torch.randint(classes, (SAMPLES,), generator=generator), strict=True))
        return list(zip(x, torch.randn(SAMPLES, 3, generator=generator), strict=True))

    return make


def images(channels: int = 1, size: int = 8, classes: int = 5) -> Callable[[int], list[Any]]:
    """Samples (image, class)."""

    def make(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(SAMPLES, channels, size, size, generator=generator)
        return list(zip(x, torch.randint(classes, (SAMPLES,), generator=generator), strict=True))

    return make


def sounds(bands: int = 6, frames: int = 16, vocab: int = 48, length: int = 8) -> Callable[[int], list[Any]]:
    """Samples of a spectrogram and the tokens that were spoken."""

    def make(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(SAMPLES, bands, frames, generator=generator)
        labels = torch.randint(3, vocab, (SAMPLES, length), generator=generator)
        return [dict(input_features=a, labels=b) for a, b in zip(x, labels, strict=True)]

    return make


def pairs(vocab: int = 24, source: int = 7, target: int = 6) -> Callable[[int], list[Any]]:
    """Samples (source tokens padded with 0, target tokens)."""

    def make(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randint(1, vocab, (SAMPLES, source), generator=generator)
        for i in range(SAMPLES):
            x[i, source - i % 3 :] = 0
        return list(zip(x, torch.randint(1, vocab, (SAMPLES, target), generator=generator), strict=True))

    return make


def renamed(data: Callable[[int], list[Any]], *names: str) -> Callable[[int], list[Any]]:
    """Tuples as dicts."""
    return lambda seed: [dict(zip(names, sample, strict=True)) for sample in data(seed)]
