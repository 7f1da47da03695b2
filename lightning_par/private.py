"""Every use of a private name of Lightning or torch, each with the reason why no public one does.

``tests/test_private.py`` fails, naming the name, when one of them moves.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.utils.hooks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # has no public home
from torch.utils._python_dispatch import _disable_current_modes

from lightning_par.strategies.namespace import Namespace

T = TypeVar("T")


def given_anew(kind: type[T]) -> type[T]:
    """Let strategies of a class be given to several Trainers, one after another, as fresh to each.

    A Trainer takes what it finds in the strategy's private attributes for something that the user set, and refuses to
    set it again; there is no public word by which it asks. It reads ``_accelerator`` first of all.
    """

    def accelerator(self: Any) -> Any:
        return vars(self).get("_accelerator_given")

    def give(self: Any, accelerator: Any) -> None:
        vars(self)["_accelerator_given"] = accelerator

    def forget_the_last(self: Any) -> None:
        if self.accelerator is not None:
            self._precision_plugin = self._checkpoint_io = self._parallel_devices = self.cluster_environment = None

    setattr(kind, "accelerator", property(accelerator, give))  # noqa: B010
    setattr(kind, "_accelerator", property(forget_the_last, give))  # noqa: B010
    return kind


def script_launcher(namespace: Namespace, environment: Any, num_processes: int, num_nodes: int) -> Any:
    """The launcher that runs the user's script again for each rank, or nothing where processes are there already.

    Lightning has no public launcher; the callers of its strategies check for this very class.
    """
    launcher = namespace.from_pytorch("strategies.launchers.subprocess_script", "_SubprocessScriptLauncher")
    return launcher(environment, num_processes, num_nodes)


def forking_launcher(namespace: Namespace, strategy: Any, start_method: str) -> Any:
    """The launcher that starts the ranks through ``torch.multiprocessing``.

    Rank 0 hands the weights back to the parent from ``module.state_dict()``, which under a sharded module would be its
    own part; here it is what the strategy writes into checkpoints.
    """
    launcher = namespace.from_pytorch("strategies.launchers.multiprocessing", "_MultiProcessingLauncher")(
        strategy, start_method=start_method
    )
    # On the instance, and through module-level functions, since 'spawn' pickles the launcher.
    launcher._collect_rank_zero_results = partial(_collect_whole_weights, launcher)
    return launcher


def _collect_whole_weights(launcher: Any, trainer: Any, results: Any) -> Any:
    module = trainer.lightning_module
    whole = trainer.strategy.lightning_module_state_dict()
    module.state_dict = lambda: whole
    try:
        return type(launcher)._collect_rank_zero_results(launcher, trainer, results)
    finally:
        del module.state_dict


def replace_dummy_experiments(namespace: Namespace, handed: Callable[[Any, Any], Any]) -> Callable[[], None]:
    """Call ``handed(args, kwargs)`` for each method of a logger's ``experiment`` on ranks that log nothing.

    Lightning has no public name for what it gives these ranks. Returns what puts back what was there.
    """
    dummy = namespace.from_fabric("loggers.logger", "_DummyExperiment")
    before = dummy.nop

    def nop(_: Any, *args: Any, **kwargs: Any) -> None:
        handed(args, kwargs)

    dummy.nop = nop
    return partial(setattr, dummy, "nop", before)


def init_process_group(
    namespace: Namespace, environment: Any, backend: str, timeout: timedelta | None, device: torch.device
) -> None:
    """Connect the ranks as Lightning's own strategies do: with its log line, its reuse of a group that an earlier
    Trainer left, and its clean-up of NCCL at exit. Lightning has no public function for it."""
    connect = namespace.from_fabric("utilities.distributed", "_init_dist_connection")
    kwargs: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    connect(environment, backend, device_id=device if device.type != "cpu" else None, **kwargs)
    if backend != "nccl":  # Lightning sees to NCCL alone
        atexit.unregister(_close_process_group)
        atexit.register(_close_process_group)


def _close_process_group() -> None:
    """Gloo's worker threads let go of the last message's tensors some time after it has arrived, for which they need
    the interpreter. One that is about to end kills the thread that asks for it, and C++ then aborts the process."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    time.sleep(0.1)


def move_optimizers(namespace: Namespace, optimizers: list[Any], device: torch.device) -> None:
    """Move the states of ``optimizers``, where there are any yet; no public function knows Lightning's exceptions
    (a ``step`` that must stay on the CPU)."""
    namespace.from_fabric("utilities.optimizer", "_optimizers_to_device")(optimizers, device)


def data_source(trainer: Any) -> Any:
    """Where the running entry point gets its loaders from: an object with ``dataloader()`` and ``is_defined()``.

    Public names (`trainer.train_dataloader`) are filled only when the loop starts, after the model was set up.
    """
    loops = {
        "fit": trainer.fit_loop,
        "validate": trainer.validate_loop,
        "test": trainer.test_loop,
        "predict": trainer.predict_loop,
    }
    return loops[trainer.state.fn.value]._data_source


def request_loader(namespace: Namespace, source: Any) -> Any:
    """The user's loader, made under the context in which Lightning records a DataLoader's arguments, without which it
    could not put a distributed sampler into it later."""
    return namespace.from_pytorch("trainer.connectors.data_connector", "_request_dataloader")(source)


def mode_of(combined_loader: Any) -> str:
    """How a ``CombinedLoader`` makes batches of several loaders; it takes its mode and doesn't tell it."""
    return combined_loader._mode


def note_fetched(iterator: Any, batch: Any) -> None:
    """Let hooks be given ``batch``, which a step fetched of Lightning's ``dataloader_iter``, after that step; the loops
    look for it where the iterator left its own."""
    iterator.data_fetcher._batch = batch


def before_batch_transfer(module: Any, batch: Any) -> Any:
    """Call the user's ``on_before_batch_transfer``, of the LightningModule or of the datamodule, whichever Lightning
    would choose; the choice has no public name."""
    return module._on_before_batch_transfer(batch, dataloader_idx=0)


def resumes(trainer: Any) -> bool:
    """Whether a checkpoint was given to the running entry point; it is loaded by the time the model is set up."""
    return bool(trainer._checkpoint_connector._loaded_checkpoint)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward that is running now has ended; must be called from within one of its hooks.

    A ``loss.backward()`` of the user's own passes no hook of Lightning. FSDP2 and DDP use the same call.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def accumulates(node: Any) -> bool:
    """Whether a node of a graph is the end of it, which adds to the gradient of a leaf, its ``variable``.

    No public function says which leaves a backward will reach.
    """
    return type(node) is torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


def is_of_package(node: Any) -> bool:
    """Whether a node of a graph belongs to an autograd function of this package; a node hides whose it is."""
    function = getattr(type(node), "_forward_cls", None)
    return function is not None and function.__module__.startswith("lightning_par.")


def gathers(node: Any) -> Tensor | None:
    """The part of a stored weight of which a node of a graph is the gathered whole, or None."""
    function = getattr(type(node), "_forward_cls", None)
    if function is None or not getattr(function, "gathers_a_weight", False):
        return None
    part: Tensor | None = getattr(node.next_functions[0][0], "variable", None)
    return part


BackwardHook = torch.utils.hooks.BackwardHook
"""What a module makes of its full backward hooks at each call."""


def replace_backward_hook(kind: type) -> None:
    """Let modules make a ``kind`` of `BackwardHook`; torch offers no other place to see what their hooks are given."""
    torch.nn.modules.module.BackwardHook = kind  # type: ignore[misc,assignment]


def marks_module_ends(function: Any) -> bool:
    """Whether an autograd function is the one by which `BackwardHook` finds a module's inputs and outputs again."""
    return function is torch.nn.modules._functions.BackwardHookFunction


def has_step_hooks(optimizer: Any) -> bool:
    """Whether code of the user's runs within ``optimizer.step`` by `register_step_pre_hook` or the like; torch has no
    public way to ask."""
    from torch.optim import optimizer as base

    own = (vars(optimizer).get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post"))
    return any([*own, base._global_optimizer_pre_hooks, base._global_optimizer_post_hooks])


_uncompiled: list[Any] = []  # one for each context that is entered, of whatever thread
_stance = threading.Lock()


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, what the user has compiled runs as it is written. Nothing has been compiled where torch's compiler was
    never imported, which takes seconds; that can be seen by its private name alone."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with _stance:
        _uncompiled.append(_uncompiled[0] if _uncompiled else torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _stance:
            stance = _uncompiled.pop()
            if not _uncompiled:
                stance.__exit__(None, None, None)


def found_infs(scaler: Any, optimizer: Any) -> list[Tensor]:
    """The flags that ``scaler.unscale_(optimizer)`` left, one a device, each of shape (1,).

    A rank with a part of the gradients sees a part of the overflows; torch's scalers offer no place to share them.
    """
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


def note_overflow_flag(scaler: Any, optimizer: Any, flag: Tensor) -> None:
    """Add a flag to those that `found_infs` shows: a rank without gradients has none, and its scaler would raise."""
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"][flag.device] = flag


def weight_norms(module: nn.Module) -> list[Any]:
    """Those of the deprecated ``torch.nn.utils.weight_norm`` on ``module``, which keeps what they computed last."""
    from torch.nn.utils.weight_norm import WeightNorm

    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, WeightNorm)]


def forget_weak_references(rnn: nn.RNNBase) -> None:
    """Drop an RNN's weak references to its weights, which forbid to swap them."""
    rnn._flat_weight_refs = []


def renew_weak_references(rnn: nn.RNNBase) -> None:
    """Undo `forget_weak_references`, and lay out the weights anew for cuDNN, as the RNN does when it moves."""
    rnn._init_flat_weights()


def default_store() -> Any:
    """The key-value store that the ranks met at; torch gives no public way to it, and a second one needs a port."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def tells_of_a_lost_peer(error: BaseException) -> bool:
    """Whether ``error`` says only that another rank does not answer, or no longer: gloo's have no class of their own,
    but the file that they come from, all but one."""
    gloo = type(error) is RuntimeError and any(mark in str(error) for mark in ("gloo/", "caused pair closure"))
    return gloo or isinstance(error, torch.distributed.DistError)


def innermost_mode() -> Any:
    """The mode that torch functions meet first, if there is one; torch has no public way to look at it."""
    from torch.overrides import _get_current_function_mode

    return _get_current_function_mode()


def plain_call(module: torch.nn.Module) -> Callable[..., Any]:
    """What ``module(...)`` runs now: the user's compiled call, or forward with its hooks."""
    compiled = module._compiled_call_impl
    return module._call_impl if compiled is None else compiled  # type: ignore[return-value]


def set_call(module: torch.nn.Module, call: Callable[..., Any]) -> None:
    """Let ``module(...)`` run ``call``, hooks and all left to it. `nn.Module.compile` uses the same attribute, which
    copies and pickles of the module leave behind; a replaced ``forward`` would be in them, and run the user's hooks."""
    module.__dict__["_compiled_call_impl"] = call


def get_call(module: torch.nn.Module) -> Callable[..., Any] | None:
    """What `set_call` set."""
    return module.__dict__.get("_compiled_call_impl")


def reset_call(module: torch.nn.Module, before: Callable[..., Any]) -> None:
    """Undo `set_call`; ``before`` is what `plain_call` gave."""
    module.__dict__.pop("_compiled_call_impl", None)
    if before != module._call_impl:
        module.__dict__["_compiled_call_impl"] = before


def hooks_of(leaf: Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    """The user's hooks of a leaf: those that see its gradient, those that run once it is in ``.grad``.

    The dicts are the leaf's own, from which the handles that the user was given remove them.
    """
    before, after = leaf._backward_hooks, leaf._post_accumulate_grad_hooks
    return {} if before is None else before, {} if after is None else after


def set_hooks(leaf: Tensor, hooks: tuple[dict[int, Any], dict[int, Any]]) -> None:
    """Let ``leaf`` run the hooks in these dicts: ``swap_tensors`` leaves them with the object, which no longer asks."""
    leaf._backward_hooks, leaf._post_accumulate_grad_hooks = (each or None for each in hooks)  # type: ignore[assignment]


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile`` made of another; its class has no public name."""
    return type(module).__module__ == "torch._dynamo.eval_frame"


def take_hooks(leaf: Tensor) -> list[tuple[Any, Any]]:
    """Take the user's hooks off a leaf, for a while; torch can only remove a hook by the handle it gave away."""
    taken = []
    for hooks in (leaf._backward_hooks, leaf._post_accumulate_grad_hooks):
        if hooks:
            taken.append((hooks, hooks.copy()))
            hooks.clear()
    return taken


def put_hooks(taken: list[tuple[Any, Any]]) -> None:
    """Put back what `take_hooks` took."""
    for hooks, content in taken:
        hooks.update(content)


@contextlib.contextmanager
def no_modes() -> Iterator[None]:
    """No mode sees what is done inside: neither those of torch functions nor those that make tensors fake."""
    with torch._C.DisableTorchFunction():
        if not torch._C._len_torch_dispatch_stack():  # the next line costs some time
            yield
            return
        with _disable_current_modes():
            yield


def node_of(x: Tensor) -> Any:
    """The node of autograd's graph that made ``x`` itself, whatever its class says of ``grad_fn``."""
    attribute: Any = torch._C.TensorBase.grad_fn
    return attribute.__get__(x)


def in_backward() -> bool:
    """Whether a backward runs in this thread, as in a hook of a tensor."""
    return torch._C._current_graph_task_id() != -1


def has_hooks(module: nn.Module) -> bool:
    """Whether user code runs when ``module`` is called, beside its forward; torch has no public word for it."""
    return number_of_hooks(module) > 0


def hooks_on_all() -> list[Callable[..., Any]]:
    """The user's hooks on the calls of all modules there are, and on gradients there; torch can only register them."""
    from torch.nn.modules import module

    forward = (*module._global_forward_pre_hooks.values(), *module._global_forward_hooks.values())
    return [*forward, *backward_hooks_on_all()]


def number_of_hooks(module: nn.Module) -> int:
    """How many hooks of the user's see calls of ``module``."""
    return len(_of_user(module._forward_hooks)) + len(_of_user(module._forward_pre_hooks))


def number_of_leaf_hooks(leaf: Tensor) -> int:
    """How many hooks of the user's see the gradient of ``leaf``."""
    return len(_of_user(leaf._backward_hooks)) + len(_of_user(leaf._post_accumulate_grad_hooks))


def _of_user(hooks: dict[int, Any] | None) -> list[Any]:
    """Those that are not ours, which sync or gather; what we wrap around a user's has it as ``of_user``."""
    found = [*hooks.values()] if hooks else []
    names = [getattr(getattr(hook, "func", hook), "__module__", None) or "" for hook in found]
    return [x for x, name in zip(found, names) if not name.startswith("lightning_par.") or hasattr(x, "of_user")]


def hooks_on(module: nn.Module) -> list[Callable[..., Any]]:
    """The user's hooks on ``module``, of its calls and of gradients."""
    kinds = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return [hook for hooks in kinds for hook in _of_user(hooks)]


def handles_made() -> int:
    """How many handles of hooks there were so far; torch counts them by no public name."""
    return torch.utils.hooks.RemovableHandle.next_id


def dicts_of_hooks(module: nn.Module | None) -> tuple[MutableMapping[int, Any], ...]:
    """Where a module keeps hooks on its calls and gradients, and what it knows of them; all modules' without one."""
    from torch.nn.modules import module as everywhere

    kinds = ("_global_forward", "_global_backward") if module is None else ("_forward", "_backward")
    held = vars(everywhere if module is None else module)
    return tuple(x for name, x in held.items() if name.startswith(kinds) and "hooks" in name and isinstance(x, dict))


def users_hooks(dicts: tuple[MutableMapping[int, Any], ...]) -> tuple[dict[int, Any], ...]:
    """What of the ``dicts`` of one module is of hooks of the user's."""
    hooks = {key: x for held in dicts for key, x in held.items() if not isinstance(x, bool)}
    users = {id(x) for x in _of_user(hooks)}
    ours = {key for key, x in hooks.items() if id(x) not in users}
    return tuple({key: x for key, x in held.items() if key not in ours} for held in dicts)


def hang(dicts: tuple[MutableMapping[int, Any], ...], held: tuple[Mapping[int, Any], ...]) -> None:
    """Let the ``dicts`` of one module hold these hooks of the user's, and of ours those that they hold."""
    for into, users, new in zip(dicts, users_hooks(dicts), held, strict=True):
        ours = {key: x for key, x in into.items() if key not in users}
        into.clear()
        into.update({**new, **ours})


def number_of_backward_hooks(module: nn.Module) -> int:
    """How many hooks of the user's meet the gradients of the inputs or outputs of ``module``."""
    return len(_of_user(module._backward_hooks)) + len(_of_user(module._backward_pre_hooks))


def backward_hooks_on_all() -> list[Callable[..., Any]]:
    """As `hooks_on_all`, of those that meet gradients."""
    from torch.nn.modules import module

    return [*module._global_backward_pre_hooks.values(), *module._global_backward_hooks.values()]


def in_functorch() -> bool:
    """Whether a transform such as ``vmap`` runs: its tensors can't be wrapped. torch tells it by no public name."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_wrapped(x: Tensor) -> bool:
    """Whether ``x`` is a transform's own tensor."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def without_saved_tensors_hooks() -> contextlib.AbstractContextManager[None]:
    """Inside, what is saved for backward passes no hook: the transforms that differentiate refuse to run under one."""

    @contextlib.contextmanager
    def suspended() -> Iterator[None]:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is None:
            yield
            return
        torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            with suspended():
                yield
        finally:
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)

    return suspended()


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Inside, what a transformed function closes over is what it is outside: any autograd function takes it."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def transforms() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Where torch's transforms begin, a function's module and name, and what the user calls, and has imported by now;
    where they ask for gradients; and what flex attention does first with query, key and value."""
    from torch._functorch import apis, eager_transforms
    from torch.nn.attention import flex_attention

    names = {"grad_impl": torch.func.grad, "grad_and_value_impl": torch.func.grad_and_value,
             "_vjp_with_argnums": torch.func.vjp, "_jvp_with_argnums": torch.func.jvp,
             "_autograd_grad": torch.autograd.grad}  # fmt: skip
    found: list[tuple[Any, str, Any]] = [(eager_transforms, name, public) for name, public in names.items()]
    flex = (flex_attention, "_enforce_mem_layouts", flex_attention.flex_attention)
    return [(apis, "vmap_impl", torch.vmap), *found, flex]


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether the buffer ``name`` is in state dicts; torch says so in no public way that runs no hook of the user's."""
    return name not in module._non_persistent_buffers_set


def memory_of(x: Tensor) -> int:
    """A number for the memory that ``x`` and its views share; on ``meta``, too, where all addresses are 0."""
    return x.untyped_storage()._cdata


def storage_of(x: Tensor) -> torch.UntypedStorage | None:
    """The memory of the strided ``x``, unseen by modes: the same object as long as anything lies in it.

    So attributes of it live as long as the memory does; torch promises it nowhere. Its public name is the method.
    """
    if x.layout != torch.strided or hasattr(x, "_recipe"):  # deferred
        return None
    with torch._C.DisableTorchFunction():
        return x.untyped_storage()


def is_shared(x: Tensor) -> bool:
    """Whether another tensor, wherever it is, has memory of the strided ``x``, or may have it, as an array of numpy."""

    def uses(x: Tensor) -> int:  # torch counts them for its own graphs; the storage that asks is one
        count: int = torch._C._storage_Use_Count(x.untyped_storage()._cdata)  # type: ignore[attr-defined]
        return count

    with torch._C.DisableTorchFunction():
        return uses(x) > uses(torch.empty(1)) or not x.untyped_storage().resizable()


class _Data(property):
    """``torch.Tensor.data``, whose name is asked for by what watches torch functions."""

    __name__ = "data"


def replace_data_setter(takes: Callable[[Tensor, Any, Callable[[Tensor, Tensor], None]], bool]) -> None:
    """Ask ``takes(x, value, set)`` first where a tensor's ``data`` is set: whether it has done so.

    Torch asks no ``__torch_function__`` of the value, and takes one that has no memory for a plain one.
    """
    plain: Any = torch._C.TensorBase.data

    def set_data(x: Tensor, value: Any) -> None:
        if not takes(x, value, plain.__set__):
            plain.__set__(x, value)

    torch.Tensor.data = _Data(plain.__get__, set_data)  # type: ignore[assignment,misc]


def is_held(x: Tensor) -> bool:
    """Whether C++ code or a weak reference refers to ``x``, so that it can't be swapped; torch checks the same."""
    count: int = x._use_count()  # type: ignore[attr-defined]
    return count > 1 or bool(weakref.getweakrefs(x))


def trim_memory() -> None:
    """Hand what the process has given up back to the system: glibc keeps freed blocks of up to 32 MB, and a model that
    was built tensor by tensor would occupy twice its size. Elsewhere nothing happens."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


class LateStorage(torch.UntypedStorage):
    """Bytes of a tensor that are fetched when they are written to a file, one tensor after another.

    `torch.save` writes what ``cpu()`` of a storage returns that is not on the CPU, and gives it up before the next.
    """

    def __new__(cls, nbytes: int, fetch: Callable[[], Any]) -> LateStorage:
        return super().__new__(cls, nbytes, device="meta")  # type: ignore[call-arg]

    def __init__(self, nbytes: int, fetch: Callable[[], Any]) -> None:
        self.fetch = fetch

    def cpu(self) -> Any:
        return self.fetch()


def reduced_late(shape: torch.Size, dtype: torch.dtype, storage: LateStorage) -> tuple[Any, ...]:
    """What ``__reduce_ex__`` returns of a contiguous tensor on the CPU that has ``storage``."""
    rebuild, (real, _, _, _, *rest) = torch.empty(0, dtype=dtype).__reduce_ex__(2)
    typed = isinstance(real, torch.TypedStorage)
    late: Any = torch.TypedStorage(wrap_storage=storage, dtype=dtype if typed else torch.uint8, _internal=True)
    late._fake_device = "cpu"
    strides = torch.empty(shape, device="meta").stride()
    return rebuild, (late, 0, tuple(shape), strides, *rest)


def stored_at(file: str, offset: int, length: int) -> Any:
    """Where torch's reader of distributed checkpoints finds a tensor; its description has no public name."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


def remote_reader() -> type:
    """What reads distributed checkpoints at URLs by fsspec; it has no public name."""
    from torch.distributed.checkpoint import _fsspec_filesystem

    return _fsspec_filesystem.FsspecReader


def parameter_of_pickle() -> Callable[..., Any]:
    """What a pickled `nn.Parameter` calls: torch has no other way to pickle one whose values come only then."""
    return torch._utils._rebuild_parameter


def throughputs(monitor: Any) -> list[Any]:
    """What a ``ThroughputMonitor`` counts with, by stage; it makes them itself and hands none out."""
    return list(monitor._throughputs.values())
