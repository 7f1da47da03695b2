"""What is written in place, where one device has views and a rank has copies: both see it, and so does the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.rule_check import Case, Shard
from tests.rule_cases.data import normal

B, T, C = 2, 8, 12
x = normal(B, T, C)
every = [(1,), (2,), (Shard(2, 3, 2),)]


def _then(*steps: Callable[[dict[str, Tensor]], Any]) -> Callable[[Tensor], list[Tensor]]:
    """A call that runs ``steps`` on named tensors, at first ``x``, and returns all of them."""

    def call(x: Tensor) -> list[Tensor]:
        named = {"x": x}
        for step in steps:
            step(named)
        return list(named.values())

    return call


def _new(name: str, of: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], Any]:
    return lambda named: named.__setitem__(name, make(named[of]))


def _write(name: str, write: Callable[[Tensor], Any]) -> Callable[[dict[str, Tensor]], Any]:
    def run(named: dict[str, Tensor]) -> None:
        write(named[name])

    return run


def _no_grad(write: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return torch.no_grad()(write)


_step, _token = _new("y", "x", lambda x: x[..., ::2]), _new("t", "x", lambda x: x[:, 3])
_views: dict[str, Callable[[Tensor], Tensor]] = {
    "step": lambda x: x[..., ::2],
    "step of tokens": lambda x: x[:, 1::2],
    "slice": lambda x: x[..., 3:7],
    "token": lambda x: x[:, -1],
    "feature": lambda x: x[..., 5],
    "one entry": lambda x: x[1, 2, 3],
    "narrow": lambda x: x.narrow(2, 4, 4),
    "chunk": lambda x: x.detach().chunk(3, -1)[1],
    "split": lambda x: x.detach().split([3, 4, 5], -1)[1],
    "unbind": lambda x: x.detach().unbind(2)[4],
    "t": lambda x: x[0].t()[2:7],
    "view_as": lambda x: x[..., ::2].view_as(torch.empty(B, T, C // 2)),
    "view": lambda x: x.view(B, T, 4, 3)[..., 1],
    "no rule": lambda x: x.unfold(1, 3, 3),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "of a view": lambda x: x.transpose(1, 2)[:, ::2][..., 2],
    "step of a step": lambda x: x[..., ::2][..., 1::2],
    "detached": lambda x: x.detach()[:, :, 4],
}
_writes: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda x: x.mul_(0.5),
    "no_grad": _no_grad(lambda x: x.add_(1)),
    "setitem": lambda x: x.__setitem__(0, 1.0),
    "copy_": lambda x: x.copy_(torch.ones(x.shape)),
    "inplace=True": lambda x: F.relu(x, True),
    "data": lambda x: x.data.mul_(2),
    "foreach": _no_grad(lambda x: torch._foreach_mul_([x], 2.0)),
    "out": _no_grad(lambda x: torch.mul(x.detach(), 2, out=x)),
    "no rule": lambda x: x.index_fill_(0, torch.tensor([0]), 1.0),
}

CASES = [
    *(
        Case(f"{name} of what is written then", _then(_new("y", "x", view), _write("x", _writes["mul_"])), [x], every,
             local=None)
        for name, view in _views.items()
    ),
    *(
        Case(f"{name} written to", _then(_new("y", "x", view), _write("y", _writes["mul_"])), [x], every, local=None)
        for name, view in _views.items()
    ),
    *(
        Case(f"{name} into the base", _then(_step, _token, _write("x", write)), [x], every, local=None)
        for name, write in _writes.items()
    ),
    *(
        Case(f"{name} into a step", _then(_step, _token, _write("y", write)), [x], every, local=None)
        for name, write in _writes.items()
    ),
    *(
        Case(f"{name} into a token", _then(_step, _token, _write("t", write)), [x], every, local=None)
        for name, write in _writes.items()
    ),
    Case("a token that nobody keeps", lambda x: (x[:, 2].mul_(3), x)[1], [x], every, local=None),
    Case(
        "what is contiguous on one device",
        _then(_new("y", "x", lambda x: x[..., 4:8].contiguous()), _new("t", "x", lambda x: x[:, 1].contiguous()),
              _write("y", _writes["mul_"]), _write("t", _writes["mul_"]), _write("x", _writes["no_grad"])),
        [x], every, local=None,
    ),
    Case(
        "a reshape that copies",
        _then(_new("y", "x", lambda x: x.transpose(1, 2).reshape(B, -1)),
              _new("z", "x", lambda x: x[..., ::2].reshape(-1)), _write("y", _writes["mul_"]),
              _write("z", _writes["mul_"]), _write("x", _writes["no_grad"])),
        [x], every, local=None,
    ),
    Case(
        "a reshape of one head a rank",
        _then(_new("y", "x", lambda x: x.transpose(1, 2).reshape(B, T, -1)), _write("y", _writes["mul_"]),
              _write("x", _writes["no_grad"])),
        [normal(B, 2, T, 3)], [(1,)], local=None,
    ),
]  # fmt: skip
