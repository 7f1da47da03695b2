"""Tables of calls, one module a kind of rule. A new rule needs a line in one of them."""

from tests.rule_cases import (
    attention,
    batch,
    contract,
    convolution,
    grouped,
    layers,
    lists,
    loss,
    memory,
    pick,
    pointwise,
    recurrent,
    reduce,
    row_loss,
    shape,
)

_TABLES = (
    pointwise,
    shape,
    contract,
    reduce,
    layers,
    loss,
    memory,
    row_loss,
    attention,
    lists,
    batch,
    pick,
    recurrent,
    convolution,
    grouped,
)
CASES = [case for table in _TABLES for case in table.CASES]
