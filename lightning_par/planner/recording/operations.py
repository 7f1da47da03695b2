"""What one function of a step is to a planner: a product of matrices, attention, or a walk over memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightning_par.planner.recording.notes import Kept, MemoryKey
from lightning_par.private.storage import memory_of
from lightning_par.sharded.functions import CONVOLUTIONS, DRAWS, MATRIX_PRODUCTS
from lightning_par.trial.recording import Event

Kind = Literal["product", "attention", "entrywise", "view"]
SplitDim = Literal["batch", "m", "n", "k"]
Again = Literal["none", "selective", "full"]

ATTENTION = "scaled_dot_product_attention"
LOSSES = frozenset({"cross_entropy", "nll_loss", "log_softmax"})
_PRODUCTS = MATRIX_PRODUCTS | CONVOLUTIONS | {"__matmul__"}


@dataclass(frozen=True)
class Use:
    """A tensor that a function takes or makes.

    Attributes:
        memory: which memory it lies in, as a number within its unit.
        numel: elements of the whole tensor.
        itemsize: bytes of one.
        of_batch: whether it depends on the batch, and so grows with its samples.
        split: whether the tensor axis splits it.
        wants_grad: whether backward makes a gradient of it.
        parameter: whether it is one, or lies in one's memory.
    """

    memory: MemoryKey
    numel: int
    itemsize: int
    of_batch: bool
    split: bool
    wants_grad: bool
    parameter: bool

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class KeptUse:
    """Memory that autograd keeps between forward and backward."""

    memory: MemoryKey
    nbytes: int
    of_batch: bool
    split: bool
    drawn: bool = False


@dataclass(frozen=True)
class Product:
    """``batch`` products of an m x k with a k x n matrix; for attention m queries, k keys, n features of a head.

    Attributes:
        split: which of the sizes the tensor axis splits.
        weight: whether one side is a parameter.
        causal: whether attention leaves half of the pairs out.
        itemsize: bytes of an element.
    """

    batch: int
    m: int
    n: int
    k: int
    split: SplitDim | None = None
    weight: bool = False
    causal: bool = False
    itemsize: int = 2

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class Operation:
    """One function of a step.

    Attributes:
        name: the function's.
        kind: what decides its time.
        product: the sizes of a product or of attention.
        inputs: tensors that it takes.
        outputs: tensors that it makes, without views of its inputs.
        kept: what autograd keeps for its backward.
        backward: whether it has one.
        again: how the module itself has backward run it again: "full" with all of its region, "selective" where the
            region says by its functions which.
        enters: elements that enter an island of the tensor axis here, whose gradient is summed over the axis.
        leaves: elements whose partial sums are summed over the axis in forward.
    """

    name: str
    kind: Kind
    product: Product | None
    inputs: tuple[Use, ...]
    outputs: tuple[Use, ...]
    kept: tuple[KeptUse, ...]
    backward: bool
    again: Again = "none"
    enters: int = 0
    leaves: int = 0

    @property
    def draws(self) -> bool:
        return self.name in DRAWS


def kind_of(event: Event) -> Kind:
    """What decides how long ``event`` takes."""
    if event.name == ATTENTION:
        return "attention"
    if event.name in _PRODUCTS and len(event.inputs) > 1:
        return "product"
    given = {memory_of(x) for x in event.inputs if _has_memory(x)}
    made = [x for x in event.outputs if _has_memory(x)]
    if all(memory_of(x) in given for x in made) and not event.name.endswith("_"):
        return "view"
    return "entrywise"


def product_of(event: Event) -> Product | None:
    """The sizes of a product of matrices or of attention; None of another function."""
    kind = kind_of(event)
    if kind == "attention":
        query, key = event.inputs[0], event.inputs[1]
        causal = bool(event.args[5] if len(event.args) > 5 else event.kwargs.get("is_causal", False))
        batch = query.numel() // (query.shape[-1] * query.shape[-2])
        return Product(
            batch, query.shape[-2], query.shape[-1], key.shape[-2], None, False, causal, event.outputs[0].itemsize
        )
    if kind != "product" or not event.outputs:
        return None
    out, itemsize = event.outputs[0], event.outputs[0].itemsize
    if event.name == "linear":
        weight = event.inputs[1]
        return Product(1, out.numel() // weight.shape[0], weight.shape[0], weight.shape[1], itemsize=itemsize)
    if event.name in CONVOLUTIONS:
        weight = event.inputs[1]
        k = weight[0].numel()
        return Product(1, out.numel() // weight.shape[0], weight.shape[0], k, itemsize=itemsize)
    if event.name == "einsum":
        return _einsum(event, itemsize)
    first, second = event.inputs[-2:] if event.name in ("addmm", "baddbmm") else event.inputs[:2]
    if event.name == "__rmatmul__":
        first, second = second, first
    if first.ndim < 2 or second.ndim < 2:
        return Product(1, out.numel(), 1, first.shape[-1], itemsize=itemsize)
    if second.ndim == 2:
        return Product(1, out.numel() // out.shape[-1], out.shape[-1], first.shape[-1], itemsize=itemsize)
    batch = out.numel() // (out.shape[-1] * out.shape[-2])
    return Product(batch, out.shape[-2], out.shape[-1], first.shape[-1], itemsize=itemsize)


def _einsum(event: Event, itemsize: int) -> Product | None:
    equation = next((x for x in event.args if isinstance(x, str)), "").replace(" ", "")
    terms, _, result = equation.partition("->")
    pair = terms.split(",")
    if len(pair) != 2 or "." in equation or not result:
        return None
    sizes: dict[str, int] = {}
    for term, x in zip(pair, event.inputs):
        sizes.update(zip(term, x.shape))
    first, second, made = (set(x) for x in (*pair, result))

    def size(letters: set[str]) -> int:
        found = 1
        for letter in letters:
            found *= sizes[letter]
        return found

    return Product(
        size(first & second & made), size((first & made) - second), size((second & made) - first),
        size((first & second) - made), itemsize=itemsize,
    )  # fmt: skip


def split_of(event: Event, product: Product, dims: dict[int, int]) -> SplitDim | None:
    """Which size of a product is split, where ``dims`` holds the split dim of tensors, by id."""
    out = event.outputs[0]
    first, second = event.inputs[0], event.inputs[1]
    if kind_of(event) == "attention":
        return "batch" if id(first) in dims or id(out) in dims else None
    at = dims.get(id(out))
    if at is not None:
        if at == out.ndim - 1:
            return "n"
        return "batch" if product.batch > 1 and at < out.ndim - 2 else "m"
    return "k" if id(first) in dims or id(second) in dims else None


def attention_keeps(event: Event) -> list[Tensor]:
    """What fused attention keeps beside the logarithms of its sums: queries, keys, values, and its result."""
    return [*event.inputs[:3], event.outputs[0]]


def _has_memory(x: Tensor) -> bool:
    try:
        memory_of(x)
    except (RuntimeError, NotImplementedError):
        return False
    return True


__all__ = ["ATTENTION", "Kept", "KeptUse", "Operation", "Product", "Use", "kind_of", "product_of", "split_of"]
