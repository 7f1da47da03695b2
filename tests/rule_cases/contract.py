"""Products that sum over dims."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.helpers.rule_check import Case
from tests.rule_cases.data import normal

x, weight, bias = normal(2, 3, 4), normal(6, 4), normal(6)
a, b = normal(3, 4), normal(4, 6)
batch_a, batch_b = normal(2, 3, 4), normal(2, 4, 5)

CASES = [
    # Weights are leaves, as parameters are.
    Case("linear by columns", F.linear, [x, weight, bias], [(None, 0, 0), (None, 0, None)], leaves=True),
    Case("linear by rows", F.linear, [x, weight, bias], [(2, 1, None), (2, 1, 0)], leaves=True),
    Case("linear plain by rows", F.linear, [x.clone(), weight, bias], [(None, 1, None)], local=None),
    Case(
        "linear of sharded rows",
        F.linear,
        [x, weight, bias],
        [(0, None, None), (1, None, None), (1, None, 0)],
        leaves=True,
    ),
    Case("linear without bias", F.linear, [x, weight], [(None, 0), (2, 1), (1, None)], leaves=True),
    Case(
        "linear by columns of sharded", F.linear, [x, weight, bias], [(2, 0, 0), (1, 0, None)], local=None, leaves=True
    ),
    Case("linear with both sharded", F.linear, [x, weight, bias], [(1, 1, None), (0, 1, 0)], local=None, leaves=True),
    Case("linear with a plain leaf", F.linear, [x, weight, bias], [(2, None, None)], local=False, leaves=True),
    Case("linear with an activation for weight", F.linear, [x, weight, bias], [(2, None, None), (None, 1, 0)]),
    Case("linear bias alone", F.linear, [x, weight, bias], [(None, None, 0)], local=None),
    Case(
        "linear of one dim",
        F.linear,
        [normal(4), weight, bias],
        [(0, 1, None), (None, 0, 0), (None, 0, None)],
        leaves=True,
    ),
    Case("linear of two dims", F.linear, [a, weight, bias], [(1, 1, None), (None, 0, 0), (0, None, None)], leaves=True),
    Case("linear to one", F.linear, [a, normal(4)], [(0, None), (1, 0)], local=None),
    Case(
        "linear by keyword",
        lambda x, w, b: F.linear(input=x, weight=w, bias=b),
        [x, weight, bias],
        [(None, 0, 0), (2, 1, None)],
    ),
    Case(
        "linear, bias of one",
        F.linear,
        [x, weight, normal(1)],
        [(None, 0, None), (2, 1, None)],
        local=None,
        leaves=True,
    ),
    Case(
        "addmm",
        torch.addmm,
        [bias, a, b],
        [(0, None, 1), (None, None, 1), (None, 1, 0), (None, 0, None), (0, 0, None)],
        local=None,
    ),
    Case(
        "addmm columns and rows", torch.addmm, [bias, a, b], [(0, None, 1), (None, None, 1), (None, 1, 0)], leaves=True
    ),
    Case(
        "addmm method", lambda c, a, b: c.addmm(a, b), [bias, a, b], [(None, 1, 1), (0, 1, 1)], local=None, leaves=True
    ),
    Case(
        "addmm alpha",
        lambda c, a, b: torch.addmm(c, a, b, alpha=2, beta=3),
        [bias, a, b],
        [(0, None, 1), (None, 1, 0)],
        local=None,
    ),
    Case("addmm full bias", torch.addmm, [normal(3, 6), a, b], [(1, None, 1), (None, 1, 0)], local=None),
    Case("addmm bias of one", torch.addmm, [normal(1), a, b], [(None, None, 1), (None, 1, 0)], local=None),
    Case("matmul", torch.matmul, [a, b], [(0, None), (1, 0), (None, 1), (1, None), (None, 0)]),
    Case("matmul of different", torch.matmul, [a, b], [(0, 1), (0, 0), (1, 1)], local=False),
    Case("@", lambda a, b: a @ b, [a, b], [(0, None), (1, 0), (None, 1)]),
    Case("__rmatmul__", lambda a, b: b.__rmatmul__(a), [a, b], [(0, None), (1, 0), (None, 1)]),
    Case("plain @ sharded", lambda a, b: a.detach() @ b, [a, b], [(None, 0), (None, 1)]),
    Case("matmul method", lambda a, b: a.matmul(b), [a, b], [(0, None), (1, 0), (None, 1)]),
    Case("matmul by keyword", lambda a, b: torch.matmul(a, other=b), [a, b], [(0, None), (1, 0), (None, 1)]),
    Case("matmul vectors", torch.matmul, [normal(4), normal(4)], [(0, 0), (0, None)]),
    Case("matmul vector, matrix", torch.matmul, [normal(4), b], [(0, 0), (None, 1), (0, None)]),
    Case("matmul matrix, vector", torch.matmul, [a, normal(4)], [(0, None), (1, 0), (None, 0)]),
    Case("matmul vector, batch", torch.matmul, [normal(4), batch_b], [(0, 1), (None, 0), (None, 2)]),
    Case("matmul batch, vector", torch.matmul, [batch_a, normal(4)], [(0, None), (1, None), (2, 0)]),
    Case(
        "matmul batches", torch.matmul, [batch_a, batch_b], [(0, 0), (0, None), (None, 0), (1, None), (2, 1), (None, 2)]
    ),
    Case("matmul batch, matrix", torch.matmul, [batch_a, b], [(0, None), (1, None), (2, 0), (None, 1)]),
    Case("matmul matrix, batch", torch.matmul, [a, batch_b], [(0, None), (1, 1), (None, 0), (None, 2)]),
    Case(
        "matmul broadcast",
        torch.matmul,
        [normal(2, 1, 3, 4), normal(5, 4, 6)],
        [(0, None), (3, 1), (2, None), (None, 0), (None, 2)],
    ),
    Case(
        "matmul of size one",
        torch.matmul,
        [normal(1, 3, 4), batch_b],
        [(0, None), (None, 0), (2, 1), (0, 0)],
        local=None,
    ),
    Case("mm", torch.mm, [a, b], [(0, None), (1, 0), (None, 1)]),
    Case("bmm", torch.bmm, [batch_a, batch_b], [(0, 0), (None, 0), (1, None), (2, 1), (None, 2)]),
    Case("bmm by keyword", lambda a, b: torch.bmm(a, mat2=b), [batch_a, batch_b], [(0, 0), (2, 1)]),
    Case("mv", torch.mv, [a, normal(4)], [(0, None), (1, 0)]),
    Case("dot", torch.dot, [normal(4), normal(4)], [(0, 0), (None, 0)]),
    Case(
        "baddbmm",
        lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2),
        [normal(2, 3, 5), batch_a, batch_b],
        [(0, 0, 0), (None, 0, 0), (None, 2, 1), (2, None, 2), (0, None, None)],
    ),
    Case(
        "baddbmm row",
        lambda c, a, b: c.baddbmm(a, b, beta=0),
        [torch.full((5,), torch.nan).double(), batch_a, batch_b],
        [(None, 0, 0)],
    ),
    Case(
        "einsum",
        lambda a, b: torch.einsum("bik,bkj->bij", a, b),
        [batch_a, batch_b],
        [(0, 0), (0, None), (1, None), (2, 1), (None, 2)],
    ),
    Case("einsum implicit", lambda a, b: torch.einsum("ik, kj", a, b), [a, b], [(0, None), (1, 0), (None, 1)]),
    Case(
        "einsum attention",
        lambda q, k: torch.einsum("bthd,bshd->bhts", q, k),
        [normal(2, 3, 4, 2), normal(2, 5, 4, 2)],
        [(2, 2), (0, 0), (1, None), (3, 3), (2, None)],
    ),
    Case("einsum list", lambda a, b: torch.einsum("ij,jk->ki", [a, b]), [a, b], [(0, None), (1, 0)]),
    Case(
        "einsum three",
        lambda a, b, c: torch.einsum("ik,kj,j->i", a, b, c),
        [a, b, bias],
        [(1, 0, None), (None, 1, 0), (0, None, None)],
    ),
    Case("einsum one", lambda a: torch.einsum("ij->j", a), [a], [(0,), (1,)]),
    Case(
        "einsum of size one",
        lambda a, b: torch.einsum("bik,bkj->bij", a, b),
        [normal(1, 3, 4), batch_b],
        [(None, 0), (2, 1), (0, None)],
        local=None,
    ),
    Case("einsum diagonal", lambda a: torch.einsum("ii->i", a), [normal(4, 4)], [(0,)], local=False),
    Case(
        "einsum dots", lambda a, b: torch.einsum("...ik,...kj->...ij", a, b), [batch_a, batch_b], [(0, 0)], local=False
    ),
]
