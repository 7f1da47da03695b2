"""Calls of torch functions by name: for each function of that name, arguments that it takes.

The facts of `lightning_par.sharded.functions` are about names, as a mode or a tensor subclass is told them. So a fact
must hold for each function that torch tells of by the name: a method, one of `torch` or of `torch.nn.functional`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_par.sharded.functions import name_of

_SPACES: tuple[Any, ...] = (Tensor, torch, F, torch.linalg, torch._VF, torch.nn.init)


class Values:
    """Draws the tensors of one call; another seed gives another call of the same shapes.

    Args:
        seed: of the values.
        signed: whether floats may be below zero, where some functions are not defined.
    """

    def __init__(self, seed: int, signed: bool = False) -> None:
        self._generator, self._signed = torch.Generator().manual_seed(seed), signed

    def unit(self, *shape: int) -> Tensor:
        """Between 0.1 and 0.9, or between -1 and 1."""
        drawn = torch.rand(shape, generator=self._generator, dtype=torch.float64)
        return 2 * drawn - 1 if self._signed else 0.1 + 0.8 * drawn

    def below(self, most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=self._generator)

    @property
    def x(self) -> Tensor:
        return self.unit(4, 6)

    @property
    def row(self) -> Tensor:
        return self.unit(6)

    @property
    def one(self) -> Tensor:
        return self.unit()

    @property
    def bits(self) -> Tensor:
        return self.below(4, 4, 6)

    @property
    def flags(self) -> Tensor:
        return self.below(2, 4, 6).bool()

    @property
    def lists(self) -> list[Tensor]:
        return [self.x, self.row]


Arguments = Callable[[Values], tuple[Any, ...]]
"""What a function is called with; a dict that comes last is its arguments by name."""

_ARGUMENTS: dict[str, list[Arguments]] = {}
_ANY: list[Arguments] = [lambda v: (v.x,), lambda v: (v.x, v.x), lambda v: (v.bits, v.bits), lambda v: (v.bits,)]


def _call(names: str, *arguments: Arguments) -> None:
    for name in names.split():
        _ARGUMENTS.setdefault(name, []).extend(arguments)


# What Python gets.
_call("__bool__ is_nonzero item __float__ __complex__", lambda v: (v.one,))
_call("__int__", lambda v: (10 * v.one,))
_call("__index__", lambda v: (v.below(9),))
_call("equal allclose is_same_size result_type", lambda v: (v.x, v.x))
_call("__contains__", lambda v: (v.below(9, 4, 6), 3))
_call("__format__", lambda v: (v.one, ".3f"))

# Draws.
_call("dropout dropout_ alpha_dropout alpha_dropout_ native_dropout", lambda v: (v.unit(2, 3, 4, 4), 0.5, True))
_call("feature_dropout feature_dropout_ feature_alpha_dropout feature_alpha_dropout_ dropout1d dropout2d dropout3d",
      lambda v: (v.unit(2, 3, 4, 4), 0.5, True), lambda v: (v.unit(2, 3, 4), 0.5, True),
      lambda v: (v.unit(2, 3, 4, 4, 4), 0.5, True))  # fmt: skip
_call("rrelu rrelu_", lambda v: (-v.x.abs(), 0.1, 0.3, True))
_call("geometric_", lambda v: (v.x, 0.5))
_call("randint_like", lambda v: (v.x, 99))
_call("randint", lambda v: (99, (4, 6)))
_call("randperm", lambda v: (9,))
_call("normal", lambda v: (v.x, 1.0), lambda v: (0.0, v.x.abs()))
_call("multinomial", lambda v: (v.x.abs(), 3))
_call("binomial", lambda v: (torch.full((4, 6), 9.0), v.x.abs().float()))
_call("_standard_gamma _sample_dirichlet poisson", lambda v: (v.x.abs() + 3,))
for _n in (2, 3):
    _call(f"fractional_max_pool{_n}d fractional_max_pool{_n}d_with_indices",
          lambda v, n=_n: (v.unit(2, 3, *[8] * n), 2, [5] * n))  # type: ignore[misc]  # fmt: skip
_call("scaled_dot_product_attention", lambda v: (v.unit(2, 4, 6), v.unit(2, 4, 6), v.unit(2, 4, 6), None, 0.5))
_call("multi_head_attention_forward",
      lambda v: (v.unit(5, 2, 6), v.unit(5, 2, 6), v.unit(5, 2, 6), 6, 2, v.unit(18, 6), None, None, None, False, 0.5,
                 v.unit(6, 6), None))  # fmt: skip


def _cells(v: Values, gates: int) -> list[Tensor]:
    """The weights of two recurrent layers without biases."""
    return [v.unit(gates * 6, 6) for _ in range(4)]


_call("lstm", lambda v: (v.unit(5, 2, 6), [v.unit(2, 2, 6), v.unit(2, 2, 6)], _cells(v, 4), False, 2, 0.5, True, False,
                         False))  # fmt: skip
for _name, _gates in (("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)):
    _call(_name, lambda v, gates=_gates: (v.unit(5, 2, 6), v.unit(2, 2, 6), _cells(v, gates), False, 2, 0.5, True,
                                          False, False))  # type: ignore[misc]  # fmt: skip

# Entry by entry.
_call("where", lambda v: (v.flags, v.x, v.x), lambda v: (v.x, v.flags, v.x))
_call("masked_fill masked_fill_", lambda v: (v.x, v.flags, 2.0))
_call("lerp lerp_", lambda v: (v.x, v.x, 0.3), lambda v: (v.x, v.x, v.x))
_call("addcmul addcmul_ addcdiv addcdiv_", lambda v: (v.x, v.x, v.x))
_call("clamp clamp_ clip clip_", lambda v: (v.x, 0.3, 0.6))
_call("threshold threshold_ _threshold", lambda v: (v.x, 0.5, 0.1))
_call("fill fill_ full_like", lambda v: (v.x, 2.0))
_call("__eq__ __rsub__ __rdiv__ __rmod__ __rpow__ __floordiv__ __rfloordiv__", lambda v: (v.x, v.x), lambda v: (v.x, 2))
_call("copy_", lambda v: (v.x, v.x))
_call("to type", lambda v: (v.x, torch.float32), lambda v: (v.x, torch.float64))
_call("to", lambda v: (v.x, v.row.float()))
_call("type_as", lambda v: (v.x, v.row.float()), lambda v: (v.x, v.row))
_call("new_zeros new_ones new_empty", lambda v: (v.x, (2, 3)))
_call("new_full", lambda v: (v.x, (2, 3), 2.0))
_LISTS = [_name for _name in dir(torch) if _name.startswith("_foreach_")]
for _name in _LISTS:
    _bare = _name.removeprefix("_foreach_").removesuffix("_")
    if _bare in ("addcmul", "addcdiv"):
        _call(_name, lambda v: (v.lists, v.lists, v.lists))
    elif _bare == "lerp":
        _call(_name, lambda v: (v.lists, v.lists, 0.3))
    else:
        _call(_name, lambda v: (v.lists,), lambda v: (v.lists, v.lists))


def _fused(v: Values, states: str, **options: Any) -> tuple[Any, ...]:
    named: dict[str, Any] = {state: [x.abs() for x in v.lists] for state in states.split()}
    steps = [torch.ones(()) for _ in range(2)]
    return v.lists, v.lists, *named.values(), {**options, **({"state_steps": steps} if "avg" in states else {})}


_STEP = {"lr": 0.1, "weight_decay": 0.0, "maximize": False}
_MEANS = {**_STEP, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": False, "max_exp_avg_sqs": []}
_call("_fused_adam_ _fused_adamw_", lambda v: _fused(v, "exp_avgs exp_avg_sqs", **_MEANS))
_call("_fused_sgd_", lambda v: _fused(v, "momentum", **_STEP, momentum=0.9, dampening=0.0, nesterov=False,
                                      is_first_step=False))  # fmt: skip
_call("_fused_adagrad_", lambda v: _fused(v, "sums", **_STEP, lr_decay=0.0, eps=1e-8,
                                          state_steps=[torch.ones(()) for _ in range(2)]))  # fmt: skip

# Shapes.
_call("__getitem__", lambda v: (v.x, (slice(1, 3), 2)), lambda v: (v.x, 1))
_call("__setitem__", lambda v: (v.x, 0, 1.0), lambda v: (v.x, torch.tensor([2, 0]), 1.0))
_call("narrow", lambda v: (v.x, 0, 1, 2))
_call("select", lambda v: (v.x, 0, 1))
_call("split chunk tensor_split", lambda v: (v.x, 2))
_call("split split_with_sizes", lambda v: (v.x, [1, 3]))
_call("transpose swapaxes swapdims movedim moveaxis", lambda v: (v.x, 0, 1))
_call("permute", lambda v: (v.x, (1, 0)))
_call("view reshape", lambda v: (v.x, (6, 4)))
_call("view_as reshape_as", lambda v: (v.x, v.unit(6, 4)))
_call("unflatten", lambda v: (v.x, 1, (2, 3)))
_call("squeeze", lambda v: (v.unit(4, 1),))
_call("unsqueeze", lambda v: (v.x, 1))
_call("expand broadcast_to", lambda v: (v.row, (4, 6)))
_call("expand_as", lambda v: (v.row, v.x))
_call("real", lambda v: (v.x,), lambda v: (torch.complex(v.x, v.x),))
_call("imag", lambda v: (torch.complex(v.x, v.x),))
_call("repeat tile", lambda v: (v.row, (3, 2)))
_call("zeros ones empty rand randn", lambda v: ((4, 6),))
_call("full", lambda v: ((4, 6), 2.0))
_call("stack cat concat concatenate hstack vstack dstack", lambda v: ([v.x, v.x],))
_call("index_select", lambda v: (v.x, 0, torch.tensor([2, 0])))
_call("masked_select", lambda v: (v.x, v.flags))
_call("repeat_interleave", lambda v: (v.x, torch.tensor([1, 2, 0, 3]), 0))
_call("_pack_padded_sequence", lambda v: (v.unit(3, 4, 6), torch.tensor([3, 3, 2, 1]), False))
_call("_pad_packed_sequence", lambda v: (v.unit(9, 6), torch.tensor([4, 3, 2]), False, 0.0, 3))
_call("flip", lambda v: (v.x, (0,)))
_call("roll", lambda v: (v.x, 1, 0))
_call("rot90", lambda v: (v.x, 1, (0, 1)))

# Sums.
_call("sum nansum mean prod max min amax amin std var std_mean var_mean median nanmedian argmax argmin count_nonzero",
      lambda v: (v.x,), lambda v: (v.x, 0))  # fmt: skip
_call("aminmax", lambda v: (v.x,), lambda v: (v.x, {"dim": 0}))
_call("norm linalg_vector_norm", lambda v: (v.x,), lambda v: (v.x, 2, 0))
_call("kthvalue", lambda v: (v.x, 2, 0))
_call("mode logsumexp cumsum cumprod logcumsumexp cummax cummin softmax log_softmax", lambda v: (v.x, 0))
_call("any", lambda v: (v.flags < 0,), lambda v: (v.flags < 0, 0))
_call("all", lambda v: (v.flags >= 0,), lambda v: (v.flags >= 0, 0))
_call("topk", lambda v: (v.x, 2))
_call("linear", lambda v: (v.x, v.unit(5, 6)))
_call("matmul mm", lambda v: (v.x, v.unit(6, 5)))
_call("__rmatmul__", lambda v: (v.unit(6, 5), v.x))
_call("bmm", lambda v: (v.unit(2, 4, 6), v.unit(2, 6, 5)))
_call("einsum", lambda v: ("ij,jk->ik", v.x, v.unit(6, 5)))
_call("addmm", lambda v: (v.unit(4, 5), v.x, v.unit(6, 5)))
_call("addbmm", lambda v: (v.unit(4, 5), v.unit(2, 4, 6), v.unit(2, 6, 5)))
_call("baddbmm", lambda v: (v.unit(2, 4, 5), v.unit(2, 4, 6), v.unit(2, 6, 5)))
_call("mv", lambda v: (v.x, v.row))
_call("addmv", lambda v: (v.unit(4), v.x, v.row))
_call("dot vdot inner outer ger", lambda v: (v.row, v.row))
_call("tensordot", lambda v: (v.x, v.unit(6, 5), 1))
_call("dist", lambda v: (v.x, v.x))
for _n in (1, 2, 3):
    _call(f"conv{_n}d", lambda v, n=_n: (v.unit(2, 3, *[6] * n), v.unit(4, 3, *[3] * n)))  # type: ignore[misc]
    _call(f"conv_transpose{_n}d", lambda v, n=_n: (v.unit(2, 3, *[6] * n), v.unit(3, 4, *[3] * n)))  # type: ignore[misc]
_call("embedding", lambda v: (v.below(5, 4), v.unit(5, 6)), lambda v: (v.unit(5, 6), v.below(5, 4)))
_call("_grouped_mm", lambda v: (v.unit(2, 16, 8).bfloat16(), v.unit(2, 8, 16).bfloat16()))


def _signs(v: Values, *shape: int) -> Tensor:
    return v.below(2, *shape).double() * 2 - 1


_call("cross_entropy nll_loss multi_margin_loss", lambda v: (v.x, v.below(6, 4)))
_call("mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div",
      lambda v: (v.x, v.x))  # fmt: skip
_call(
    "poisson_nll_loss",
    lambda v: (v.x, v.x),
    lambda v: (v.x, v.x, {"log_input": True, "full": False, "eps": 1e-8, "reduction": 1}),
)
_call("soft_margin_loss hinge_embedding_loss", lambda v: (v.x, _signs(v, 4, 6)))
_call("gaussian_nll_loss triplet_margin_loss", lambda v: (v.x, v.x, v.x))
_call("cosine_embedding_loss", lambda v: (v.x, v.x, _signs(v, 4)))
_call("margin_ranking_loss", lambda v: (v.unit(4), v.unit(4), _signs(v, 4)))
_call("multilabel_margin_loss", lambda v: (v.x, v.below(6, 4, 6)))
_call("multilabel_soft_margin_loss", lambda v: (v.x, v.flags.double()))
_call("ctc_loss", lambda v: (v.unit(5, 4, 6).log_softmax(-1), 1 + v.below(5, 4, 2), torch.full((4,), 5),
                             torch.tensor([2, 1, 2, 2])))  # fmt: skip

# The graph.
_call("register_hook register_post_accumulate_grad_hook", lambda v: (v.x.requires_grad_(), lambda x: None))
_call("retain_grad", lambda v: (v.x.requires_grad_() * 2,))


@dataclass(frozen=True)
class Call:
    """A function with arguments that it takes.

    Args:
        name: by which torch tells of it.
        func: the function.
        arguments: makes its arguments.
    """

    name: str
    func: Any
    arguments: Arguments

    def given(self, seed: int = 0, signed: bool = False) -> tuple[list[Any], dict[str, Any]]:
        """Its arguments, and those by name."""
        args = [*self.arguments(Values(seed, signed))]
        kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
        return args, kwargs

    def on(self, args: list[Any], kwargs: dict[str, Any] | None = None) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.func(*args, **(kwargs or {}))

    def __call__(self, seed: int = 0, signed: bool = False) -> Any:
        return self.on(*self.given(seed, signed))


class _Met(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(name_of(func))
        return func(*args, **(kwargs or {}))


def functions_told() -> Iterator[tuple[str, Any]]:
    """Every function with a name that torch may tell of, and every property of a tensor as it is read."""
    for space in _SPACES:
        for attribute in dir(space):
            found = getattr(space, attribute, None)
            if callable(found) and not isinstance(found, type):
                yield getattr(found, "__name__", ""), found
    for attribute in dir(Tensor):
        found = getattr(Tensor, attribute, None)
        if found is not None and hasattr(type(found), "__set__") and hasattr(found, "__get__"):
            yield attribute, found.__get__


@cache
def _by_name() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name, function in functions_told():
        if function not in found.setdefault(name, []):
            found[name].append(function)
    return found


@cache
def calls_of(name: str) -> tuple[Call, ...]:
    """Calls of each function of this name, of which torch tells a mode by it."""
    calls: list[Call] = []
    for func in _by_name().get(name, ()):
        told = [call for make in _ARGUMENTS.get(name, _ANY) if _is_told(call := Call(name, func, make))]
        calls += told if name in _ARGUMENTS else told[:1]
    return tuple(calls)


def _is_told(call: Call) -> bool:
    try:
        with _Met() as met:
            result = call()
    except Exception:  # it takes other arguments
        return False
    return call.name in met.names and result is not NotImplemented
