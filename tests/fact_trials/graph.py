"""What is asked of autograd."""

from __future__ import annotations

import torch

from tests.fact_trials.calls import Call
from tests.fact_trials.trial import trial


@trial("HOOKS")
def calls_a_hook_in_backward(call: Call) -> None:
    x, met = torch.ones(3, requires_grad=True), []
    call.on([x, lambda _: met.append(1)])
    x.sum().backward()
    assert met


@trial("ASKS")
def gives_no_other_value(call: Call) -> None:
    args, kwargs = call.given()
    before = args[0].detach().clone()
    result = call.on(args, kwargs)
    assert not isinstance(result, torch.Tensor) or result is args[0]
    assert torch.equal(before, args[0].detach())
