"""The copy of a module that an analysis runs: fake parameters, and ears on its modules, metrics and logs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.absent.deferred.deferred_tensor import Deferred
from lightning_par.absent.elsewhere import is_elsewhere
from lightning_par.pipeline.effects.console import LoggerView, Said, SayingCall, printed
from lightning_par.pipeline.effects.held_loggers import refuse_held
from lightning_par.pipeline.effects.metrics import METHODS, MetricCall
from lightning_par.pipeline.plan.stage_ranges import Stages
from lightning_par.pipeline.program.program import is_located
from lightning_par.pipeline.run.unit_calls import LocatedCall
from lightning_par.pipeline.trial.analysis import Analysis
from lightning_par.pipeline.trial.call_costs import CallTree
from lightning_par.private.fake_tensors import FakeTensorMode
from lightning_par.private.graph import autograd_function
from lightning_par.private.lightning_modules import trainer_of
from lightning_par.private.metrics import is_metric
from lightning_par.private.module_calls import plain_call, set_call
from lightning_par.private.modules import BUFFERS, MODULES, PARAMETERS
from lightning_par.private.tensors import mark_parameter
from lightning_par.python_state.nested_tensors import tensors_in
from lightning_par.sharded.user_classes import put_on, users_class
from lightning_par.trial.module_copy import TrainerView
from lightning_par.trial.step import Step


class Fakes:
    """Stand-ins of parameters and buffers."""

    def __init__(self, mode: FakeTensorMode, step: Step) -> None:
        self.mode, self.step = mode, step
        self.made: dict[int, Tensor] = {}
        parameters: dict[int, str] = {}
        for name, p in step.module.named_parameters(remove_duplicate=False):
            parameters.setdefault(id(p), name)
        self.parameters = parameters

    def __call__(self, x: Tensor) -> Tensor:
        if id(x) not in self.made:
            self.made[id(x)] = self._make(x)
        return self.made[id(x)]

    def _make(self, x: Tensor) -> Tensor:
        if id(x) in self.step.lent:  # another rank holds it
            return self.step.lent[id(x)].clone()
        if id(x) not in self.parameters and not _is_away(x):
            return (
                x.value()
                if isinstance(x, Deferred)
                else x.detach().clone().requires_grad_(x.requires_grad and x.is_leaf)
            )
        with self.mode:
            fake = torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device=self.step.device)
        fake.requires_grad_(x.requires_grad)
        if isinstance(x, nn.Parameter):
            mark_parameter(fake)
        return put_on(fake, users_class(x))

    def names(self) -> dict[int, str]:
        return {id(fake): name for fake, name in self.named()}

    def named(self) -> list[tuple[Tensor, str]]:
        return [(fake, self.parameters[key]) for key, fake in self.made.items() if key in self.parameters]


def _is_away(x: Tensor) -> bool:
    return is_elsewhere(x) or x.is_meta


class _Traced:
    """Notes which calls of modules lie in which."""

    def __init__(self, path: str, module: nn.Module, run: CallTree) -> None:
        self.path, self.run = path, run
        self.original = plain_call(module)
        self.numel = sum(p.numel() for p in module.parameters())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.numel:
            self.run.in_function(self.path, autograd_function(_CALLS))
        self.run.enter_module(self.path, self.numel)
        try:
            return self.original(*args, **kwargs)
        finally:
            self.run.leave_module()


_CALLS = (_Traced.__call__.__code__, LocatedCall.__call__.__code__)


def trace_calls(copy: nn.Module, run: CallTree) -> None:
    """Let ``run`` know of all calls of modules that are no metrics."""
    for path, module in copy.named_modules():
        if path and not is_metric(module):
            set_call(module, _Traced(path, module, run))


def intercept_calls(copy: nn.Module, run: Analysis, stages: Stages, traced: bool) -> None:
    """Let ``run`` hear of the calls of units and metrics, and of all modules where calls are ``traced``.

    Args:
        copy: of the LightningModule.
        run: of its step.
        stages: their units.
        traced: whether calls of other modules are noted, too.
    """
    for metric in [metric for module in copy.modules() for metric in _held_metrics(module)]:
        _listen_to_metric(metric)
    for path, module in copy.named_modules():
        if is_metric(module):
            _listen_to_metric(module)
        elif path in stages.homes:
            set_call(module, LocatedCall(path, module, stages.hands_out.get(path, ())))
        elif traced and path:
            set_call(module, _Traced(path, module, run))


def _listen_to_metric(metric: nn.Module) -> None:
    vars(metric).update({name: MetricCall(metric, name) for name in METHODS})


def _held_metrics(module: nn.Module) -> Iterator[nn.Module]:
    """Metrics in lists and dicts of the module's."""
    for name, value in vars(module).items():
        if name not in (MODULES, PARAMETERS, BUFFERS) and isinstance(value, (list, tuple, dict)):
            for x in value.values() if isinstance(value, dict) else value:
                if isinstance(x, nn.Module) and is_metric(x):
                    yield x


def listen(copy: nn.Module, run: Analysis) -> None:
    """What the step logs counts as used at its end; what units say they say themselves."""
    outputs = run.outputs

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if outputs.path is not None:
            outputs.say(f"self.log({name!r}, ...)", (value, args, kwargs), run.trace)
            return
        run.unit_buffers.check_outside(value)
        run.tell(value)

    def log_dict(values: Any, *args: Any, **kwargs: Any) -> None:
        if outputs.path is not None:
            outputs.say(f"self.log_dict({[*values]}, ...)", (dict(values), args, kwargs), run.trace)
            return
        run.unit_buffers.check_outside(dict(values))
        run.tell(dict(values))

    def hear(said: Said) -> None:
        if outputs.path is not None:
            if isinstance(said, SayingCall):
                what = f"logger.{'.'.join(said.path)}(...)"
                outputs.say(what, (said.args, said.kwargs), run.trace, to_logger=True)
        elif isinstance(said, SayingCall):
            run.tell((said.args, said.kwargs))

    def print_(*args: Any, **kwargs: Any) -> None:
        if outputs.path is not None:
            outputs.say("self.print(...)", (printed(*args, **kwargs),), run.trace)
            outputs.write(tensors_in((args, kwargs)))
            return
        run.prints |= any(map(is_located, run.tell((args, kwargs))))

    def refuse() -> None:
        if outputs.path is not None:
            refuse_held()

    if hasattr(copy, "automatic_optimization"):
        vars(copy).update(log=log, log_dict=log_dict, print=print_)
    trainer = trainer_of(copy)
    if isinstance(trainer, TrainerView):
        for logger in vars(trainer)["held_loggers"]:
            logger.asked = refuse
        views = [LoggerView(logger, hear, number) for number, logger in enumerate(vars(trainer)["_real"].loggers)]
        vars(trainer).update(loggers=views, logger=views[0] if views else None)
        # both are properties of the class, which an attribute can't replace
        copy.__class__ = type(type(copy).__name__, (type(copy),), {"logger": trainer.logger, "loggers": views})
