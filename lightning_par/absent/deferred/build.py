"""Run the code that builds a module with its weights deferred, or whole where that can't be done."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_par.absent.deferred.deferred_tensor import Deferred, UndeferrableError, is_deferred
from lightning_par.absent.deferred.materialise import make_real, map_again
from lightning_par.absent.deferred.session import Session
from lightning_par.private.tensors import is_held
from lightning_par.python_state import generators
from lightning_par.python_state.user_code import line_of
from lightning_par.sharded.identity import swappable
from lightning_par.sharded.patches import thread_pools
from lightning_par.sharded.patches.replacement import installed

_TOLD = 1 << 20  # bytes: what is built whole is mentioned from this size on


@dataclass(frozen=True)
class Built:
    """How a module was built.

    Attributes:
        result: what the user's code returned.
        reason: why everything was built whole, or None.
        whole: names and sizes in bytes of large tensors that were built whole all the same.
    """

    result: Any = None
    reason: str | None = None
    whole: tuple[tuple[str, int], ...] = ()

    def warning(self) -> str | None:
        """What the user should know of it."""
        if self.reason is not None:
            return f"The model was built whole on every rank, since {self.reason}."
        if not self.whole:
            return None
        total, names = sum(nbytes for _, nbytes in self.whole), [name for name, _ in self.whole]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return (
            f"{', '.join(names[:3])}{more} ({total / 1e6:.1f} MB) were built whole on every rank, since their values "
            "are not made by torch's functions alone, or something beside the module holds their memory."
        )


def build(module: nn.Module, configure: Callable[[], Any], draws: bool = True) -> Built:
    """Run ``configure``, which adds modules to ``module``, so that their parameters are deferred.

    Where it does what can't be deferred, everything is put back to where it was, and it runs again as it is.

    Args:
        module: what it held before stays as it is.
        configure: the user's code.
        draws: whether the generators move on as they do where weights are real; see `Session`.

    Raises:
        Exception: what ``configure`` raises, also without anything deferred.

    Example::

        built = build(model, model.configure_model)
        assert built.reason is None
    """
    before = {id(x) for x in _tensors(module)}
    put_back = _snapshot(module)
    try:
        with generators.put_back_on_error([module]):
            with Session(draws) as session, installed(thread_pools.patch(session.joined)):
                result = configure()
            settled = _settle(module, session)
    except Exception as error:  # whatever it is, plain tensors may serve the user's code better
        reason = _told(error)
    else:
        return Built(result, None, (*settled, *_made_whole(module, before, {name for name, _ in settled})))
    put_back()
    gc.collect()  # the failed attempt's modules refer to each other
    return Built(configure(), reason)


def _settle(module: nn.Module, session: Session) -> list[tuple[str, int]]:
    """Give values to the deferred tensors that are no parameter or buffer of ``module`` with memory of its own."""
    session.adoption.of_module(module)
    written = next((region for region in session.adoption.mappings.regions if not region.is_clean()), None)
    if written is not None:
        raise UndeferrableError(f"a tensor of {written.file.path} was written to after it was copied into another")
    changed = next((c for c in session.constants if not c.unchanged()), None)
    if changed is not None:
        raise UndeferrableError(f"data of shape {tuple(changed.value.shape)} changed after it was copied into a tensor")
    gc.collect()  # what only refers to itself needs no values
    names: dict[int, str] = {id(x): name for name, x in _named(module)}
    groups: dict[int, list[Deferred]] = {}
    for x in session.alive():
        if isinstance(x, Deferred):
            groups.setdefault(id(x.store), []).append(x)
    if any(x.grad_fn is not None for tensors in groups.values() for x in tensors):
        raise UndeferrableError("a tensor is computed with a gradient")
    told = []
    with swappable(module.modules()):
        for tensors in groups.values():
            name = next((names[id(x)] for x in tensors if id(x) in names), "a tensor outside the module's parameters")
            if len(tensors) > 1 or id(tensors[0]) not in names:
                if not map_again(tensors, name):
                    told.append((name, tensors[0].store.history.allocation.nbytes))
                    make_real(tensors, name)
            elif is_held(tensors[0]):
                raise UndeferrableError(f"something holds {name}, such as an autograd graph or compiled code")
    return [(name, nbytes) for name, nbytes in told if nbytes >= _TOLD]


def _made_whole(module: nn.Module, before: set[int], known: set[str]) -> list[tuple[str, int]]:
    """Large tensors that torch's own functions did not make."""
    new = [(name, x) for name, x in _named(module) if id(x) not in before and not is_deferred(x) and not x.is_meta]
    return [(name, x.nbytes) for name, x in new if x.nbytes >= _TOLD and name not in known]


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _tensors(module: nn.Module) -> list[Tensor]:
    return [x for _, x in _named(module)]


def _told(error: Exception) -> str:
    line = line_of(error)
    place = "" if line is None else f" at {line}"
    kind = "" if isinstance(error, UndeferrableError) else f"{type(error).__name__}: "
    return f"{kind}{str(error).strip().splitlines()[0][:200] if str(error) else ''}{place}"


def _snapshot(module: nn.Module) -> Callable[[], None]:
    """How to undo what is done to the attributes of ``module`` and of its modules, and to containers there."""
    saved = []
    for m in module.modules():
        held = vars(m)
        inside = [(x, x.copy()) for x in held.values() if isinstance(x, (dict, list, set))]
        saved.append((held, dict(held), inside))

    def put_back() -> None:
        for held, attributes, inside in saved:
            held.clear()
            held.update(attributes)
            for container, content in inside:
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)

    return put_back
