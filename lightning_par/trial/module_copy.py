"""A copy of a module's Python state for a trial run: what the run does to it never reaches the user's module."""

from __future__ import annotations

import copy
import functools
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.mesh.replicas import of_like_replicas
from lightning_par.private.compiler import is_compiled_wrapper
from lightning_par.private.lightning_modules import give_trainer, trainer_of
from lightning_par.private.metrics import is_metric
from lightning_par.private.modes import no_modes
from lightning_par.private.module_calls import forget_call
from lightning_par.private.modules import buffers_of, parameters_of
from lightning_par.private.trainer import is_dummy_experiment
from lightning_par.python_state.nested_tensors import map_tensors
from lightning_par.sharded.packed_parameters import is_packed
from lightning_par.sharded.run_state import RunState
from lightning_par.trial.held_by_trainer import CONTAINERS, HELD, LOADERS, loaders_of, set_apart, with_data_apart
from lightning_par.trial.trainer_stand_ins import HeldLogger, Optimizers, Stand


def stand_in(
    module: nn.Module,
    tensor: Callable[[Tensor], Tensor],
    shared: tuple[Any, ...],
    took: Callable[..., None],
) -> Any:
    """A copy of ``module`` with ``tensor(x)`` for every parameter and buffer ``x``, and Lightning's side effects off.

    Modules that the user compiled run as they are written.

    Attributes that can't be copied are shared, as are the ``shared`` objects. ``took`` is called with the name of a
    metric's method, and what that is given.
    """
    memo: dict[int, Any] = {id(x): x for x in shared}  # what a deep copy finds here it does not copy
    for submodule in module.modules():
        for held in (*parameters_of(submodule).values(), *buffers_of(submodule).values()):
            if held is not None:
                memo[id(held)] = tensor(held)
        for value in vars(submodule).values():
            if isinstance(value, Tensor):
                memo[id(value)] = tensor(value)
    own_copy = [m for m in module.modules() if m is module or not _copies_itself(m)]
    for submodule in own_copy:
        memo[id(submodule)] = object.__new__(type(submodule))  # empty at first: modules may hold one another
    for parameter in module.parameters():
        if is_packed(parameter):
            give_meaning(memo[id(parameter)], parameter, tensor, memo)
    top = memo[id(module)]
    trainer = trainer_of(module)
    optimizers = Optimizers(top, lambda: _made(trainer), memo, _optimizer_class(trainer))
    view = None if trainer is None else TrainerView(trainer, optimizers)
    if view is not None:
        memo[id(trainer)] = view  # to hooks that close over it, too
        _hold_loggers(trainer, vars(view)["held_loggers"], memo)
    for submodule in own_copy:
        state = memo[id(submodule)].__dict__
        for name, value in vars(submodule).items():
            state[name] = _copied(value, memo)
        forget_call(memo[id(submodule)])
    if view is not None:
        give_trainer(top, view)
    if hasattr(module, "automatic_optimization"):
        _silence(top, optimizers, _logger_stands(trainer))
    for submodule in top.modules():
        if is_metric(submodule):
            _silence_metric(submodule, took)
    return top


def give_meaning(stand: Tensor, packed: Tensor, tensor: Callable[[Tensor], Tensor], memo: dict[int, Any]) -> None:
    """Let ``stand`` say what ``packed`` means, in objects of its own: a layer may pack anew, and note it there.

    Args:
        stand: of the packed parameter.
        packed: a parameter.
        tensor: makes what stands for a tensor.
        memo: of a deep copy: what stands for other objects, by their ids.
    """
    if stand is packed:
        return
    memo.update({id(value): tensor(value) for value in vars(packed).values() if isinstance(value, Tensor)})
    vars(stand).update({name: _copied(value, memo) for name, value in vars(packed).items()})


def copied(value: Any) -> Any:
    """``value`` and all that it holds, copied as far as it can be."""
    with torch.no_grad():
        return _copied(value, {})


def _copies_itself(module: nn.Module) -> bool:
    """Whether the class says how to copy itself; torchmetrics does, and its wrapped methods need it."""
    kind = type(module)
    if is_compiled_wrapper(module):  # it would compile what it wraps anew, of which there is nothing yet
        return False
    return hasattr(kind, "__deepcopy__") or getattr(kind, "__getstate__", None) != getattr(
        nn.Module, "__getstate__", None
    )


def _hold_loggers(trainer: Any, stands: list[HeldLogger], memo: dict[int, Any]) -> None:
    """Code that holds a logger of the ``trainer``'s, or its experiment, finds one of the ``stands`` there."""
    for logger, stand in zip(getattr(trainer, "loggers", ()), stands):
        memo[id(logger)] = memo[id(HeldLogger)] = stand
        experiment = getattr(logger, "experiment", None)  # which Lightning has made by now
        if experiment is not None:
            memo[id(experiment)] = stand


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if is_dummy_experiment(value):  # each time that a logger is asked another one
        return memo.get(id(HeldLogger), value)
    if isinstance(value, types.MethodType) and isinstance(_held_stand(value.__self__, memo), HeldLogger):
        return _held_stand(value.__self__, memo)
    if isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
        # Item by item: one entry that can't be copied must not make the others shared.
        if id(value) not in memo:
            new: dict[Any, Any] = type(value)()
            memo[id(value)] = new
            if isinstance(value, defaultdict) and isinstance(new, defaultdict):
                new.default_factory = value.default_factory
            new.update({key: _copied(item, memo) for key, item in value.items()})
        return memo[id(value)]
    if type(value) is list:
        if id(value) not in memo:
            items: list[Any] = []
            memo[id(value)] = items
            items.extend(_copied(item, memo) for item in value)
        return memo[id(value)]
    if isinstance(value, types.FunctionType):
        return _copied_function(value, memo)
    if type(value) is functools.partial:
        args = (_copied(arg, memo) for arg in value.args)
        keywords = {key: _copied(arg, memo) for key, arg in value.keywords.items()}
        return functools.partial(_copied(value.func, memo), *args, **keywords)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # any class may refuse to be copied, in any way
        return value


def _copied_function(function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    """A hook that closes over its module, or has it as a default, has the copy."""
    cells, defaults, named = function.__closure__ or (), function.__defaults__ or (), function.__kwdefaults__ or {}
    try:
        held = [*(cell.cell_contents for cell in cells), *defaults, *named.values()]
    except ValueError:  # a cell that is still empty
        return function
    if id(function) in memo or not held:
        return memo.get(id(function), function)
    memo[id(function)] = function  # it may close over itself
    new = [_copied_held(x, memo) for x in held]
    if all(a is b for a, b in zip(held, new, strict=True)):
        return function
    given = new[len(cells) : len(cells) + len(defaults)]
    closure = tuple(types.CellType(x) for x in new[: len(cells)])
    copied = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, tuple(given) or None, closure or None
    )
    copied.__kwdefaults__ = dict(zip(named, new[len(cells) + len(defaults) :])) or None  # type: ignore[assignment]
    vars(copied).update(vars(function))
    memo[id(function)] = copied
    return copied


def _copied_held(value: Any, memo: dict[int, Any]) -> Any:
    """What a function closes over, or has as a default."""
    if isinstance(value, types.MethodType):  # as that of which `torch.compile` made the function
        owner = _held_stand(value.__self__, memo)
        if isinstance(owner, HeldLogger):
            return owner
        return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
    if isinstance(value, (types.FunctionType, list, dict)):
        return _copied(value, memo)
    return _held_stand(value, memo)


def _held_stand(value: Any, memo: dict[int, Any]) -> Any:
    """The copy of ``value`` that there is, or itself."""
    return memo.get(id(HeldLogger if is_dummy_experiment(value) else value), value)


_OWN = frozenset("logger loggers save_checkpoint held_loggers".split())  # attributes of a view that a run finds there


class TrainerView:
    """The trainer as a trial run sees it: to be read, not to be changed or asked to act."""

    def __init__(self, trainer: Any, optimizers: Optimizers | None = None) -> None:
        loggers = _logger_stands(trainer)
        vars(self).update(
            _optimizers=optimizers, _real=trainer, logger=loggers[0], loggers=loggers, save_checkpoint=Stand(),
            held_loggers=[HeldLogger(type(x)) for x in getattr(trainer, "loggers", ())],
        )  # fmt: skip

    def __copy__(self) -> TrainerView:
        return self  # where it is an argument of a layer

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainerView:
        return self

    def let_note(self, noted: Callable[[str], Any]) -> None:
        """Call ``noted`` with the name of each attribute that is read."""
        vars(self)["_noted"] = noted

    def assigned(self) -> list[tuple[str, Any]]:
        """What the run has set attributes to, by name."""
        own = {*_OWN, *HELD, *LOADERS}
        return [(name, x) for name, x in vars(self).items() if name not in own and not name.startswith("_")]

    def __getattr__(self, name: str) -> Any:
        noted = vars(self).get("_noted")
        if noted is not None:
            noted(name)
        optimizers = vars(self)["_optimizers"]
        if optimizers is not None and name in ("optimizers", "lr_scheduler_configs"):
            return optimizers.optimizers if name == "optimizers" else optimizers.schedules
        real = vars(self)["_real"]
        if name in HELD:
            vars(self)[name] = set_apart(getattr(real, name))
            return vars(self)[name]
        if name in LOADERS:
            vars(self)[name] = with_data_apart(loaders_of(real, name))
            return vars(self)[name]
        value = _without_loading(real) if name == "estimated_stepping_batches" else getattr(real, name)
        if type(value) in CONTAINERS and name in vars(real):  # of the user's, who may append to it
            vars(self)[name] = value = copy.copy(value)
        return value


def _without_loading(trainer: Any) -> Any:
    """The steps of ``trainer``, who begins to load for it, and draws: it will do so again, as nothing of it is left."""
    loop = vars(trainer.fit_loop)
    before = loop.copy()
    try:
        return trainer.estimated_stepping_batches
    finally:
        loop.clear()
        loop.update(before)


def _logger_stands(trainer: Any) -> list[Stand]:
    """What a step finds as the loggers of its ``trainer``; one at least."""
    return [Stand(type(x)) for x in getattr(trainer, "loggers", ())] or [Stand()]


def _optimizer_class(trainer: Any) -> type | None:
    """Lightning's own of optimizers, of the package that ``trainer`` is of."""
    namespace = _namespace(trainer)
    return None if namespace is None else namespace.from_pytorch("core.optimizer", "LightningOptimizer")  # type: ignore[no-any-return]


def _namespace(trainer: Any) -> Any:
    return getattr(getattr(trainer, "strategy", None), "namespace", None)


def _silence(copy_of_module: Any, optimizers: Optimizers, loggers: list[Stand]) -> None:
    """Methods of a LightningModule that reach out of it do nothing."""

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None: ...

    quiet = ("log", "log_dict", "print", "manual_backward", "backward", "toggle_optimizer", "untoggle_optimizer",
             "clip_gradients", "optimizer_step", "save_hyperparameters")  # fmt: skip
    body: dict[str, Any] = dict.fromkeys(quiet, nothing)
    body["logger"], body["loggers"] = loggers[0], loggers
    body["optimizers"] = lambda self, *args, **kwargs: _one_or_all(optimizers.optimizers)
    body["lr_schedulers"] = lambda self: _one_or_all(optimizers.schedules) or None
    convert = _converter(trainer_of(copy_of_module))
    body["all_gather"] = lambda self, data, *args, **kwargs: map_tensors(_of_copies, convert(data, device=self.device))
    kind = type(copy_of_module)
    copy_of_module.__class__ = type(kind.__name__, (kind,), {**body, "__module__": kind.__module__})


def _converter(trainer: Any) -> Callable[..., Any]:
    """By which Lightning makes tensors of what is to be gathered; alone there is nothing to gather."""
    namespace = _namespace(trainer)
    if namespace is None:
        return lambda data, device: data
    return namespace.from_fabric("utilities.apply_func", "convert_to_tensors")  # type: ignore[no-any-return]


def _of_copies(x: Tensor) -> Tensor:
    """``x`` of each copy of the model, all of which are taken to have what this one has."""
    copies = RunState.current.copies_of_model
    return x if copies is None or copies.size == 1 else of_like_replicas(x, copies.size)


def _one_or_all(found: list[Any]) -> Any:
    return found[0] if len(found) == 1 else found


def _made(trainer: Any) -> tuple[list[Any], list[Any]]:
    """The optimizers and schedules of the run that is on, as far as they have been made."""
    if trainer is None:
        return [], []
    return trainer.optimizers, [config.scheduler for config in trainer.lr_scheduler_configs]


def _silence_metric(metric: Any, took: Callable[..., None]) -> None:
    def nothing() -> Tensor:
        with no_modes():  # no function of the step's
            return torch.zeros(())

    def forward(*args: Any, **kwargs: Any) -> Any:
        took("forward", *args, **kwargs)
        zero = nothing()
        return dict.fromkeys(metric.keys(), zero) if isinstance(metric, nn.ModuleDict) else zero

    def compute() -> Tensor:
        took("compute")
        return nothing()

    metric.__dict__.update(forward=forward, update=functools.partial(took, "update"), compute=compute)
