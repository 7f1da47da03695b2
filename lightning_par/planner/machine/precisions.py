"""What a Trainer's precision means for bytes and rates."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """A precision.

    Attributes:
        name: as the user wrote it.
        weights: bytes of an element of a parameter as the optimizer has it.
        gradients: bytes of an element of its gradient.
        copy: bytes of an element of the copy that products use, beside the optimizer's; 0: there is none.
        compute: the dtype of products, by the name that a machine's `peak` has it under.
        dtype: of the module when the step is recorded.
        autocast: the dtype that torch's autocast runs products in; None: activations have the module's throughout.
    """

    name: str
    weights: int
    gradients: int
    copy: int
    compute: str
    dtype: torch.dtype
    autocast: torch.dtype | None = None

    @property
    def stepped(self) -> torch.dtype:
        """The dtype of parameters as the optimizer has them."""
        return self.dtype if self.dtype.itemsize == self.weights else torch.float32

    def moved(self, low: bool = True) -> int:
        """Bytes of an element of a weight that is gathered: ``low``, if nothing uses it in single precision."""
        return self.copy if self.copy and low else self.weights


_HALF, _BRAIN = torch.float16, torch.bfloat16


def _mixed(name: str, compute: str, dtype: torch.dtype) -> Precision:
    """Lightning's: weights and what lies between layers in single precision, products by autocast."""
    return Precision(name, 4, 4, 2, compute, torch.float32, dtype)


def _published(name: str, compute: str, dtype: torch.dtype) -> Precision:
    """As Megatron-LM, torchtitan and Composer mean it: all activations in half precision, beside single weights."""
    return Precision(name, 4, 4, 2, compute, dtype)


_KNOWN = {
    "32-true": Precision("32-true", 4, 4, 0, "float32", torch.float32),
    "64-true": Precision("64-true", 8, 8, 0, "float64", torch.float64),
    "16-true": Precision("16-true", 2, 2, 0, "float16", _HALF),
    "bf16-true": Precision("bf16-true", 2, 2, 0, "bfloat16", _BRAIN),
    "16-mixed": _mixed("16-mixed", "float16", _HALF),
    "bf16-mixed": _mixed("bf16-mixed", "bfloat16", _BRAIN),
    "fp16": _published("fp16", "float16", _HALF),
    "bf16": _published("bf16", "bfloat16", _BRAIN),
    "transformer-engine": _published("transformer-engine", "float8", _BRAIN),
}
_ALIASES = {
    "32": "32-true", "fp32": "32-true", "64": "64-true", "16": "16-mixed", "amp_fp16": "fp16", "amp_bf16": "bf16",
    "float8": "transformer-engine", "fp8": "transformer-engine", "bf16+float8": "transformer-engine",
    "transformer-engine-float16": "transformer-engine",
}  # fmt: skip


def read_precision(name: str | int) -> Precision:
    """The precision of that name: Lightning's, or "fp16", "bf16" and "fp8" as publications call what they ran in.

    Raises:
        ValueError: there is none; the message has the nearest.

    Example::

        assert read_precision("bf16-mixed").dtype == torch.float32
        assert read_precision("bf16").dtype == torch.bfloat16
    """
    text = str(name).lower()
    found = _KNOWN.get(_ALIASES.get(text, text))
    if found is None:
        near = difflib.get_close_matches(text, [*_KNOWN, *_ALIASES], n=3, cutoff=0.3) or list(_KNOWN)
        raise ValueError(f"There is no precision {name!r}. Write one of {', '.join(map(repr, near))}.")
    return found
