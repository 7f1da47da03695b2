"""Random numbers, and what is written."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from lightning_par.sharded.functions import writes
from tests.fact_trials.calls import Call
from tests.fact_trials.trial import copied, equal, made, seeded, tensors, trial, worlds


def moves_the_generator(call: Call) -> bool:
    given = call.given()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    call.on(*given)
    return not torch.equal(before, torch.get_rng_state())


@trial("DRAWS")
def takes_a_tensor_and_draws(call: Call) -> None:
    assert tensors(call.given()) and moves_the_generator(call)


@trial("DRAWS_EACH")
def draws_for_each_entry_by_itself(call: Call) -> None:
    """What is drawn last changes nothing else, and along no dim is one number drawn for all."""
    assert moves_the_generator(call)
    (x, *more), kwargs = call.given()
    other = x.clone()
    other.view(-1)[-1] *= 0.5
    one, another = made(call, [x, *more], kwargs)[0], made(call, [other, *more], kwargs)[0]
    assert torch.equal(one.flatten()[:-1], another.flatten()[:-1])
    alike = torch.full((6, 7, 8, 9), -0.5 if "rrelu" in call.name else 0.5, dtype=torch.float64)
    (drawn,) = made(call, [alike, *more], kwargs)
    for dim in range(alike.ndim):
        assert not torch.equal(drawn, drawn.narrow(dim, 0, 1).expand_as(drawn))


@trial("FILLS")
def fills_with_as_many_draws(call: Call) -> None:
    writes_each_entry_whatever_it_was(call)
    states = []
    for given in worlds(call):
        seeded(call, *given)
        states.append(torch.get_rng_state())
    assert moves_the_generator(call) and all(torch.equal(states[0], x) for x in states)


@trial("OVERWRITES")
def writes_each_entry_whatever_it_was(call: Call) -> None:
    (x, *more), kwargs = call.given()
    one = made(call, [x, *more], kwargs)
    other = made(call, [torch.full_like(x, float("nan")), *more], kwargs)
    assert equal(one, other) and not one[0].isnan().any()


@trial("IN_PLACE_OPERATORS")
def is_known_to_write(call: Call) -> None:
    assert writes_into_first(call) and writes(call.name)


@trial("WRITES_NO_ENTRY")
def writes_none_though_its_name_says_so(call: Call) -> None:
    assert not writes_into_first(call) and writes(call.name)


def writes_into_first(call: Call) -> bool:
    """Whether a call writes into a tensor that it is given: torch counts it, or an entry is another."""
    args, kwargs = call.given()
    before, versions = copied((args, kwargs)), [x._version for x in tensors((args, kwargs))]
    call.on(args, kwargs)
    return versions != [x._version for x in tensors((args, kwargs))] or not equal(before, (args, kwargs))


def places_of_the_generator(call: Call) -> set[bytes]:
    """Where the generator stands after the call, for other entries of its tensors."""
    places = set()
    for factor in (1.0, 0.05, 40.0, -1.0):
        (x, *more), kwargs = call.given()
        with contextlib.suppress(RuntimeError):  # no probabilities, or no rates
            seeded(call, [x * factor if isinstance(x, Tensor) and x.is_floating_point() else x, *more], kwargs)
            places.add(torch.get_rng_state().numpy().tobytes())
    return places


@trial("DRAWS_BY_VALUE")
def draws_as_many_numbers_as_entries_say(call: Call) -> None:
    assert len(places_of_the_generator(call)) > 1


@trial("DRAWS_ANEW")
def draws_without_a_tensor(call: Call) -> None:
    assert not tensors(call.given()) and moves_the_generator(call)
