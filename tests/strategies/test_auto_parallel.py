"""``strategy="auto_parallel"``: the layout that a run chooses trains as the same one named by hand."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, IterableDataset

from lightning_par import AutoParallelStrategy, HybridParallelStrategy
from lightning_par.checkpoint.files import make_checkpoint_io, save
from lightning_par.checkpoint.outline import OWN
from lightning_par.planner.at_launch import Choice, preset_of
from lightning_par.planner.machine.machines import machine_yaml
from lightning_par.strategies.presets.auto import KEPT
from tests.helpers.configured import configured
from tests.helpers.models import MODELS
from tests.helpers.pool import Pool
from tests.helpers.slow import long, slow
from tests.planner.test_machine_at_hand import CPUS

STEPS = 3


@pytest.fixture
def machine(tmp_path: Path) -> str:
    file = tmp_path / "cpus.yaml"
    file.write_text(machine_yaml(CPUS))
    return str(file)


class Found(dict[str, Any]):
    """Of one run on one rank."""


class _Stream(IterableDataset[Any]):
    """Samples that come once: an iterator that can't begin again."""

    def __init__(self, data: Any) -> None:
        self.left = iter([data[i] for i in range(len(data))])

    def __iter__(self) -> Iterator[Any]:
        return self.left


def _loader(case: str, kind: str) -> DataLoader[Any]:
    made = MODELS[case]
    data: Any = made.data(0)
    if kind == "stream":
        return DataLoader(_Stream(data), batch_size=made.batch_size)
    return DataLoader(data, batch_size=made.batch_size, shuffle=kind == "shuffled")


def fit(
    case: str, strategy: Any, devices: int, folder: str, steps: int = STEPS, accumulate: int = 1,
    resumed: str | None = None, kind: str = "plain",
) -> Found:  # fmt: skip
    """Train in float64; weights, the choice, and the path of a checkpoint."""
    torch.manual_seed(0)
    made = MODELS[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu", devices=devices, strategy=strategy, max_steps=steps, logger=False, precision="64-true",
            accumulate_grad_batches=accumulate, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        module = configured(made.module) if kind == "configured" else made.module()
        trainer.fit(module, _loader(case, kind), ckpt_path=resumed)
        path = f"{folder}/{type(strategy).__name__}-{steps}.ckpt"
        trainer.save_checkpoint(path)
    decided = getattr(trainer.strategy, "_decided", None)
    return Found(
        weights={name: x.detach().clone() for name, x in module.state_dict().items()},
        choice=None if decided is None else dict(decided.arguments),
        title=None if decided is None else decided.title,
        accumulate=None if decided is None else decided.accumulated,
        left=trainer.accumulate_grad_batches,
        sizes=trainer.strategy.layout.sizes,
        step=trainer.global_step,
        path=path,
    )


def chosen(case: str, machine: str, devices: int, folder: str, **more: Any) -> Found:
    options = {name: more.pop(name) for name in ("global_batch", "draws") if name in more}
    return fit(case, AutoParallelStrategy(machine=machine, **options), devices, folder, **more)


def by_hand(case: str, arguments: dict[str, Any], devices: int, folder: str, **more: Any) -> Found:
    return fit(case, HybridParallelStrategy(**arguments), devices, folder, **more)


def gap(one: Found, other: Found) -> float:
    return max(float((x - other["weights"][name]).abs().max()) for name, x in one["weights"].items())


def _same_as_by_hand(pool: Pool, machine: str, folder: Path, case: str, devices: int, more: dict[str, Any]) -> Found:
    found: Found = pool.run(devices, chosen, case, machine, devices, str(folder), **more)[0]
    asked = {"accumulate": found["accumulate"], **{k: x for k, x in more.items() if k == "kind"}}
    other = pool.run(devices, by_hand, case, found["choice"], devices, str(folder), **asked)[0]
    assert gap(found, other) <= 1e-12 and found["sizes"] == other["sizes"]
    assert found["left"] == 1  # the user's own again
    return found


@long()
@slow(but=["mlp_deep-2-one"])
@pytest.mark.parametrize(
    ("case", "devices", "more"),
    [
        ("gpt", 2, {}), ("gpt", 2, {"global_batch": 8}), ("gpt", 4, {}), ("mlp_deep", 2, {}),
        ("mlp_deep", 4, {"global_batch": 16}), ("hf_bert", 2, {}), ("unet", 2, {}), ("lstm", 2, {}),
        ("gpt", 2, {"kind": "configured"}), ("gpt", 2, {"kind": "stream"}), ("gpt", 2, {"kind": "shuffled"}),
        ("gpt", 2, {"kind": "shuffled", "global_batch": 8}),
    ],
    ids=["gpt-2-one", "gpt-2-shared", "gpt-4-one", "mlp_deep-2-one", "mlp_deep-4-shared", "hf_bert-2-one",
         "unet-2-one", "lstm-2-one", "configured", "stream", "shuffled", "shuffled-shared"],
)  # fmt: skip
def test_the_same_as_by_hand(
    pool: Pool, machine: str, tmp_path: Path, case: str, devices: int, more: dict[str, Any]
) -> None:
    found = _same_as_by_hand(pool, machine, tmp_path, case, devices, more)
    if "global_batch" not in more:
        assert found["sizes"][0] == 1  # a step is on one device's batches


def test_a_step_is_on_as_many_samples_whatever_is_chosen(pool: Pool, machine: str, tmp_path: Path) -> None:
    samples = 2 * MODELS["mlp_deep"].batch_size
    found = _same_as_by_hand(pool, machine, tmp_path, "mlp_deep", 2, {"global_batch": samples})
    assert found["sizes"][0] * found["accumulate"] == 2


def test_the_choice_is_kept_and_taken_again(pool: Pool, machine: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    first = pool.run(2, chosen, "mlp_deep", machine, 2, folder)[0]
    kept = make_checkpoint_io().load_checkpoint(first["path"])
    saved = kept[OWN][KEPT]
    assert saved["arguments"] == first["choice"] and saved["devices"] == 2
    other = "pipeline" if first["sizes"][1] == 1 else "tensor"  # that a plan would not choose
    saved["arguments"] = {f"{other}_parallel_size": 2}
    save(kept, f"{folder}/other.ckpt")
    again = pool.run(2, chosen, "mlp_deep", machine, 2, folder, steps=STEPS + 1, resumed=f"{folder}/other.ckpt")[0]
    assert again["choice"] == saved["arguments"] and "goes on" in again["title"] and again["step"] == STEPS + 1


@slow()
@pytest.mark.parametrize("kind", ["plain", "configured", "shuffled"])
def test_a_run_goes_on_as_the_same_layout_by_hand(pool: Pool, machine: str, tmp_path: Path, kind: str) -> None:
    folder = str(tmp_path)
    half = pool.run(2, chosen, "gpt", machine, 2, folder, steps=2, kind=kind)[0]
    more = dict(steps=4, resumed=half["path"], kind=kind)
    for devices in (2, 4):
        found = pool.run(devices, chosen, "gpt", machine, devices, folder, **more)[0]
        assert ("goes on" in found["title"]) == (devices == 2)
        other = pool.run(devices, by_hand, "gpt", found["choice"], devices, folder, **more)[0]
        assert gap(found, other) <= 1e-12 and found["step"] == other["step"] == 4


def test_one_device_runs_as_on_one(pool: Pool, machine: str, tmp_path: Path) -> None:
    found = pool.run(1, chosen, "mlp_deep", machine, 1, str(tmp_path))[0]
    other = pool.run(1, by_hand, "mlp_deep", {}, 1, str(tmp_path))[0]
    assert found["choice"] is None and gap(found, other) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"machine": "H1000"}, "There is no machine 'H1000'"),
        ({"machine": 3}, "machine must be a name"),
        ({"global_batch": 0}, "global_batch must be a positive int"),
        ({"global_batch": True}, "global_batch must be a positive int"),
    ],
)
def test_what_is_wrong_is_told_at_once(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        AutoParallelStrategy(**arguments)


@slow()
def test_one_device_accumulates(pool: Pool, machine: str, tmp_path: Path) -> None:
    found = pool.run(1, chosen, "mlp_deep", machine, 1, str(tmp_path), global_batch=8)[0]
    other = pool.run(1, by_hand, "mlp_deep", {}, 1, str(tmp_path), accumulate=2)[0]
    assert gap(found, other) == 0 and found["left"] == 1


def test_a_global_batch_that_cannot_be_had_ends_all_ranks(pool: Pool, machine: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)global_batch=7 is no multiple of the 4 samples.*global_batch=7 is no"):
        pool.run(2, chosen, "mlp_deep", machine, 2, str(tmp_path), global_batch=7)


def test_a_choice_is_for_as_many_devices() -> None:
    choice = Choice({"tensor_parallel_size": 4}, 1, 4)
    assert Choice.of_saved(choice.saved(), 4, None) is not None
    assert Choice.of_saved(choice.saved(), 2, None) is None and Choice.of_saved(choice.saved(), 4, 8) is None


@pytest.mark.parametrize(
    ("name", "memory", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", 85e9, "H100-80GB-SXM"), ("NVIDIA H200", 150e9, "H200-141GB-SXM"),
        ("NVIDIA A100-SXM4-40GB", 42e9, "A100-40GB-SXM"), ("NVIDIA A100-SXM4-80GB", 85e9, "A100-80GB-SXM"),
        ("NVIDIA H100 PCIe", 85e9, None), ("Tesla T4", 16e9, None),
    ],
)  # fmt: skip
def test_a_gpu_that_is_known_needs_no_probe(name: str, memory: float, preset: str | None) -> None:
    found = preset_of(name, memory)
    assert (None if found is None else found.name) == preset
