"""One run of a program on this rank, and what it leaves: of all this a layout must not change anything."""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import importlib.util
import itertools
import json
import logging
import os
import random
import sys
import tempfile
import traceback
import types
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torchmetrics
from torch import Tensor, nn

import lightning_par
import lightning_par.strategies.lightning  # noqa: F401
from lightning_par.verdict.result import KeepGradients, Result, detached
from tests.fuzz.layouts import LAYOUTS

MARK = "FUZZED "
_OURS = str(Path(__file__).parents[2] / "lightning_par")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)


@dataclasses.dataclass
class Ran:
    """What a run left on one rank."""

    result: Result
    state: dict[str, Any]  # of attributes, class bodies and globals, by their path
    generators: dict[str, Any]


class FailedError(RuntimeError):
    """Holds, as JSON, what was raised and when."""


class _Keep(KeepGradients, L.Callback):
    batches = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)


def run(source: str, layout: str | None, folder: str, seed: int, nudge: float = 0.0) -> Ran:
    """Train the program on this rank, under ``layout`` or on one device.

    Args:
        source: its text.
        layout: a name in `LAYOUTS`.
        folder: all ranks share it.
        seed: of weights.
        nudge: how far weights are moved at the start, relative to themselves, to see what rounding does.

    Raises:
        FailedError: whatever the run raised.
    """
    name = "fuzzed_program"
    path = Path(folder) / f"program-{os.environ.get('RANK', '0')}.py"
    path.write_text(source)
    keep = _Keep(folder)
    trainer: Any = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None and spec.loader is not None
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            _seed(seed)
            net = module.Net()
            if nudge:
                _move(net, nudge)
            _seed(seed + 1)
            trainer = _trainer(module, layout, keep, folder)
            validates = "validation_step" in vars(type(net))
            loaders = (module.loader(1), module.loader(2)) if validates else (module.loader(1),)
            trainer.fit(net, *loaders)
            result = keep.result
            for saved in result.checkpoint.get("optimizer_states", []):
                for kept in saved["state"].values():
                    kept.update({k: _flat(v) for k, v in kept.items() if isinstance(v, list)})
            generators = _generators()
            result.metrics = detached(trainer.callback_metrics)
            state = state_of(net, module)
            result.predictions = detached(trainer.predict(net, module.loader(2)))
            result.after = detached(net.state_dict())
            return Ran(result, state, generators)
    except BaseException as error:
        raise FailedError(MARK + json.dumps(_failure(error, trainer, keep))) from None
    finally:
        logging.disable(logging.NOTSET)
        sys.modules.pop(name, None)


def _trainer(module: types.ModuleType, layout: str | None, keep: _Keep, folder: str) -> Any:
    options = module.options()
    callbacks = options.pop("callbacks", [])
    if layout is not None:
        options.update(strategy=LAYOUTS[layout].make(), devices=LAYOUTS[layout].ranks)
    else:
        options.update(devices=1)
    return L.Trainer(
        **dict(dict(num_sanity_val_steps=0), **options),
        accelerator="cpu",
        precision="64-true",
        callbacks=[*callbacks, keep],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def _failure(error: BaseException, trainer: Any, keep: _Keep) -> dict[str, Any]:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f"{Path(f.filename).name}:{f.lineno}" for f in frames if f.filename.startswith(_OURS)]
    return dict(
        kind=type(error).__name__,
        message=str(error),
        refuses=bool(frames) and frames[-1].filename.startswith(_OURS) and (frames[-1].line or "").startswith("raise"),
        ours=ours[-4:],
        steps=getattr(trainer, "global_step", 0) or 0,
        batches=keep.batches,
        trace="".join(traceback.format_exception(error))[-5000:],
    )


def _flat(values: list[Any]) -> Any:
    """LBFGS keeps lists of tensors."""
    values = [v for v in values if v is not None]
    return torch.cat([torch.as_tensor(v).double().flatten() for v in values]) if values else torch.zeros(0)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _move(net: nn.Module, by: float) -> None:
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            p.data = p.data.double()
            p.mul_(1 + by * torch.randn(p.shape, generator=g, dtype=torch.float64))


def _generators() -> dict[str, Any]:
    kept = np.random.get_state()
    return dict(torch=torch.get_rng_state(), python=random.getstate(), numpy=(kept[1].tolist(), kept[2]))  # type: ignore[index,union-attr]


# ------------------------------------------------------------------------------------------------------------ state


def state_of(net: nn.Module, module: types.ModuleType) -> dict[str, Any]:
    """The Python state of a program: attributes of all modules, class bodies and globals, by their path."""
    found: dict[str, Any] = {}
    usual = set(vars(L.LightningModule())) | {"_fabric", "_trainer", "prepare_data_per_node"}
    for path, child in net.named_modules():
        if type(child).__module__ != module.__name__ and path:
            if isinstance(child, torchmetrics.Metric):
                found[f"metric {path}"] = plain({k: getattr(child, k) for k in child._defaults})
            continue
        for name, value in vars(child).items():
            if name not in usual:
                found[f"attribute {path}.{name}"] = plain(value)
    for name, value in vars(module).items():
        if isinstance(value, type) and value.__module__ == module.__name__:
            for key, inner in vars(value).items():
                if not key.startswith("_") and not callable(inner) and not _descriptor(inner):
                    found[f"class {name}.{key}"] = plain(inner)
        elif isinstance(value, (list, dict, int, float, Tensor)) and not name.startswith("_"):
            found[f"global {name}"] = plain(value)
    return found


def _descriptor(value: Any) -> bool:
    return hasattr(type(value), "__get__")


def plain(value: Any, depth: int = 0) -> Any:
    """What can be sent and compared of a value."""
    if isinstance(value, _PLAIN):
        return value
    if depth > 8:
        return "..."
    if isinstance(value, Tensor):
        kind = type(value).__name__
        if kind not in ("Tensor", "Parameter"):
            return f"a {kind}"
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, dict):
        return {str(k): plain(v, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple, collections.deque)):
        return [plain(v, depth + 1) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, collections.abc.Iterator):
        return [plain(x, depth + 1) for x in itertools.islice(value, 3)]
    if hasattr(type(value), "__slots__") and type(value).__module__ == "fuzzed_program":
        return {k: plain(getattr(value, k, None), depth + 1) for k in type(value).__slots__}
    return type(value).__name__


def one_device(source: str, seed: int, nudge: float = 0.0) -> Ran:
    """Called on a worker that is alone."""
    with tempfile.TemporaryDirectory() as folder:
        return run(source, None, folder, seed, nudge)
