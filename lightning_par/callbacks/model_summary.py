"""What Lightning's ``ModelSummary`` shows: FLOPs and sizes of the whole model, as one device's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from lightning_par.pipeline.program.event_draws import DrawLog, Drawn, draw_again
from lightning_par.private.fake_tensors import FakeTensorMode
from lightning_par.private.modules import buffers_of, parameters_of
from lightning_par.python_state import generators
from lightning_par.python_state.kept import kept
from lightning_par.sharded.packed_parameters import is_packed
from lightning_par.strategies.namespace import Namespace
from lightning_par.trial.module_copy import give_meaning
from lightning_par.trial.trial_run import fake_stands, quiet


def summarize_whole(callbacks: Iterable[Any], trainer: Any, module: Any, namespace: Namespace) -> None:
    """Show summaries that run the module before it is laid out: later each rank's run would count its own share.

    It runs on fake tensors, so that nothing is computed; what it draws is drawn, so that the generators stand where one
    device's do. Where a module can't, its summary comes in Lightning's time, with the FLOPs of the first rank.

    Args:
        callbacks: the trainer's.
        trainer: in a fit, before its ``on_fit_start``.
        module: the LightningModule, whole.
        namespace: whose ``ModelSummary``.
    """
    kind = namespace.from_pytorch("callbacks", "ModelSummary")
    with generators.kept():  # a property may draw
        if getattr(module, "example_input_array", None) is None:
            return
    for callback in callbacks:
        if isinstance(callback, kind) and type(callback).on_fit_start is kind.on_fit_start:
            drawn: list[Drawn] = []
            try:
                with generators.put_back_on_error(), _on_fakes(module), DrawLog(drawn):
                    callback.on_fit_start(trainer, module)
            except Exception:  # whatever the user's forward raises on fakes
                continue
            vars(callback)["on_fit_start"] = _Shown(drawn)


def restore_summaries(callbacks: Iterable[Any]) -> None:
    """Undo `summarize_whole`."""
    for callback in callbacks:
        if isinstance(vars(callback).get("on_fit_start"), _Shown):
            del vars(callback)["on_fit_start"]


@contextlib.contextmanager
def _on_fakes(module: nn.Module) -> Iterator[None]:
    """``module`` has fakes in the place of its weights, and what it does is undone."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    held: list[Any] = [held for m in module.modules() for held in (parameters_of(m), buffers_of(m))]
    before = [dict(one) for one in held]
    with kept(module, as_is={id(p) for p in module.parameters()}, is_copy=False), quiet():
        stand = fake_stands(module, mode, {})
        for parameter in filter(is_packed, module.parameters()):
            give_meaning(stand(parameter), parameter, stand, {id(m): m for m in module.modules()})
        try:
            for one in held:
                one.update({name: stand(x) for name, x in one.items() if x is not None})
            with mode:
                yield
        finally:
            for one, values in zip(held, before):
                one.update(values)


class _Shown:
    """The hook of a callback whose summary was shown: in Lightning's time it draws what that has ``drawn``."""

    def __init__(self, drawn: list[Drawn]) -> None:
        self.drawn = drawn

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        draw_again(self.drawn)
