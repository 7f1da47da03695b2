"""Which activations a unit keeps between forward and backward, and which it computes again."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_par.planner.recording.operations import KeptUse, Operation
from lightning_par.planner.recording.profile import Unit
from lightning_par.planner.times.local_work import Recompute, Setting


def all_kept(unit: Unit, s: Setting) -> float:
    """Bytes that ``unit`` would keep for one microbatch on a rank if nothing were computed again, each memory once."""
    return sum(_kept(unit, s, list(unit.operations)).values())


def kept_bytes(unit: Unit, s: Setting) -> float:
    """Bytes that ``unit`` keeps for one microbatch on a rank, each memory once.

    Args:
        unit: the unit.
        s: under what it runs, and what is computed again in backward instead.
    """
    asked = _asked(unit, s)
    if asked == "full":
        return _given_bytes(unit, s)
    if asked == "selective":
        core = attention_core(unit)
        if core:
            inside = set(map(id, core))
            kept = _kept(unit, s, [op for op in unit.operations if id(op) not in inside])
            made = {x.memory for op in core for x in op.outputs}
            for op in core:
                for x in op.inputs:
                    if x.memory not in made and x.of_batch:
                        kept.setdefault(x.memory, s.nbytes(x))
            return sum(kept.values())
        return _given_bytes(unit, s) + sum(_made_bytes(s, _saved_products(unit.operations)).values())
    return sum(_kept_beside_regions(unit, s).values())


def recomputed(unit: Unit, s: Setting) -> list[Operation]:
    """The operations that backward runs a second time."""
    asked = _asked(unit, s)
    if asked == "none":  # but for what the module itself says
        own = [op for op in unit.operations if op.again != "none"]
        saved = {id(op) for op in _saved_products([op for op in own if op.again == "selective"])}
        return [op for op in own if id(op) not in saved]
    if asked == "full":
        return list(unit.operations)
    core = attention_core(unit)
    if core:
        return core[:-1]
    saved = {id(op) for op in _saved_products(unit.operations)}
    return [op for op in unit.operations if id(op) not in saved]


def _asked(unit: Unit, s: Setting) -> Recompute:
    """What of ``unit`` is to be computed again, beside what the module says: layers alone are."""
    return s.recompute if unit.path else "none"


def _kept_beside_regions(unit: Unit, s: Setting) -> dict[int, float]:
    """What is kept where the module itself has regions of it run again: of these what they begin with."""
    own = [op for op in unit.operations if op.again != "none"]
    kept = _kept(unit, s, [op for op in unit.operations if op.again == "none"])
    made = {x.memory for op in own for x in op.outputs}
    begins = (x for op in own for x in op.inputs if x.memory not in made and x.of_batch)
    for x in begins:
        kept.setdefault(x.memory, s.nbytes(x))
    return kept | _made_bytes(s, _saved_products([op for op in own if op.again == "selective"]))


def _made_bytes(s: Setting, operations: list[Operation]) -> dict[int, float]:
    return {x.memory: s.nbytes(x) for op in operations for x in op.outputs}


def attention_core(unit: Unit) -> list[Operation]:
    """Attention that is written out: from the product of queries and keys to that with values (arXiv 2205.05198)."""
    places = [
        i for i, op in enumerate(unit.operations) if op.kind == "product" and op.product and not op.product.weight
    ]
    if len(places) < 2 or any(op.kind == "attention" for op in unit.operations):
        return []
    return list(unit.operations[places[0] : places[-1] + 1])


def _saved_products(operations: Sequence[Operation]) -> list[Operation]:
    """Fused attention and every other product of a weight, as torch's selective checkpointing is mostly told."""
    weighted = [op for op in operations if op.kind == "product" and op.product and op.product.weight]
    return [*weighted[::2], *(op for op in operations if op.kind == "attention")]


def _given_bytes(unit: Unit, s: Setting) -> float:
    sizes = {
        x.memory: s.nbytes(x) for op in unit.operations for x in op.inputs if x.memory in unit.given and x.wants_grad
    }
    return sum(sizes.values())


def _kept(unit: Unit, s: Setting, operations: list[Operation]) -> dict[int, float]:
    found: dict[int, float] = {}
    walked: dict[int, float] = {}  # kept by functions that are fused, made by such
    made_by_walks = {x.memory for op in unit.operations if op.product is None for x in op.outputs}
    for op in operations:
        gathered = op.product is not None and op.product.split == "n"
        for k in op.kept:
            size = s.nbytes(k, gathered)
            if s.fused and op.product is None and _can_come_again(k, made_by_walks):
                walked[k.memory] = max(walked.get(k.memory, 0.0), size)
            else:
                found[k.memory] = max(found.get(k.memory, 0.0), size)
    rest = {memory: size for memory, size in walked.items() if memory not in found}
    if not rest:
        return found
    sources = {
        x.memory: s.nbytes(x)
        for op in operations
        if op.product is None and any(k.memory in rest for k in op.kept)
        for x in op.inputs
        if x.of_batch and x.memory not in made_by_walks
    }
    sources |= _sources(unit, operations, set(rest), made_by_walks, s)
    new = {memory: size for memory, size in sources.items() if memory not in found}
    return found | (new if sum(new.values()) < sum(rest.values()) else rest)


def _sources(unit: Unit, operations: list[Operation], rest: set[int], made: set[int], s: Setting) -> dict[int, float]:
    """What the walks that make ``rest`` begin with."""
    makers = {x.memory: op for op in unit.operations if op.product is None for x in op.outputs}
    found: dict[int, float] = {}
    seen, left = set[int](), list(rest)
    while left:
        memory = left.pop()
        if memory in seen or memory not in makers:
            continue
        seen.add(memory)
        for x in makers[memory].inputs:
            if not x.of_batch:
                continue
            if x.memory in made and x.memory in makers:
                left.append(x.memory)
            else:
                found[x.memory] = s.nbytes(x)
    return found


def _can_come_again(k: KeptUse, made_by_walks: set[int]) -> bool:
    return not k.drawn and k.memory in made_by_walks
