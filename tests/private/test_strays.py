"""Private names of torch and Lightning are in ``lightning_par/private`` alone."""

from __future__ import annotations

import ast
import functools
import re
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
import torch.distributed
import torchmetrics
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn

import lightning_par
import lightning_par.pl
from tests.helpers.sources import trees_in
from tests.private.strays import PACKAGES, Known, attributes_of, defined, is_private, strays

HERE, ROOT = Path(__file__).parent, Path(lightning_par.__file__).parent
RANKS = "lightning_par.strategies.ranks"
FILES = sorted(ROOT.rglob("*.py"))
PARTS = [path.stem for path in FILES if ROOT / "private" in path.parents and path.stem != "__init__"]


@functools.cache
def _outside() -> dict[Path, ast.Module]:
    return {path: tree for path, tree in trees_in(ROOT).items() if ROOT / "private" not in path.parents}


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _objects() -> list[Any]:
    """Some of each kind that our sources have to do with."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    options = dict(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = lightning.pytorch.Trainer(enable_checkpointing=False, **options)
    loops = trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.validate_loop, trainer.predict_loop
    of_torch = nn.LSTM(1, 1), nn.BatchNorm1d(1), optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)
    of_graphs = torch.ones(1, requires_grad=True).exp().grad_fn, torch.autograd.function.FunctionCtx()
    data = torch.utils.data.DataLoader([1]), torch.ones(1).untyped_storage(), torch.amp.GradScaler("cpu")
    return [
        *of_torch,
        *of_graphs,
        *data,
        CombinedLoader([]),
        BoringModel(),
        trainer,
        *loops,
        trainer.strategy,
        torchmetrics.SumMetric(),
    ]


@functools.cache
def _known() -> Known:
    """What is known of our sources and of the libraries that are installed."""
    for path in _outside():
        if path.stem != "__main__":
            import_module(_module(path))
    for home in (lightning_par, lightning_par.pl):  # strategies are made when they are asked for
        [getattr(home, name) for name in lightning_par.__all__ if hasattr(home, name)]
    modules = torch, torch._C, torch.distributed, nn.functional, torch.overrides, torch.autograd, torch.utils.data
    kept = {name for x in _objects() for name in (*getattr(x, "__dict__", ()), *attributes_of(type(x)))}
    of_tensors = attributes_of(torch.Tensor) | attributes_of(type(nn.Parameter))
    theirs = {*kept, *of_tensors, *(name for module in modules for name in dir(module))}
    ours = set().union(*map(defined, _outside().values()))
    return Known(ours, *(set(filter(is_private, names)) for names in (theirs, kept)), _inherited())


def _inherited() -> dict[str, set[str]]:
    """By the name of a class of ours, the private names of all classes of theirs that its objects may be of."""
    found: dict[str, set[str]] = {}
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "lightning_par"]:
        for kind in [x for x in vars(module).values() if isinstance(x, type)]:
            theirs = [base for base in kind.__mro__ if base.__module__.partition(".")[0] in PACKAGES]
            names = set().union(*map(attributes_of, theirs))
            for base in kind.__mro__:
                if base.__module__.startswith("lightning_par."):
                    found.setdefault(f"{base.__module__}.{base.__qualname__}", set()).update(names)
    return found


def test_no_file_outside_uses_a_private_name() -> None:
    found = {path: strays(tree, _known(), _module(path)) for path, tree in _outside().items()}
    lines = [f"{path.relative_to(ROOT)}:{line}: {name}" for path, names in found.items() for line, name in names]
    assert not lines, "write these in lightning_par/private, and import them from there:\n" + "\n".join(lines)


@pytest.mark.parametrize("part", PARTS)
def test_each_name_of_a_part_is_in_its_test(part: str) -> None:
    module, text = import_module(f"lightning_par.private.{part}"), (HERE / f"test_{part}.py").read_text()
    made = {
        getattr(node, "name", None) or getattr(_target(node), "id", "_") for node in trees_in(ROOT)[_file(part)].body
    }
    names = {name for name in (*made, *getattr(module, "__all__", ())) if not name.startswith("_")}
    assert {name for name in names if not re.search(rf"\b{name}\b", text)} == set()


def _file(part: str) -> Path:
    return ROOT / "private" / f"{part}.py"


def _target(node: ast.AST) -> ast.AST | None:
    return node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)


_STRAYS = {
    "import torch._dynamo": "torch._dynamo",
    "from torch.utils._pytree import tree_map": "torch.utils._pytree.tree_map",
    "from torch._subclasses.fake_tensor import FakeTensor": "torch._subclasses.fake_tensor.FakeTensor",
    "from torch.overrides import _get_current_function_mode": "torch.overrides._get_current_function_mode",
    "from lightning.fabric.utilities.distributed import _init_dist_connection": (
        "lightning.fabric.utilities.distributed._init_dist_connection"
    ),
    "with torch._C.DisableTorchFunction(): ...": "_C",
    "aten = torch.ops.aten\naten._scaled_dot_product_flash_attention(q, k, v)": "_scaled_dot_product_flash_attention",
    "torch.Tensor._make_wrapper_subclass(cls, shape)": "_make_wrapper_subclass",
    "torch._assert_async(x)": "_assert_async",
    "func._schema.name": "_schema",
    "x._version": "_version",
    "self._local._base": "_base",
    "x._is_param = True": "_is_param",
    "leaf._post_accumulate_grad_hooks": "_post_accumulate_grad_hooks",
    "node._forward_cls": "_forward_cls",
    "x.untyped_storage()._cdata": "_cdata",
    "module._parameters = {}": "_parameters",
    "module._call_impl(x)": "_call_impl",
    "child._forward_pre_hooks.values()": "_forward_pre_hooks",
    "rnn._flat_weight_refs = []": "_flat_weight_refs",
    "optimizer._optimizer_step_pre_hooks": "_optimizer_step_pre_hooks",
    "scaler._per_optimizer_states[0]": "_per_optimizer_states",
    "module._trainer": "_trainer",
    "trainer._checkpoint_connector": "_checkpoint_connector",
    "trainer.fit_loop._data_source": "_data_source",
    "combined_loader._mode": "_mode",
    "metric._forward_cache = None": "_forward_cache",
    'getattr(module, "_buffers", {})': "_buffers",
    'setattr(module, "_trainer", None)': "_trainer",
    'vars(module)["_modules"]': "_modules",
    'vars(copy).get("_trainer")': "_trainer",
    'module.__dict__.pop("_compiled_call_impl", None)': "_compiled_call_impl",
    'operator.attrgetter("data._version")': "_version",
    '_DICTS = ("_parameters", "weight")': "_parameters",
    '_LIGHTNING = frozenset("_trainer fit".split())': "_trainer",
    'logging.getLogger("torch._subclasses.fake_tensor")': "torch._subclasses.fake_tensor",
    "class RanksMixin:\n    def _configure_launcher(self): ...": "_configure_launcher",
    "class RanksMixin:\n    def launch(self): self._launcher = 1": "_launcher",
    "class RanksMixin:\n    _checkpoint_io: object = None": "_checkpoint_io",
}


@pytest.mark.parametrize("source", _STRAYS)
def test_a_stray_is_found(source: str) -> None:
    assert _found(source) == {_STRAYS[source]}


@pytest.mark.parametrize(
    "source",
    [
        "def _own(x): ...\n_own(1)",
        "x._hung_there = 1\nx._hung_there",
        'vars(self).setdefault("_saving", 1)\ngetattr(x, "_saving", None)',
        "class Own:\n    _slot: int\n    def f(self): return self._slot, other._slot",
        "class Own:\n    def f(self): self._parameters = {}; return self._parameters, vars(self)['_parameters']",
        "class Own:\n    def _run(self): return super()._run()",
        "from lightning_par.sharded.rules import lookup\ndef _metadata(): ...\nlookup._metadata",
        "named._replace(a=1), sys._getframe(1), os._exit(1), kind._fields",
        '"""The module\'s _parameters."""\nf"limit_{stage}_batches"\nname.endswith("_hooks")',
        '@rule("_foreach_norm", "_base")\ndef norm(func): return func.__name__ == "__get__"',
        "x.__torch_function__, torch.utils.data, _",
    ],
)
def test_what_is_ours_or_public_is_no_stray(source: str) -> None:
    assert not _found(source)


def _found(source: str) -> set[str]:
    tree, known = ast.parse(source), _known()
    return {name for _, name in strays(tree, replace(known, ours={*known.ours, *defined(tree)}), RANKS)}
