"""`torch._foreach_*`: functions of lists of tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.helpers.rule_check import Case, Layout
from tests.rule_cases.data import unit

_UNARY = """
abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round rsqrt
sigmoid sign sin sinh sqrt tan tanh trunc
""".split()
_BINARY = "add sub mul div pow maximum minimum clamp_max clamp_min".split()
a, b, c = unit(4, 6), unit(4, 6), unit(5)
_MIXED: list[Layout] = [(0, 0, None), (1, 1, 0), (None, None, 0)]


def _written(call: Any, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    returned = call(a, b, c)  # what was written itself
    return a, b, c, *(returned or ())


def _both(name: str, label: str, call: Any, layouts: list[Layout] = _MIXED) -> list[Case]:
    """The function and its in-place form."""
    function, written = getattr(torch, f"_foreach_{name}"), getattr(torch, f"_foreach_{name}_", None)
    cases = [Case(f"_foreach_{name}{label}", partial(call, function), [a, b, c], layouts, grad=False)]
    if written is None or name in ("maximum", "minimum") and "number" in label:
        return cases
    call = partial(_written, partial(call, written))
    return [*cases, Case(f"_foreach_{name}_{label}", call, [a, b, c], layouts, grad=False)]


CASES = [
    *[case for name in _UNARY for case in _both(name, "", lambda f, a, b, c: f([a, b, c]))],
    *[
        case
        for name in _BINARY
        for case in (
            *_both(name, " lists", lambda f, a, b, c: f([a, c], [b, c.detach() * 0.7]), [(0, 0, None), (1, None, 0)]),
            *_both(name, " number", lambda f, a, b, c: f([a, b, c], 0.5)),
            *_both(name, " numbers", lambda f, a, b, c: f((a, b, c), [0.5, 0.6, 0.7])),
        )
    ],
    *_both("mul", " tensor", lambda f, a, b, c: f([a, b, c], torch.tensor(0.5).double())),
    *_both("add", " alpha", lambda f, a, b, c: f([a, c], [b, c.detach()], alpha=0.5)),
    *_both("lerp", "", lambda f, a, b, c: f([a, c], [b, c.detach() * 2], 0.3)),
    *_both("addcmul", "", lambda f, a, b, c: f([a, c], [b, c.detach()], [b, c.detach()], value=0.5)),
    *_both("addcdiv", "", lambda f, a, b, c: f([a, c], [b, c.detach()], [b, c.detach()], value=0.5)),
    Case("_foreach_mul with gradients", lambda a, b, c: torch._foreach_mul([a, c], [b, c]), [a, b, c], _MIXED),
    Case("_foreach_pow scalar", lambda a, b, c: torch._foreach_pow(2.0, [a, b, c]), [a, b, c], _MIXED, local=None),
    Case(
        "_foreach_add broadcast",
        lambda a, b, c: torch._foreach_add([a], [b[:, :1]]),
        [a, b, c],
        [(1, None, None)],
        local=None,
    ),
    Case(
        "_foreach_add_ into plain",
        partial(_written, lambda a, b, c: torch._foreach_add_([a, b], [b, b])),
        [a, b, c],
        [(None, 1, None)],
        local=False,
        grad=False,
    ),
    Case(
        "_foreach_copy_",
        partial(_written, lambda a, b, c: torch._foreach_copy_([a, c], [b, c + 1])),
        [a, b, c],
        _MIXED,
        grad=False,
    ),
    Case(
        "_foreach_zero_",
        partial(_written, lambda a, b, c: torch._foreach_zero_([a, b, c])),
        [a, b, c],
        _MIXED,
        grad=False,
    ),
    *[
        Case(
            f"_foreach_norm {p}",
            lambda a, b, c, p=p: torch._foreach_norm([a, b, c], p),
            [a, b, c],
            _MIXED,
            local=None,
            grad=False,
        )
        for p in (1, 2, float("inf"))
    ],
]
