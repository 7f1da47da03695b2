"""Weights of a checkpoint become the folder of safetensors that `transformers` loads, in one process::

python -m lightning_par.checkpoint.export last.ckpt --output_dir hf/ --config pretrained/
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lightning_par.absent.unread import Unread
from lightning_par.checkpoint.buffers import Scratch
from lightning_par.checkpoint.disk_space import refuse_if_full, whole_or_not_there
from lightning_par.checkpoint.files import make_checkpoint_io
from lightning_par.checkpoint.reading import is_directory, load
from lightning_par.private.storage import trim_memory

AUTO = "auto"


def export(
    checkpoint: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    prefix: str = AUTO,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "50GB",
    weights_only: bool | None = None,
) -> None:
    """Write the weights in ``checkpoint`` to ``output_dir`` as safetensors, with memory for one of its files.

    With a ``config`` the files are those that ``save_pretrained`` of the model writes, and ``from_pretrained`` loads
    them. Without one they hold the weights by the module's names, of those that share memory the first.

    Args:
        checkpoint: a file or a directory that any layout or plain Lightning wrote, local or a URL.
        output_dir: a local folder, made if need be, that holds no weights yet.
        config: a folder with the ``config.json`` of a model of `transformers`, or that file. Its ``architectures``
            names the class. Where the folder holds weights, files are written as of the model that was loaded from it.
        prefix: what the names of the model's weights begin with, as ``"model."``; it is taken off, and weights with
            other names are left out. ``"auto"`` is the one attribute of the module that has weights.
        dtype: of the floating-point weights written; None leaves them as they are.
        max_shard_size: of a file, in bytes or as ``"5GB"``. A larger weight has a file of its own.
        weights_only: as for `torch.load`; hyperparameters of classes of your own need ``False``.

    Raises:
        FileNotFoundError: there is no ``checkpoint``, or no ``config.json``.
        FileExistsError: ``output_dir`` holds weights.
        ImportError: safetensors is not installed, or with a ``config`` transformers.
        ValueError: the checkpoint is cut short, has no weights or none with ``prefix``, or not those of the ``config``.
        pickle.UnpicklingError: it holds other things than ``weights_only`` allows.
        OSError: the disk is full: "No space left", with the sizes. What was written is removed.

    Example::

        export("last.ckpt", "hf", config="pretrained")
        model = AutoModelForCausalLM.from_pretrained("hf")
    """
    folder = os.fspath(output_dir)
    _refuse_weights_in(folder)
    model_class = None if config is None else _ModelClass(os.fspath(config))
    safetensors = _imported("safetensors.torch", "`pip install 'lightning_par[pretrained]'`")
    weights = _without_prefix(_weights_of(os.fspath(checkpoint), weights_only), prefix)
    if dtype is not None:
        weights = _cast(weights, dtype)
    model = None if model_class is None else model_class.model_of(weights)
    needed = sum({_memory(x): x.nbytes for x in weights.values()}.values())
    if model is None:  # a class of transformers may write less
        refuse_if_full(folder, needed, folder)
    handed = [weights]
    del weights  # a file's weights are let go once it is written: nothing here holds on to them
    with whole_or_not_there(folder, needed):
        if model is None:
            _write(handed.pop(), folder, max_shard_size, safetensors.save_file)
        else:
            model.save_pretrained(folder, state_dict=handed.pop(), max_shard_size=max_shard_size)


# --------------------------------------------------------------------------------------------------- what is exported


def _weights_of(path: str, weights_only: bool | None) -> dict[str, Tensor]:
    """By name in the module; values are on the disk until something reads them."""
    if is_directory(path):
        weights = load(path, weights_only).get("state_dict", {})
    else:
        weights = make_checkpoint_io().load_checkpoint(path, "cpu", weights_only).get("state_dict", {})
    if not weights:
        raise ValueError(f"The checkpoint {path} has no weights: there is no 'state_dict' in it, or an empty one.")
    others = [name for name, x in weights.items() if not isinstance(x, Tensor)]
    if others:
        raise ValueError(f"The checkpoint {path} holds what is no tensor, and safetensors can't: {_listed(others)}.")
    return dict(weights)


def _without_prefix(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those whose names begin with ``prefix``, by the rest of their names."""
    attributes = list(dict.fromkeys(name.partition(".")[0] for name in weights))
    candidates = [f"{name}." for name in attributes if any(x.startswith(f"{name}.") for x in weights)]
    if prefix == AUTO:
        if len(attributes) != 1 or not candidates:
            choices = ", ".join(map(repr, [*candidates, ""]))
            raise ValueError(f"Which weights are the model's? Say it by `prefix`: it may be {choices}, which is all.")
        (prefix,) = candidates
    taken = {name[len(prefix) :]: x for name, x in weights.items() if name.startswith(prefix)}
    if not taken:
        raise ValueError(f"No weight's name begins with {prefix!r}; they begin with {', '.join(attributes)}.")
    return taken


class _Cast:
    """The source of a tensor in another dtype: it is read, and cast, when something reads it."""

    def __init__(self, x: Tensor, dtype: torch.dtype, scratch: Scratch) -> None:
        self.x, self.shape, self.dtype, self.scratch = x, x.shape, dtype, scratch

    def copy_into(self, target: Tensor, dim: int = 0, indices: Any = None) -> None:
        x = self.x.read() if isinstance(self.x, Unread) else self.x
        target.copy_(x if indices is None else x.index_select(dim, torch.as_tensor(indices)))


def _cast(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Floating-point ones in ``dtype``; those that share memory share it still."""
    scratch, made = Scratch(), dict[object, object]()
    for name, x in weights.items():
        if x.is_floating_point() and x.dtype != dtype:
            weights[name] = cast = Unread(_Cast(x, dtype, scratch), made.get(_memory(x)))
            made[_memory(x)] = cast.memory
    return weights


def _memory(x: Tensor) -> object:
    """The same for tensors that have the very same entries in memory."""
    if isinstance(x, Unread):
        return x.memory
    return x.data_ptr(), x.shape, x.stride() if x.numel() else id(x)


# --------------------------------------------------------------------------------------------------- how it is written


class _ModelClass:
    """The class of `transformers` that a ``config.json`` names. It decides which of two tied weights is written, and
    which names weights have in a file."""

    def __init__(self, path: str) -> None:
        self.folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
        if not os.path.isfile(os.path.join(self.folder, "config.json")):
            raise FileNotFoundError(f"There is no config.json in {self.folder}.")
        self.transformers = _imported("transformers", "`pip install transformers`, or leave `config` out")
        # no code from the folder is run
        self.config = self.transformers.AutoConfig.from_pretrained(self.folder, trust_remote_code=False)
        (self.name, *more) = self.config.architectures or [None]
        if more or not hasattr(self.transformers, str(self.name)):
            raise ValueError(
                f"'architectures' of {self.folder}/config.json is {self.config.architectures}: it has to name one "
                'class of transformers, as ["LlamaForCausalLM"]. With code of your own, leave `config` out.'
            )

    def model_of(self, weights: dict[str, Tensor]) -> Any:
        """A model whose tensors have the names, shapes and dtypes of ``weights``, and no values."""
        kind: Any = getattr(self.transformers, str(self.name))
        model = self._loaded(kind) if _weights_in(self.folder) else None
        with torch.device("meta"):
            shapes = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in weights.items()}
            model = kind(self.config) if model is None else model
        try:
            model.load_state_dict(shapes, assign=True)
        except RuntimeError as error:
            raise ValueError(
                f"The weights are not those of {self.folder}/config.json. Adapters are not exported: merge them into "
                f"the model and save it. {error}"
            ) from None
        model.tie_weights()
        if model.can_generate() and os.path.isfile(os.path.join(self.folder, "generation_config.json")):
            model.generation_config = self.transformers.GenerationConfig.from_pretrained(self.folder)
        return model

    def _loaded(self, kind: Any) -> Any:
        """A model as loaded from the folder, which is written in another order than one that is made of its config, and
        by the names of the files it came from; None, and a warning, where what the folder holds is not loaded."""
        options: dict[str, Any] = dict(config=self.config, trust_remote_code=False, ignore_mismatched_sizes=True)
        try:
            return kind.from_pretrained(self.folder, device_map="meta", **options)
        except Exception as error:  # there is no `accelerate`, or it is an adapter, or stands for a file elsewhere
            warnings.warn(
                f"What {self.folder} holds can't be loaded: {error}. The order and the names in the files are those of "
                "a model that is made of its config.json.",
                stacklevel=2,
            )
            return None


def _write(weights: dict[str, Tensor], folder: str, max_shard_size: int | str, save_file: Any) -> None:
    """As ``save_pretrained`` does, with no class to say which of the names that share memory is kept."""
    hub = _imported("huggingface_hub", "`pip install 'lightning_par[pretrained]'`")
    first: dict[object, str] = {}
    for name, x in weights.items():
        first.setdefault(_memory(x), name)
    weights = {name: weights[name] for name in first.values()}
    numel = sum(x.numel() for x in weights.values())
    # each weight is a tensor of its own, whatever it was a view of
    alone = {name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in weights.items()}
    split = hub.split_torch_state_dict_into_shards(alone, max_shard_size=max_shard_size)
    for file, names in split.filename_to_tensors.items():
        save_file({name: _alone(weights[name]) for name in names}, os.path.join(folder, file), {"format": "pt"})
        trim_memory()  # the heap would keep the holes
    if split.is_sharded:
        metadata = {"total_parameters": numel, **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        with open(os.path.join(folder, "model.safetensors.index.json"), "w", encoding="utf-8") as written:
            written.write(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _alone(x: Tensor) -> Tensor:
    """Its values, in memory that no other tensor has."""
    if isinstance(x, Unread):
        return x.read()
    return (
        x.contiguous() if x.untyped_storage().nbytes() == x.nbytes else x.clone(memory_format=torch.contiguous_format)
    )


def _refuse_weights_in(folder: str) -> None:
    names = _weights_in(folder)
    if names:
        raise FileExistsError(
            f"{folder} holds weights already, which may be read in place of these: remove {_listed(names)}, or name "
            "another folder."
        )


def _weights_in(folder: str) -> list[str]:
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return [name for name in names if name.endswith((".safetensors", ".bin", ".index.json"))]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _imported(name: str, advice: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} is not installed, and this needs it: {advice}.") from error


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m lightning_par.checkpoint.export", description=__doc__)
    parser.add_argument("checkpoint", help="a file, or a directory that a strategy of lightning_par wrote")
    parser.add_argument("--output_dir", required=True, help="where to write")
    parser.add_argument("--config", help="a folder with the model's config.json: files as save_pretrained writes them")
    parser.add_argument("--prefix", default=AUTO, help='of the names of the model\'s weights, as "model."')
    dtypes = ("float64", "float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, help="of the weights written; as they are if it is not given")
    parser.add_argument("--max_shard_size", default="50GB", help="the largest file, as 5GB")
    parser.add_argument("--no_weights_only", action="store_true", help="allow pickled classes, which may run code")
    given = parser.parse_args(arguments)
    export(
        given.checkpoint,
        given.output_dir,
        config=given.config,
        prefix=given.prefix,
        dtype=given.dtype and getattr(torch, given.dtype),
        max_shard_size=int(given.max_shard_size) if given.max_shard_size.isdecimal() else given.max_shard_size,
        weights_only=False if given.no_weights_only else None,
    )


if __name__ == "__main__":
    main()
