"""What Python gets of a tensor."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests.fact_trials.calls import Call
from tests.fact_trials.trial import answers, trial


@trial("TRUTHS")
def says_yes_or_no_by_entries(call: Call) -> None:
    assert answers(call) == {"True", "False"}


@trial("WHOLE_NUMBERS")
def gives_an_int_by_entries(call: Call) -> None:
    found = answers(call)
    assert len(found) > 1 and all(x.isdigit() for x in found)


@trial("ARRAYS")
def gives_an_array_in_the_same_memory(call: Call) -> None:
    args, kwargs = call.given()
    array = call.on(args, kwargs)
    array[1, 2] = 7
    assert isinstance(array, np.ndarray) and args[0][1, 2] == 7


@trial("READS")
def python_gets_what_goes_by_entries(call: Call) -> None:
    assert len(answers(call)) > 1


@trial("METADATA", "MEMORY_KINDS")
def gives_python_what_no_entry_changes(call: Call) -> None:
    assert len(answers(call)) == 1


def _told(call: Call, x: Tensor) -> object:
    found = call.on([x])
    return found.data_ptr() if isinstance(found, torch.UntypedStorage) else found


@trial("MEMORY")
def tells_where_entries_lie(call: Call) -> None:
    x, other = torch.rand(4, 6), torch.rand(6, 5).t()[1:]
    assert other.shape == x.shape
    before = _told(call, x)
    assert _told(call, x.fill_(7)) == before != _told(call, other)


@trial("STRIDES")
def tells_the_order_in_memory(call: Call) -> None:
    tells_where_entries_lie(call)
    assert _told(call, torch.rand(4, 6)) == _told(call, torch.rand(4, 6))  # whatever the address


@trial("SHOWS")
def prints_entries(call: Call) -> None:
    python_gets_what_goes_by_entries(call)
    assert isinstance(call(), str)
