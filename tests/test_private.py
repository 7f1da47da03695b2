"""Private names of Lightning and torch that are used: each test fails when one moves or changes its meaning."""

from __future__ import annotations

import ast
import functools
import inspect
import io
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_par import PipelineParallelStrategy, TensorParallelStrategy, private
from lightning_par.strategies.namespace import LIGHTNING, PYTORCH_LIGHTNING, Namespace

SOURCES = sorted((Path(private.__file__).parent).rglob("*.py"))
# Used by more than one file, under torch's own names: fake tensors and pytrees have no public home.
SHARED = {"_pytree", "_subclasses"}
both = pytest.mark.parametrize("namespace", [LIGHTNING, PYTORCH_LIGHTNING], ids=lambda n: n.pytorch)


@both
def test_launchers_are_made_and_known_to_lightning(namespace: Namespace) -> None:
    environment = namespace.from_fabric("plugins.environments", "LightningEnvironment")()
    script = private.script_launcher(namespace, environment, 2, 1)
    base = namespace.from_pytorch("strategies.launchers.launcher", "_Launcher")
    assert isinstance(script, base) and not script.is_interactive_compatible
    forking = private.forking_launcher(namespace, object(), "fork")
    assert isinstance(forking, base) and forking.is_interactive_compatible
    # What is replaced on the instance is what Lightning calls, with these arguments.
    collect = type(forking)._collect_rank_zero_results
    assert list(inspect.signature(collect).parameters) == ["self", "trainer", "results"]
    assert "trainer.lightning_module.state_dict()" in inspect.getsource(collect)
    assert "self._collect_rank_zero_results(trainer, results)" in inspect.getsource(type(forking))


@both
def test_a_process_group_is_made_with_our_arguments(namespace: Namespace) -> None:
    environment = namespace.from_fabric("plugins.environments", "LightningEnvironment")()
    environment.set_world_size(1)
    try:
        private.init_process_group(namespace, environment, "gloo", timedelta(seconds=5), torch.device("cpu"))
        assert torch.distributed.get_backend() == "gloo"
    finally:
        torch.distributed.destroy_process_group()


@both
def test_optimizers_move(namespace: Namespace) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.sum().backward()
    optimizer.step()
    private.move_optimizers(namespace, [optimizer], torch.device("meta"))
    assert optimizer.state[parameter]["momentum_buffer"].is_meta


def test_hooks_of_an_optimizers_step_are_seen() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    assert not private.has_step_hooks(optimizer)
    own = (optimizer.register_step_pre_hook, optimizer.register_step_post_hook)
    for register in (*own, register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        handle = register(lambda *args: None)
        assert private.has_step_hooks(optimizer)
        handle.remove()
        assert not private.has_step_hooks(optimizer)


def test_compiled_code_can_run_as_it_is_written() -> None:
    compiled: list[Any] = []
    double = torch.compile(lambda x: 2 * x, backend=lambda module, _: compiled.append(module) or module.forward)
    first, last = private.uncompiled(), private.uncompiled()
    first.__enter__()
    last.__enter__()
    assert double(torch.ones(2)).sum() == 4 and not compiled
    first.__exit__(None, None, None)  # as threads do, which end in any order
    assert double(torch.ones(2)).sum() == 4 and not compiled
    last.__exit__(None, None, None)
    assert double(torch.ones(2)).sum() == 4 and compiled


@both
def test_the_trainers_loops_tell_where_their_loaders_come_from(namespace: Namespace) -> None:
    trainer_class = namespace.from_pytorch("trainer", "Trainer")
    states = namespace.from_pytorch("trainer.states", "TrainerFn")
    trainer = trainer_class(logger=False, enable_checkpointing=False, accelerator="cpu", devices=1)
    module = namespace.from_pytorch("demos.boring_classes", "BoringModel")()
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module)
    for state in states:
        trainer.state.fn = state
        source = private.data_source(trainer)
        assert source.is_defined()
        assert type(private.request_loader(namespace, source)) is torch.utils.data.DataLoader
        # An attribute of the instance takes the place of the method, as the look at the first batch needs.
        source.dataloader = lambda: "ours"
        assert private.request_loader(namespace, source) == "ours"
    assert private.resumes(trainer) is False
    assert private.before_batch_transfer(module, "batch") == "batch"


@both
def test_a_resumed_run_is_recognised(namespace: Namespace, tmp_path: Path) -> None:
    trainer_class = namespace.from_pytorch("trainer", "Trainer")
    boring = namespace.from_pytorch("demos.boring_classes", "BoringModel")
    told: list[bool] = []

    class Telling(boring):  # type: ignore[misc, valid-type]
        def configure_optimizers(self) -> Any:  # called when the model is set up
            told.append(private.resumes(self.trainer))
            return super().configure_optimizers()

    options = dict(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False)
    options["default_root_dir"] = tmp_path  # other tests may write to the current folder
    for epochs, path in ((1, None), (2, str(tmp_path / "last.ckpt"))):
        trainer = trainer_class(max_epochs=epochs, limit_train_batches=1, limit_val_batches=0, **options)
        trainer.fit(Telling(), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert told == [False, True]


@both
def test_a_combined_loader_tells_its_mode(namespace: Namespace) -> None:
    combined = namespace.from_pytorch("utilities.combined_loader", "CombinedLoader")
    assert private.mode_of(combined([[1], [2]], "max_size")) == "max_size"


@both
def test_hooks_are_given_what_a_step_fetched(namespace: Namespace) -> None:
    boring = namespace.from_pytorch("demos.boring_classes", "BoringModel")
    seen: list[Any] = []

    class Fetching(boring):  # type: ignore[misc, valid-type]
        def training_step(self, dataloader_iter: Any) -> Any:
            batch, _, _ = next(dataloader_iter)
            private.note_fetched(dataloader_iter, "ours")
            return self.layer(batch).sum()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(batch)

    options = dict(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False)
    namespace.from_pytorch("trainer", "Trainer")(
        max_steps=2, limit_val_batches=0, enable_checkpointing=False, **options
    ).fit(Fetching())
    assert seen == ["ours", "ours"]


def test_a_callback_runs_at_the_end_of_the_backward() -> None:
    order: list[str] = []
    x = torch.ones(1, requires_grad=True)
    y = torch.ones(1, requires_grad=True)

    def hook(_: Any) -> None:
        order.append("hook")
        private.at_end_of_backward(lambda: order.append("end"))

    y.register_post_accumulate_grad_hook(hook)
    x.register_post_accumulate_grad_hook(lambda _: order.append("other"))
    (x * y).sum().backward()
    assert sorted(order[:2]) == ["hook", "other"] and order[2:] == ["end"]


def test_a_scaler_shows_the_overflows_it_met() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for grad, found in ((float("inf"), 1.0), (1.0, 0.0)):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(())).item()
        parameter.grad = torch.full((2,), grad)
        scaler.unscale_(optimizer)
        (flag,) = private.found_infs(scaler, optimizer)
        assert flag.item() == found
        flag.fill_(1.0)  # what is written there is what the scaler decides by
        scaler.step(optimizer)
        assert parameter.tolist() == [1.0, 1.0]
        scaler.update()


def test_a_scaler_without_gradients_takes_a_flag_from_outside() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(())).item()
    scaler.unscale_(optimizer)
    assert private.found_infs(scaler, optimizer) == []
    private.note_overflow_flag(scaler, optimizer, torch.ones(1))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15


def test_an_rnns_weights_can_be_swapped() -> None:
    rnn = nn.LSTM(2, 3)
    private.forget_weak_references(rnn)
    torch.utils.swap_tensors(rnn.weight_ih_l0, nn.Parameter(torch.zeros(12, 2)))
    private.renew_weak_references(rnn)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(rnn.weight_ih_l0, nn.Parameter(torch.zeros(12, 2)))


def test_no_mode_sees_what_is_done_without_modes() -> None:
    seen: list[Any] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Functions(), FakeTensorMode():
        assert isinstance(torch.ones(1), FakeTensor) and len(seen) == 1
        with private.no_modes():
            assert type(torch.ones(1)) is torch.Tensor
    assert len(seen) == 1


def test_errors_of_lost_peers_are_known() -> None:
    store, groups = dist.HashStore(), {}
    connect = lambda rank: groups.update({rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(minutes=1))})  # noqa: E731
    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(2):  # who does not answer first, later has closed the connection
        with pytest.raises(RuntimeError) as caught:
            groups[0].recv([torch.ones(1)], 1, 0).wait(timedelta(milliseconds=10))
        assert private.tells_of_a_lost_peer(caught.value)
    with pytest.raises(dist.DistStoreError) as caught:
        store.wait(["nothing"], timedelta(milliseconds=10))
    assert private.tells_of_a_lost_peer(caught.value)
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2) + torch.ones(3)
    assert not private.tells_of_a_lost_peer(caught.value)


def test_the_innermost_mode_is_known() -> None:
    class Functions(TorchFunctionMode):
        pass

    outer, inner = Functions(), Functions()
    assert private.innermost_mode() is None
    with outer, inner:
        assert private.innermost_mode() is inner
        inner.__exit__(None, None, None)
        assert private.innermost_mode() is outer
        inner.__enter__()


def test_hooks_of_a_module_are_seen() -> None:
    module = nn.Linear(1, 1)
    assert not private.has_hooks(module)
    for register in (module.register_forward_hook, module.register_forward_pre_hook):
        handle = register(lambda *args: None)
        assert private.has_hooks(module)
        handle.remove()
    assert not private.has_hooks(module)
    for register in (module.register_full_backward_hook, module.register_full_backward_pre_hook):
        handle = register(lambda *args: None)
        assert private.number_of_backward_hooks(module) == 1 and not private.has_hooks(module)
        handle.remove()
    assert not private.number_of_backward_hooks(module)


def test_views_share_a_number_for_their_memory_also_on_meta() -> None:
    for device in ("cpu", "meta"):
        x, other = torch.empty(4, 4, device=device), torch.empty(4, 4, device=device)
        assert private.memory_of(x[1:].t()) == private.memory_of(x) != private.memory_of(other)


@pytest.mark.skipif(sys.platform != "linux", reason="the others' allocators are not glibc's")
def test_a_memory_is_one_object_that_lives_as_long_as_a_tensor_lies_in_it() -> None:
    x = torch.zeros(4)
    memory = private.storage_of(x)
    assert memory is private.storage_of(x[1:]) and private.storage_of(torch.eye(2).to_sparse()) is None
    memory.note = "kept"  # type: ignore[union-attr]
    gone = weakref.ref(memory)  # type: ignore[arg-type]
    del memory
    assert private.storage_of(x.view(2, 2)).note == "kept"  # type: ignore[union-attr]
    del x
    assert gone() is None


def test_setting_the_data_of_a_tensor_asks_first() -> None:
    plain, x, asked = torch.Tensor.__dict__.get("data"), torch.zeros(2), []

    def takes(x: torch.Tensor, value: object, set_data: Callable[..., None]) -> bool:
        asked.append(value)
        if value == "ones":
            set_data(x, torch.ones(2))
        return value == "ones"

    try:
        private.replace_data_setter(takes)
        x.data = "ones"  # type: ignore[assignment]
        assert x.tolist() == [1, 1]
        x.data = torch.full((2,), 3.0)
        assert x.data.tolist() == [3, 3] and len(asked) == 2
        assert torch.Tensor.data.__get__.__self__.__name__ == "data"  # type: ignore[attr-defined]
    finally:
        if plain is None:
            del torch.Tensor.data
        else:
            torch.Tensor.data = plain  # type: ignore[assignment,method-assign]


def test_memory_is_handed_back() -> None:
    def kept(addresses: list[int]) -> int:
        """In how many blocks there still is what was written: pages that were handed back read as zeros."""
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            return sum(os.pread(memory.fileno(), len(ones), x + (1 << 15)) == ones for x in addresses)

    blocks = [torch.ones(1 << 14) for _ in range(400)]  # below the size from which memory is mapped
    ones = blocks[0][:4].numpy().tobytes()
    given_up = [block.data_ptr() for block in blocks[::2]]  # each between two that stay, so the heap can't shrink
    del blocks[::2]
    assert kept(given_up) > 150
    private.trim_memory()
    assert kept(given_up) == 0
    assert all(torch.equal(block, torch.ones(1 << 14)) for block in blocks)


def test_bytes_are_fetched_when_they_are_written() -> None:
    values = {"a": torch.randn(5, 3), "b": torch.arange(4).to(torch.uint16)}  # the second has no typed storage
    log: list[str] = []

    class File(io.BytesIO):
        def write(self, data: Any) -> int:
            log.extend(name for name, x in values.items() if bytes(data) == x.numpy().tobytes())
            return super().write(data)

    class Late:
        def __init__(self, name: str) -> None:
            self.name, x = name, values[name]
            self.storage = private.LateStorage(x.nbytes, self.fetch)

        def fetch(self) -> Any:
            log.append(f"fetch {self.name}")
            return values[self.name].untyped_storage()

        def __reduce_ex__(self, protocol: Any) -> Any:
            return private.reduced_late(values[self.name].shape, values[self.name].dtype, self.storage)

    file, plain = File(), io.BytesIO()
    torch.save({name: Late(name) for name in values}, file)
    assert log == ["fetch a", "a", "fetch b", "b"]
    file.seek(0)
    for name, x in torch.load(file, weights_only=True).items():
        assert torch.equal(x, values[name]) and x.device.type == "cpu"
    torch.save({"a": values["a"]}, plain)
    torch.save({"a": Late("a")}, late := io.BytesIO())
    assert late.getvalue() == plain.getvalue()


def _calls() -> dict[str, Callable[[], Any]]:
    """Public calls, by the private function at which each begins."""
    from torch.nn.attention.flex_attention import flex_attention

    x, q = torch.ones(3), torch.ones(1, 1, 2, 16)
    return {
        "vmap_impl": lambda: torch.vmap(torch.sin)(x),
        "grad_impl": lambda: torch.func.grad(torch.sum)(x),
        "grad_and_value_impl": lambda: torch.func.grad_and_value(torch.sum)(x),
        "_vjp_with_argnums": lambda: torch.func.vjp(torch.sin, x)[1](x),
        "_jvp_with_argnums": lambda: torch.func.jvp(torch.sin, (x,), (x,)),
        "_autograd_grad": lambda: torch.func.jacrev(torch.sin)(x),
        "_enforce_mem_layouts": lambda: flex_attention(q, q, q),
    }


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_transforms_begin_in_functions_that_are_given_their_tensors() -> None:
    begins = {name: module for module, name, _ in private.transforms()}
    assert begins.keys() == _calls().keys()
    for name, call in _calls().items():
        with mock.patch.object(begins[name], name, wraps=getattr(begins[name], name)) as entry:
            call()
        assert any(isinstance(x, torch.Tensor) for x in tree_leaves(list(entry.call_args.args))), name


def test_outside_transforms_what_is_closed_over_is_plain() -> None:
    inside, outside = [], []

    def function(x: torch.Tensor) -> torch.Tensor:
        inside.append(private.in_functorch())
        with private.outside_transforms():
            outside.append(private.in_functorch())
        return x * private.in_functorch()

    assert torch.vmap(torch.vmap(function))(torch.ones(2, 2)).tolist() == [[1, 1], [1, 1]]
    assert (inside, outside) == ([True], [False])


_TRANSFORM = """
import torch
from lightning_par import private

met = []

def function(x):
    met.append(private.is_wrapped(x))
    return x.sin().sum()

def is_refused():
    try:
        torch.func.grad(function)(x)
    except RuntimeError as error:
        return "saved tensor hooks" in str(error)

x = torch.ones(3)
with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
    assert is_refused()
    with private.without_saved_tensors_hooks():
        assert not is_refused()
    assert is_refused(), "they are not back"
assert all(met) and met and not private.is_wrapped(x)
"""


def test_tensors_of_a_transform_are_known_and_it_runs_where_what_is_saved_passes_hooks() -> None:
    # In a process of its own: where a run has begun before, ours stand in the transforms' place.
    subprocess.run([sys.executable, "-c", _TRANSFORM], check=True, timeout=200)


def test_a_node_that_gathered_a_weight_leads_to_its_part() -> None:
    class Gathers(torch.autograd.Function):
        gathers_a_weight = True

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x * 2

    part = torch.ones(2, requires_grad=True)
    assert private.gathers(Gathers.apply(part).grad_fn) is part
    assert private.gathers(part.sin().grad_fn) is None


def _private_imports(source: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if node.module.split(".")[0] in ("torch", "lightning", "pytorch_lightning", "lightning_fabric"):
                parts = [*node.module.split("."), *(name.name for name in node.names)]
                found += [f"{source.name}: {p}" for p in parts if p.startswith("_") and p not in SHARED]
    return found


def test_no_other_file_imports_a_private_name() -> None:
    assert [name for source in SOURCES if source.name != "private.py" for name in _private_imports(source)] == []


def test_hooks_of_a_leaf_are_known() -> None:
    weight = torch.nn.Parameter(torch.ones(2))

    def before(grad: torch.Tensor) -> None: ...

    def after(leaf: torch.Tensor) -> None: ...

    assert private.hooks_of(weight) == ({}, {})
    handles = weight.register_hook(before), weight.register_post_accumulate_grad_hook(after)
    found = private.hooks_of(weight)
    assert [[*hooks.values()] for hooks in found] == [[before], [after]]
    for handle in handles:
        handle.remove()
    assert found == ({}, {})


def test_hooks_left_behind_by_a_swap_run_again() -> None:
    weight, ran = torch.nn.Parameter(torch.ones(2)), list[str]()
    weight.register_hook(lambda grad: ran.append("before"))
    weight.register_post_accumulate_grad_hook(lambda leaf: ran.append("after"))
    torch.utils.swap_tensors(weight, torch.nn.Parameter(torch.zeros(2)))
    weight.sum().backward()
    assert ran == []
    private.set_hooks(weight, private.hooks_of(weight))
    weight.sum().backward()
    assert ran == ["before", "after"]


def test_the_node_that_made_a_tensor_is_told_whatever_its_class_says() -> None:
    class Silent(torch.Tensor):
        grad_fn = None  # type: ignore[assignment]

    made = (torch.ones(2, requires_grad=True) * 2).as_subclass(Silent)  # type: ignore[arg-type]
    assert made.grad_fn is None
    assert private.node_of(made) is not None
    assert private.node_of(torch.ones(2)) is None


def test_the_wrapper_that_compile_makes_is_known() -> None:
    linear = torch.nn.Linear(2, 2)
    assert private.is_compiled_wrapper(torch.compile(linear, backend="eager"))  # type: ignore[arg-type]
    assert not private.is_compiled_wrapper(linear)


@pytest.mark.parametrize("kind", [TensorParallelStrategy, PipelineParallelStrategy])
def test_a_strategy_is_given_to_one_trainer_after_another(kind: Any) -> None:
    strategy, trainers = kind(), []
    for _ in range(2):
        trainers.append(Trainer(accelerator="cpu", devices=1, precision="64-true", strategy=strategy, logger=False))
        assert trainers[-1].strategy is strategy and trainers[-1].accelerator is strategy.accelerator
        assert strategy.precision_plugin is trainers[-1].precision_plugin


def test_a_parameter_is_pickled_by_a_function_of_tensor_flag_and_hooks() -> None:
    made, given, *_ = nn.Parameter(torch.ones(2), requires_grad=False).__reduce_ex__(2)
    assert made is private.parameter_of_pickle()
    again = made(*given)
    assert type(again) is nn.Parameter and again.sum() == 2 and not again.requires_grad


@both
def test_a_throughput_monitor_counts_by_ranks_and_flops(namespace: Namespace) -> None:
    monitor = namespace.from_pytorch("callbacks", "ThroughputMonitor")(batch_size_fn=len)
    trainer = namespace.from_pytorch("trainer", "Trainer")(accelerator="cpu", devices=1, logger=False)
    trainer.state.stage = namespace.from_pytorch("trainer.states", "RunningStage").VALIDATING
    monitor.setup(trainer, None, "validate")
    (throughput,) = private.throughputs(monitor)
    assert throughput.world_size == 1 and throughput.available_flops is None


def test_hooks_on_modules_and_on_all_of_them_are_found() -> None:
    module, seen = nn.Linear(1, 1), lambda *args: None
    assert not private.hooks_on(module) and not private.hooks_on_all()
    handles = [module.register_forward_hook(seen), module.register_full_backward_hook(seen)]
    assert private.hooks_on(module) == [seen, seen] and private.number_of_hooks(module) == 1
    assert private.number_of_leaf_hooks(module.weight) == 0
    module.weight.register_hook(seen)
    module.weight.register_post_accumulate_grad_hook(seen)
    assert private.number_of_leaf_hooks(module.weight) == 2
    handles += [nn.modules.module.register_module_forward_hook(seen)]
    assert private.hooks_on_all() == [seen]
    for handle in handles:
        handle.remove()
    assert not private.hooks_on(module) and not private.hooks_on_all()
    module.register_forward_hook(functools.partial(private.hooks_on_all))  # of ours
    module.weight.register_hook(private.is_wrapped)
    assert not private.has_hooks(module) and private.number_of_leaf_hooks(module.weight) == 2


def test_the_older_weight_norms_of_a_layer_are_known() -> None:
    layer = nn.utils.weight_norm(nn.Linear(2, 2))
    (norm,) = private.weight_norms(layer)
    assert norm.name == "weight" and torch.equal(norm.compute_weight(layer), layer.weight)
    assert not private.weight_norms(nn.utils.spectral_norm(nn.Linear(2, 2)))


def test_memory_that_others_have_is_known() -> None:
    x = torch.zeros(4)
    kept = x.data
    assert private.is_shared(kept)
    view = x[1:]
    del x
    assert private.is_shared(kept)
    del view
    assert not private.is_shared(kept)


def test_a_buffer_says_whether_it_is_persistent() -> None:
    module = torch.nn.Module()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("made", torch.zeros(1), persistent=False)
    assert [name for name in ("kept", "made") if private.is_persistent(module, name)] == list(module.state_dict())
