"""Two results, compared by the law: a layout changes speed and memory, never results.

In float64 two values agree where |a - b| <= 1e-9 * max(largest |entry| of that tensor, largest |entry| of that quantity
in the model), since one device that sums in another order already differs on a gradient that is truly zero; initial
weights agree bitwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_par.verdict.result import Result

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Finding:
    """Something that breaks the law.

    Args:
        what: the quantity, e.g. ``"clipped gradient"``.
        name: whose; empty where it is the quantity as a whole.
        text: how it differs.
        error: the largest difference, relative to what the tolerance is; infinite where no number can say it.
    """

    what: str
    name: str
    text: str
    error: float = float("inf")

    def __str__(self) -> str:
        return f"{self.what} {self.name}: {self.text}" if self.name else f"{self.what}: {self.text}"


def compare(
    reference: Result,
    result: Result,
    data_size: int = 1,
    tolerance: float = TOLERANCE,
    synced: Collection[str] = (),
) -> list[Finding]:
    """What breaks the law; empty where nothing does.

    Args:
        reference: of one device, which accumulated over ``data_size`` batches.
        result: of one rank of a layout.
        data_size: copies of the model.
        tolerance: of floating-point values, relative.
        synced: names of what the step logs with ``sync_dist=True``.
    """
    found: list[Finding] = []
    expected = expectation(reference, result.replica, data_size, synced)
    main = result.rank == 0
    # Other ranks may leave out what they don't hold, or put meta tensors there.
    initial = {
        k: v for k, v in expected.initial.items() if main or (k in result.initial and _is_here(result.initial[k]))
    }
    here = {k: v for k, v in result.initial.items() if main or _is_here(v)}
    found += compare_tensors("initial weight", initial, here, 0.0)
    found += compare_tensors("loss", by_index(expected.losses), by_index(result.losses), tolerance)
    for what, a, b in (
        ("gradient", expected.gradients, result.gradients),
        ("clipped gradient", expected.clipped, result.clipped),
    ):
        found += compare_tensors(what, {k: v for k, v in a.items() if main or k in b}, b, tolerance)
    if main:
        found += compare_tensors("clipped norm", _norm(expected.clipped), _norm(result.clipped), tolerance)
    for step, (one, other) in enumerate(zip(expected.step_metrics, result.step_metrics, strict=True)):
        found += _compare_metrics(f"logged after batch {step}", one, other, tolerance, extra=data_size == 1)
    found += _compare_metrics("callback_metrics", expected.metrics, result.metrics, tolerance, extra=data_size == 1)
    if expected.learning_rates != result.learning_rates:
        found.append(Finding("learning rates", "", f"{expected.learning_rates} != {result.learning_rates}"))
    found += compare_tensors("prediction", flat(expected.predictions), flat(result.predictions), tolerance)
    if main:
        found += _compare_checkpoints(expected.checkpoint, result.checkpoint, tolerance)
    found += compare_tensors("weight after all", expected.after, result.after, tolerance)
    return found


def expectation(reference: Result, replica: int, data_size: int, synced: Collection[str] = ()) -> Result:
    """What the given replica has to see, from one device that ran through all replicas' batches in turn.

    Under data parallelism each replica has the losses and predictions of its own batches, and what is ``synced`` is the
    mean over the replicas.
    """
    if data_size == 1:
        return reference
    steps = []
    for i in range(0, len(reference.step_metrics), data_size):
        window = reference.step_metrics[i : i + data_size]
        steps.append(
            {
                key: torch.stack([m[key] for m in window]).mean() if key in synced else own
                for key, own in window[replica].items()
            }
        )
    last = reference.step_metrics[-1]  # the final metrics of a step are compared there
    of_step = {k for k in last if not k.startswith("val_") and f"{k}_step" not in last}
    return Result(
        replica=replica,
        initial=reference.initial,
        losses=reference.losses[replica::data_size],
        step_metrics=steps,
        precision=reference.precision,
        metrics={k: v for k, v in reference.metrics.items() if k not in of_step},
        learning_rates=reference.learning_rates[data_size - 1 :: data_size],
        gradients=reference.gradients,
        clipped=reference.clipped,
        checkpoint=reference.checkpoint,
        predictions=reference.predictions[replica::data_size],
        after=reference.after,
    )


def _is_here(x: Tensor) -> bool:
    return x.device.type != "meta"


def _norm(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of all gradients together; nothing where there are none."""
    norms = [x.to_dense().norm() for x in gradients.values()]
    return {"of all": torch.stack(norms).norm()} if norms else {}


def by_index(values: list[Tensor]) -> dict[str, Tensor]:
    """Values by their place in the list."""
    return {str(i): value for i, value in enumerate(values)}


def flat(value: Any, prefix: str = "", within: tuple[int, ...] = ()) -> dict[str, Any]:
    """Nested values by their path; an object that can't tell what equals it is what it holds.

    Args:
        value: what may be nested.
        prefix: its own path.
        within: by identity, what it is nested in: of what holds itself the second one is left out.
    """
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple, deque)):
        items = enumerate(value)
    elif _holds(value):
        items = {"type": type(value).__qualname__, **vars(value)}.items()
    else:
        return {prefix.removeprefix("."): value}
    if id(value) in within:
        return {}
    within = (*within, id(value))
    return {k: v for key, inner in items for k, v in flat(inner, f"{prefix}.{key}", within).items()}


def _holds(value: Any) -> bool:
    """Whether it is an object that equals nothing but itself, and no function or class, which pickle by name."""
    return type(value).__eq__ is object.__eq__ and hasattr(value, "__dict__") and not hasattr(value, "__qualname__")


def _compare_metrics(
    what: str, a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float, extra: bool
) -> list[Finding]:
    """Every metric is its own quantity. With ``extra``, what is logged beyond the expected is found too."""
    found = [Finding(what, "", f"{name!r} is missing") for name in a if name not in b]
    found += [Finding(what, "", f"{name!r} is not logged on one device") for name in b if extra and name not in a]
    for name in a:
        if name in b:
            found += compare_tensors(what, {name: a[name]}, {name: b[name]}, tolerance)
    return found


def compare_tensors(what: str, a: dict[str, Any], b: dict[str, Any], tolerance: float) -> list[Finding]:
    """Compare one quantity: names, types, dtypes, shapes, values."""
    if list(a) != list(b):
        missing, extra = [k for k in a if k not in b], [k for k in b if k not in a]
        order = "" if missing or extra else ", order"
        return [Finding(what, "", f"names differ: missing {missing}, extra {extra}{order}")]
    scale = max((largest(x) for x in a.values() if isinstance(x, Tensor)), default=0.0)
    return [one for name, x in a.items() if (one := _compare_one(what, name, x, b[name], tolerance, scale)) is not None]


def _compare_one(what: str, name: str, x: Any, y: Any, tolerance: float, scale: float) -> Finding | None:
    if isinstance(x, float) and isinstance(y, float):
        x, y = torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return None if type(x) is type(y) and x == y else Finding(what, name, f"{x!r} != {y!r}")
    if type(y) not in (Tensor, torch.nn.Parameter):
        return Finding(what, name, f"is a {type(y).__name__}, not a plain tensor")
    if x.device != y.device:
        return Finding(what, name, f"is on {y.device}, not {x.device}")
    if x.dtype != y.dtype or x.shape != y.shape:
        return Finding(what, name, f"{x.dtype} {tuple(x.shape)} != {y.dtype} {tuple(y.shape)}")
    if tolerance == 0.0 or not (x.is_floating_point() or x.is_complex()):
        if torch.equal(x, y):
            return None
        return Finding(what, name, f"not equal, {int((x != y).sum())} of {x.numel()} entries")
    if not x.numel():
        return None
    scale = max(largest(x), scale)
    differences = (x - y).abs()
    differences[(x == y) | (x.isnan() & y.isnan())] = 0.0  # infinities of one sign
    error = differences.nan_to_num(nan=float("inf")).max().item()
    if error <= tolerance * scale:
        return None
    text = f"error {error:.2e}, bound {tolerance * scale:.2e}"
    return Finding(what, name, text, error / scale if scale else float("inf"))


def largest(x: Tensor) -> float:
    """The largest |entry| that is finite; 0 where there is none."""
    if not x.numel() or not (x.is_floating_point() or x.is_complex()):
        return 0.0
    return x.abs().nan_to_num(0.0, 0.0, 0.0).max().item()


def _compare_checkpoints(a: dict[str, Any], b: dict[str, Any], tolerance: float) -> list[Finding]:
    if set(a) != set(b):
        return [Finding("checkpoint keys", "", f"{sorted(a)} != {sorted(b)}")]
    found = compare_tensors("weight", a["state_dict"], b["state_dict"], tolerance)
    for key in ("epoch", "global_step"):
        if a[key] != b[key]:
            found.append(Finding(f"checkpoint {key}", "", f"{a[key]} != {b[key]}"))
    found += compare_tensors("checkpoint lr_schedulers", flat(a["lr_schedulers"]), flat(b["lr_schedulers"]), tolerance)
    if len(a["optimizer_states"]) != len(b["optimizer_states"]):
        return [*found, Finding("checkpoint", "", "number of optimizers differs")]
    for i, (one, other) in enumerate(zip(a["optimizer_states"], b["optimizer_states"])):
        options, others = flat(one["param_groups"]), flat(other["param_groups"])
        found += compare_tensors(f"optimizer {i} param_groups", options, others, tolerance)
        for kind, (x, y) in _by_kind(one["state"], other["state"]).items():
            found += compare_tensors(f"optimizer {i} {kind}".rstrip(), x, y, tolerance)
    return found


def _by_kind(*states: dict[Any, Any]) -> dict[str, list[dict[str, Any]]]:
    """What optimizers keep of each parameter, by kind; of the kind "" what they keep under names of their own."""
    kept: list[dict[str, dict[str, Any]]] = []
    for state in states:
        kinds: dict[str, dict[str, Any]] = {}
        for key in sorted(state, key=str):
            own = state[key] if isinstance(state[key], dict) else {"": state[key]}
            for kind, value in own.items():
                kinds.setdefault(str(kind), {})[str(key)] = value
        kept.append(kinds)
    names = dict.fromkeys(kind for kinds in kept for kind in kinds)
    return {kind: [flat(kinds.get(kind, {})) for kinds in kept] for kind in names}
