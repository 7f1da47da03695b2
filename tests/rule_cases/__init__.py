"""Tables of calls, one module a kind of rule. A new rule needs a line in one of them."""

from tests.rule_cases import attention, contract, layers, lists, loss, pointwise, reduce, shape

CASES = [
    case for module in (pointwise, shape, contract, reduce, layers, loss, attention, lists) for case in module.CASES
]
