"""Every fact of the table of torch functions holds, by trial, of each function of each name in it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_par.pipeline.program.event_functions import WITHOUT_ANOTHER
from lightning_par.sharded import functions
from lightning_par.sharded.functions import writes
from tests.fact_trials import TRIALS
from tests.fact_trials.calls import calls_of, functions_told
from tests.fact_trials.draws import moves_the_generator, places_of_the_generator, writes_into_first
from tests.fact_trials.operators import operator
from tests.fact_trials.trial import memory

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of old spellings

FACTS: dict[str, frozenset[str]] = {
    fact: names for fact, names in vars(functions).items() if fact[0].isupper() and isinstance(names, frozenset)
}
OF_OPERATORS = {fact for fact in FACTS if fact.endswith("_OPERATORS")} - {"IN_PLACE_OPERATORS"}
OLDER = {"has_names", "rename_"}
"""What torch has no more as of 2.13."""
UNTRIED = OLDER if torch.cuda.is_available() else {*OLDER, "cuda"}  # which needs a GPU
NAMES = sorted(frozenset().union(*(FACTS[fact] for fact in FACTS.keys() - OF_OPERATORS)))


@pytest.mark.parametrize("fact", FACTS)
def test_a_fact_holds_of_every_function_of_every_name(fact: str) -> None:
    wrong = {}
    for name in sorted(FACTS[fact]):
        calls = (operator(name),) if fact in OF_OPERATORS else calls_of(name)
        if not calls and name not in UNTRIED:
            wrong[name] = "torch tells of no such function, or tests.fact_trials.calls has no arguments for it"
        for call in calls:
            try:
                TRIALS[fact](call)
            except Exception as error:
                wrong[name] = f"{call.func}: {type(error).__name__}: {error}"
    assert not wrong


def test_what_writes_is_told_by_its_name() -> None:
    wrong = [
        name
        for name in NAMES
        for call in calls_of(name)
        if writes_into_first(call) != (writes(name) and name not in functions.WRITES_NO_ENTRY)
    ]
    assert not wrong


def test_what_is_not_said_to_draw_does_not() -> None:
    drawing = {name for name in NAMES if any(map(moves_the_generator, calls_of(name)))}
    assert drawing == functions.DRAWS | functions.DRAWS_ANEW


def test_no_other_function_draws_as_many_numbers_as_entries_say() -> None:
    others = functions.DRAWS - functions.DRAWS_BY_VALUE
    assert [name for name in others if any(len(places_of_the_generator(call)) > 1 for call in calls_of(name))] == []


def test_what_takes_another_for_its_shape_alone_can_be_written_without_it() -> None:
    assert WITHOUT_ANOTHER.keys() == functions.LIKE_ANOTHER


def test_no_other_property_holds_entries() -> None:
    x = torch.complex(torch.rand(3, 3), torch.rand(3, 3)).requires_grad_()
    for name, read in functions_told():
        if getattr(read, "__name__", "") != "__get__" or name == "__cuda_array_interface__":
            continue
        try:
            value = read(x)
        except RuntimeError:  # of another layout
            continue
        holds = isinstance(value, Tensor) and memory(value) == memory(x)
        assert holds == (name in functions.VALUE_PROPERTIES), name
