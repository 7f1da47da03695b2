"""Elementwise functions, their in-place and operator forms, and losses of each element."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.rule_check import Case, Layout
from tests.rule_cases.data import flags, integers, normal, unit

_UNARY = """
abs absolute neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos tan asin
acos atan sinh cosh erf erfc floor ceil round trunc frac sign sgn logical_not isnan isinf isfinite
nan_to_num logit clone detach zeros_like ones_like
""".split()
_METHODS = "contiguous float double half bfloat16 int long bool cpu".split()
_ACTIVATIONS = """
relu relu6 leaky_relu elu selu celu gelu silu mish softplus softsign hardtanh hardsigmoid hardswish logsigmoid
tanhshrink hardshrink softshrink rrelu sigmoid tanh
""".split()
_BINARY = """
add sub subtract mul multiply div divide true_divide floor_divide pow float_power remainder fmod maximum minimum fmax
fmin atan2 eq ne lt le gt ge not_equal greater less logical_and logical_or logical_xor isclose hypot xlogy copysign
heaviside
""".split()
_BITWISE = "bitwise_and bitwise_or bitwise_xor".split()
_ONE: list[Layout] = [(0,), (1,)]
_BOTH: list[Layout] = [(0, 0), (1, 1), (0, None), (None, 1)]


def _in_place(call: Callable[..., Any]) -> Callable[..., Tensor]:
    """``call`` writes into its first argument, which is what the case looks at."""

    def run(x: Tensor, *others: Tensor) -> Tensor:
        written = call(x, *others)
        assert written is None or written is x
        return x

    return run


def _into(out: Tensor, call: Callable[[Tensor], Any]) -> Tensor:
    call(out)
    return out


def _in_place_operator(call: Callable[..., Any]) -> Callable[..., Tensor]:
    def run(x: Tensor, other: Tensor) -> Tensor:
        return call(x, other) if torch.is_tensor(x) else x

    return run


def _named(names: list[str], spaces: list[Any], inputs: list[Tensor], layouts: list[Layout]) -> list[Case]:
    """Each of ``names`` as torch function and as method, and its in-place form where it has one."""
    cases = []
    for name in names:
        grad = name not in ("floor_divide", "heaviside")  # torch has no derivative of these
        for space in spaces:
            label = f"{getattr(space, '__name__', '').split('.')[-1]}.{name}"
            if hasattr(space, name):
                cases.append(Case(label, getattr(space, name), inputs, layouts, grad=grad))
            if hasattr(space, name + "_") and name not in ("contiguous",):
                call = _in_place(getattr(space, name + "_"))
                kept = [layout for layout in layouts if layout[0] is not None]
                cases.append(Case(label + "_", call, inputs, kept, grad=grad))
    return cases


x, y, row, column, scalar = unit(4, 6), unit(4, 6), unit(6), unit(4, 1), unit()
mask = flags(4, 6)


def _written(new: Tensor, x: Tensor) -> Tensor:
    new[:, :3].copy_(x[:, :3])
    new[:, 3:] = x[:, 3:] * 2
    return new


CASES = [
    *_named(_UNARY, [torch, Tensor], [x], _ONE),
    *_named(_METHODS, [Tensor], [x], _ONE),
    *_named(_ACTIVATIONS, [F, torch], [normal(4, 6)], _ONE),
    *_named(["tanh", "sigmoid"], [Tensor], [x], _ONE),
    *_named(_BINARY, [torch, Tensor], [x, y], _BOTH),
    *_named(["bitwise_not"], [torch, Tensor], [mask], _ONE),
    *_named(_BITWISE, [torch, Tensor], [mask, flags(4, 6)], _BOTH),
    Case("empty_like", torch.empty_like, [x], _ONE, value=False),
    Case("full_like", lambda x: torch.full_like(x, 2.0), [x], _ONE),
    Case("full_like dtype", lambda x: torch.full_like(x, 2, dtype=torch.int64), [x], _ONE),
    Case("fill", lambda x: torch.fill(x, 3.0), [x], _ONE),
    Case("fill_", _in_place(lambda x: x.fill_(3.0)), [x], _ONE),
    Case("zero_", _in_place(lambda x: x.zero_()), [x], _ONE),
]

_OPERATORS = "add sub mul truediv floordiv mod pow and_ or_ xor eq ne lt le gt ge".split()
for _name in _OPERATORS:
    _call = getattr(operator, _name)
    _a, _b = (mask, flags(4, 6)) if _name in ("and_", "or_", "xor") else (x, y)
    _grad = _name not in ("floordiv", "mod")
    CASES.append(Case(f"operator {_name}", _call, [_a, _b], _BOTH, grad=_grad))
    if _name not in ("and_", "or_", "xor"):
        CASES += [
            Case(f"{_name} number", partial(lambda call, x: call(x, 0.5), _call), [x], _ONE, grad=_grad),
            Case(f"number {_name}", partial(lambda call, x: call(0.5, x), _call), [x], _ONE, grad=_grad),
            Case(f"{_name} row", _call, [x, row], [(0, None), (1, None), (1, 0), (None, 0)], grad=_grad),
            Case(f"row {_name}", _call, [row, x], [(None, 0), (None, 1), (0, 1), (0, None)], grad=_grad),
            Case(f"{_name} column", _call, [x, column], [(0, None), (1, None), (0, 0), (None, 0)], grad=_grad),
            Case(f"{_name} scalar tensor", _call, [x, scalar], [(0, None), (1, None)], grad=_grad),
            Case(f"scalar tensor {_name}", _call, [scalar, x], [(None, 0), (None, 1)], grad=_grad),
        ]
    _inner = getattr(operator, "i" + _name.rstrip("_"), None)
    if _inner is not None:
        CASES.append(
            Case(f"operator i{_name}", _in_place_operator(_inner), [_a, _b], [(0, 0), (1, 1), (1, None)], grad=_grad)
        )
    _dunder = f"__r{_name.rstrip('_')}__"
    if hasattr(Tensor, _dunder):
        CASES.append(
            Case(_dunder, partial(lambda name, a, b: getattr(a, name)(b), _dunder), [_a, _b], _BOTH, grad=_grad)
        )

CASES += [
    Case("-x", operator.neg, [x], _ONE),
    Case("+x", operator.pos, [x], _ONE),
    Case("abs(x)", abs, [x], _ONE),
    Case("~x", operator.invert, [mask], _ONE),
    Case("rsub", lambda a, b: torch.rsub(a, b), [x, y], _BOTH),
    Case("eq None", lambda x: (x == None, x != None), [x], _ONE),  # noqa: E711
    Case("clamp", lambda x: torch.clamp(x, 0.3, 0.6), [x], _ONE),
    Case(
        "clamp tensors",
        lambda x, low, high: x.clamp(low, max=high),
        [x, row * 0.5, column],
        [(0, None, None), (1, None, None)],
    ),
    Case("clip", lambda x: x.clip(min=0.3), [x], _ONE),
    Case("clamp_min", lambda x: x.clamp_min(0.4), [x], _ONE),
    Case("clamp_max", lambda x: torch.clamp_max(x, 0.4), [x], _ONE),
    *[
        Case(f"{name}_", _in_place(partial(lambda name, x: getattr(x, name + "_")(0.4), name)), [x], _ONE)
        for name in ("clamp", "clip", "clamp_min", "clamp_max")
    ],
    Case("where", torch.where, [mask, x, y], [(0, 0, 0), (None, 1, None), (1, None, None), (None, None, 0)]),
    Case("where method", lambda x, m: x.where(m, 0.0), [x, mask], [(0, 0), (1, None), (None, 1)]),
    Case("where scalars", lambda m: torch.where(m, 1.0, 2.0), [mask], _ONE),
    Case("where keywords", lambda m, x: torch.where(condition=m, input=x, other=x * 2), [mask, x], [(0, 0), (None, 1)]),
    Case("where indices", torch.where, [mask], _ONE, local=False),
    Case("masked_fill", lambda x, m: x.masked_fill(m, -1.0), [x, mask], [(0, 0), (1, None), (None, 1)]),
    Case("masked_fill row", lambda x, m: x.masked_fill(m, -1.0), [x, flags(6)], [(0, None), (1, None), (1, 0)]),
    Case("masked_fill_", _in_place(lambda x, m: x.masked_fill_(m, -1.0)), [x, mask], [(0, 0), (1, None)]),
    Case("lerp", lambda x, y, w: torch.lerp(x, y, w), [x, y, row], [(0, 0, None), (1, None, None), (None, 1, 0)]),
    Case("lerp_", _in_place(lambda x, y: x.lerp_(y, 0.3)), [x, y], [(0, 0), (1, None)]),
    *[
        Case(
            name,
            partial(lambda name, x, y, z: getattr(torch, name)(x, y, z, value=0.5), name),
            [x, y, row],
            [(0, 0, None), (1, None, 0), (None, 1, None)],
        )
        for name in ("addcmul", "addcdiv")
    ],
    *[
        Case(
            name + "_",
            _in_place(partial(lambda name, x, y, z: getattr(x, name + "_")(y, z), name)),
            [x, y, row],
            [(0, 0, None), (1, None, 0)],
        )
        for name in ("addcmul", "addcdiv")
    ],
    *[
        Case(f"prelu {w.numel()}", F.prelu, [normal(4, 6, 3), w], [(0, None), (1, None), (2, None), *also])
        for w, also in ((unit(1), []), (unit(6), [(1, 0)]))
    ],
    Case("prelu rows", F.prelu, [normal(4, 6), unit(6)], [(0, None), (1, None), (1, 0)]),
    Case("prelu method", lambda x, w: x.prelu(w), [normal(4, 6), unit(1)], [(0, None), (1, None)]),
    Case("threshold", lambda x: F.threshold(x, 0.5, 0.1), [x], _ONE),
    Case("torch.threshold", lambda x: torch.threshold(x, 0.5, 0.1), [x], _ONE),
    Case("threshold_", _in_place(lambda x: F.threshold_(x, 0.5, 0.1)), [x], _ONE),
    Case("relu inplace", _in_place(lambda x: (F.relu(x, inplace=True), None)[1]), [normal(4, 6)], _ONE),
    Case("add alpha", lambda x, y: torch.add(x, y, alpha=3), [x, y], _BOTH),
    Case(
        "add out",
        lambda x, y: _into(torch.zeros_like(x), lambda out: torch.add(x, y, out=out)),
        [x, y],
        _BOTH[:3],
        local=False,
        grad=False,
    ),
    Case(
        "add into plain",
        lambda x, y: _into(torch.zeros(4, 6).double(), lambda out: torch.add(x, y, out=out)),
        [x, y],
        _BOTH,
        local=False,
        grad=False,
    ),
    Case("div rounding", lambda x, y: torch.div(x, y, rounding_mode="floor"), [x, y], _BOTH),
    Case("input keyword", lambda x, y: torch.add(input=x, other=y), [x, y], _BOTH),
    Case("method keyword", lambda x, y: x.mul(other=y), [x, y], _BOTH),
    Case("wider plain", operator.add, [row, normal(3, 4, 6)], [(0, None), (0, 2), (None, 1)]),
    Case("dims differ", operator.add, [x, normal(4, 6)], [(0, 1), (1, 0)], local=False),
    Case("of size one", operator.mul, [unit(4, 1), y], [(1, None)], local=False),
    Case("mixed dtypes", lambda x: x * torch.ones(6, dtype=torch.float32), [x], _ONE),
    Case("to", lambda x: x.to(torch.float32), [x], _ONE),
    Case("to same", lambda x: x.to(x.device), [x], _ONE),
    Case("to other", lambda x, y: x.to(y), [x, y.float()], [(0, 0), (1, None), (None, 1)]),
    Case("type", lambda x: (x.type(torch.float32), x.type()), [x], _ONE),
    Case("type_as", lambda x, y: x.type_as(y), [x, y.float()], [(0, 0), (1, None), (None, 1)]),
    *[
        Case(name, call, [x], _ONE, value=name != "new_empty")
        for name, call in {
            "new_zeros": lambda x: x.new_zeros(2, 3),
            "new_ones": lambda x: x.new_ones((2, 3), dtype=torch.int64),
            "new_full": lambda x: x.new_full((2,), 3.0),
            "new_empty": lambda x: x.new_empty(3),
            "new_tensor": lambda x: x.new_tensor([1, 2]),
        }.items()
    ],
    Case(
        "written into a new one",
        lambda x: [
            torch.cat([_written(new, x), x], -1)
            for new in (
                x.new_zeros(4, 6),
                x.new_empty((4, 6)),
                x.new_full(x.shape, 2.0),
                x.new_ones(size=(4, 6), dtype=torch.float64),
            )
        ],
        [x],
        _ONE,
        local=None,
    ),
    Case("copy_", _in_place(lambda x, y: x.copy_(y)), [x, y], [(0, 0), (1, 1), (0, None), (1, 0)]),
    Case("copy_ row", _in_place(lambda x, y: x.copy_(y)), [x, row], [(0, None), (1, None), (1, 0)], local=None),
    Case("requires_grad_", lambda x: (x.detach().requires_grad_() * 2).detach(), [x], _ONE),
    Case("float_power int", lambda n: torch.float_power(n, 2), [integers(5, 4, 6)], _ONE),
]

_LOSSES = {
    "mse_loss": (F.mse_loss, x, y),
    "l1_loss": (F.l1_loss, x, y),
    "smooth_l1_loss": (F.smooth_l1_loss, x, y),
    "huber_loss": (F.huber_loss, x, y),
    "binary_cross_entropy": (F.binary_cross_entropy, x, y),
    "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, normal(4, 6), y),
    "kl_div": (F.kl_div, x.log(), y),
    "poisson_nll_loss": (F.poisson_nll_loss, x, y),
    "soft_margin_loss": (lambda x, y, **kw: F.soft_margin_loss(x, y.detach().sub(0.5).sign(), **kw), x, y),
}
for _name, (_loss, _x, _y) in _LOSSES.items():
    for _reduction in ("mean", "sum", "none", *(("batchmean",) if _name == "kl_div" else ())):
        _call = partial(_loss, reduction=_reduction)
        CASES.append(Case(f"{_name} {_reduction}", _call, [_x, _y], _BOTH))
CASES += [
    Case("mse_loss default", F.mse_loss, [x, y], _BOTH),
    Case("mse_loss broadcast", F.mse_loss, [x, row], [(0, None), (1, None)]),
    Case(
        "bce weight",
        lambda x, y, w: F.binary_cross_entropy(x, y, weight=w.detach()),
        [x, y, unit(4, 6)],
        [(0, 0, None), (1, None, 1)],
    ),
    Case(
        "bce pos_weight",
        lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, pos_weight=w.detach()),
        [normal(4, 6), y, unit(6)],
        [(0, 0, None), (1, None, None)],
        local=None,
    ),
    Case(
        "kl_div log_target",
        lambda x, y: F.kl_div(x, y, log_target=True, reduction="batchmean"),
        [x.log(), y.log()],
        _BOTH,
    ),
    Case("huber delta", lambda x, y: F.huber_loss(x, y, reduction="sum", delta=0.2), [x, y], _BOTH),
]
