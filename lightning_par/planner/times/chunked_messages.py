"""What of a tensor axis' messages hides behind products in chunks, where the residual stream is sharded.

Chunks are those that a run would choose (`lightning_par.mesh.chunks`); how long they take is the machine's.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from lightning_par.mesh.chunks import SPEEDS, how_many
from lightning_par.planner.machine.kernels import product_time
from lightning_par.planner.machine.links import Group, Verb, message_time
from lightning_par.planner.recording.operations import Operation, Product
from lightning_par.planner.times.local_work import Setting

_ITEMSIZES = {"float8": 1, "bfloat16": 2, "float16": 2, "float64": 8}


def saved_by_chunks(op: Operation, enters: float, leaves: float, s: Setting, group: Group) -> tuple[float, float]:
    """Seconds by which chunks shorten an operation's messages, forward and backward.

    Args:
        op: it opens an island, or closes one, or does neither.
        enters: bytes of tokens that are gathered for it.
        leaves: bytes of what it makes that is summed.
        s: under what it runs.
        group: of the ranks.
    """
    if not s.asynchronous or op.name != "linear" or op.product is None or not (enters or leaves):
        return 0.0, 0.0
    product = s.product(op)
    forward = _saved("all_gather", enters, product, product.k, product.n, s, group)
    forward += _saved("reduce_scatter", leaves, product, product.n, product.k, s, group)
    turned = replace(product, n=product.k, k=product.n)
    back = _saved("all_gather", leaves, turned, product.n, product.k, s, group) if op.backward else 0.0
    return forward, back


def _saved(verb: Verb, nbytes: float, product: Product, moved: int, made: int, s: Setting, group: Group) -> float:
    """Of one message of ``moved`` features a token, beside a product with ``made`` features on this rank."""
    if not nbytes:
        return 0.0
    tokens, dtype = product.m, s.precision.compute
    itemsizes = max(1, round(nbytes / (tokens * moved))), _ITEMSIZES.get(dtype, 4)
    by_sample = s.count > 1
    units = round(s.count) if by_sample else max(1, tokens // s.tensor)
    count = how_many(tokens, moved, made, itemsizes, s.tensor, units, by_sample, SPEEDS["cuda"])
    if count == 1:
        return 0.0
    message = message_time(verb, nbytes / count, group, s.machine)
    part = product_time(replace(product, m=ceil(tokens / count)), s.machine, dtype)
    beside = (count - 1) * min(message, part)
    whole = message_time(verb, nbytes, group, s.machine) + product_time(product, s.machine, dtype)
    return whole - count * (message + part) + beside * (1 - s.machine.contention)
