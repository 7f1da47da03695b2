"""The whole matrix of models, layouts, precisions and what a Trainer is asked for, of which the suite has a part.

A cell is equal to one device, or refused with a message that is known here. It takes about an hour::

    python -m pytest -n 2 --dist load -q -m slow tests/law/test_equality_matrix.py

`python -m tests.law.test_equality_matrix` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import equality
from tests.helpers.equality import Result
from tests.helpers.models import MODELS
from tests.helpers.pool import Pool, RanksFailedError
from tests.helpers.slow import slow
from tests.law.test_equality import SEEDS
from tests.law.test_equality import one_device as one_device  # a fixture

TWO: dict[str, dict[str, Any]] = {
    "tensor": dict(tensor_parallel_size=2),
    "pipeline": dict(pipeline_parallel_size=2),
    "sequence": dict(sequence_parallel_size=2),
    "placement": dict(placement="balanced", pipeline_parallel_size=2),
    "data": dict(data_parallel_size=2),
    "fsdp": dict(data_parallel_size=2, data_parallel="fsdp"),
}
FOUR: dict[str, dict[str, Any]] = {
    "data x tensor": dict(data_parallel_size=2, tensor_parallel_size=2),
    "data x pipeline": dict(data_parallel_size=2, pipeline_parallel_size=2, microbatches=2),
    "data x sequence": dict(data_parallel_size=2, sequence_parallel_size=2),
    "pipeline x tensor": dict(pipeline_parallel_size=2, tensor_parallel_size=2, microbatches=2),
    "pipeline x sequence": dict(pipeline_parallel_size=2, sequence_parallel_size=2, microbatches=2),
    "sequence x tensor": dict(sequence_parallel_size=2, tensor_parallel_size=2),
    "fsdp x tensor": dict(data_parallel_size=2, tensor_parallel_size=2, data_parallel="fsdp"),
    "fsdp x pipeline": dict(data_parallel_size=2, pipeline_parallel_size=2, microbatches=2, data_parallel="fsdp"),
}
SOME = """
    gpt gpt_tied gpt_masked gpt_swiglu gqa_sdpa gpt_5_heads gpt_lora gpt_groups loss_ignore loss_accuracy mlp mlp_odd
    mlp_functional encoder_decoder lstm unet vit hf_bert hf_llama hf_t5
""".split()
OPTIONS: dict[str, dict[str, Any]] = {
    "clipped by value": dict(clip=0.001, clip_algorithm="value"),
    "not clipped": dict(clip=None),
    "accumulated": dict(accumulate=3),
    "32-true": dict(precision="32-true"),
    "bf16-mixed": dict(precision="bf16-mixed"),
    "bf16-true": dict(precision="bf16-true"),
    "16-mixed, scaled": dict(precision="16-mixed"),
}

_ONE_MODULE = "has only 1 modules with parameters to place"
REFUSED = {
    (name, case): _ONE_MODULE
    for name in (*TWO, *FOUR)
    if "pipeline" in name
    for case in ("mlp_one_layer", "mlp_functional")
}
DRAWS = {"gpt_residual_dropout", "vae"}  # other draws than one device's, on shards and stages


def _fits(case: str, layout: str) -> bool:
    """Whether one device has the same numbers: a data axis has a reference only where samples don't mix."""
    replicas = "data_parallel_size" in (TWO | FOUR)[layout]
    return case not in DRAWS and not (replicas and (MODELS[case].couples or case == "loss_ragged"))


CELLS = [
    (case, layout)
    for layouts, cases in ((TWO, list(MODELS)), (FOUR, SOME))
    for layout in layouts
    for case in cases
    if _fits(case, layout)
]


def _results(pool: Pool, case: str, name: str, folder: Path, **options: Any) -> tuple[int, list[Result]]:
    layout = (TWO | FOUR)[name]
    copies = layout.get("data_parallel_size", 1)
    ranks = prod(size for key, size in layout.items() if key.endswith("_size"))
    found = pool.run(
        ranks, equality.run, case, layout=dict(layout, hybrid=True), folder=str(folder), data_size=copies, **options
    )
    return copies, found


@slow()
@pytest.mark.parametrize(("case", "layout"), CELLS)
def test_a_model_under_a_layout(
    case: str, layout: str, pool: Pool, one_device: Callable[..., Result], tmp_path: Path
) -> None:
    if (layout, case) in REFUSED:
        with pytest.raises(RanksFailedError, match=REFUSED[layout, case]):
            _results(pool, case, layout, tmp_path)
        return
    copies, results = _results(pool, case, layout, tmp_path)
    reference = one_device(case, data_size=copies)
    lines = [f"rank {i}: {line}" for i, one in enumerate(results) for line in equality.compare(reference, one, copies)]
    assert not lines, "\n" + "\n".join(lines[:40]) + f"\n{len(lines)} in all"


@slow()
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("layout", [*TWO, *FOUR])
def test_what_a_trainer_is_asked_for(
    layout: str, option: str, pool: Pool, one_device: Callable[..., Result], tmp_path: Path
) -> None:
    asked = OPTIONS[option]
    if "precision" in asked:
        _check_low(layout, asked, pool, one_device, tmp_path)
        return
    copies, results = _results(pool, "gpt_tied", layout, tmp_path, **asked)
    single = one_device("gpt_tied", data_size=copies, **asked)
    lines = [line for one in results for line in equality.compare(single, one, copies)]
    assert not lines, "\n" + "\n".join(lines[:40])


def _check_low(layout: str, asked: dict[str, Any], pool: Pool, one_device: Callable[..., Result], folder: Path) -> None:
    """Rank by rank, over several seeds: in one alone a single loss of one device may be exact by luck."""
    runs: list[list[tuple[Result, Result, Result]]] = []
    copies = 1
    for seed in SEEDS:
        low = dict(eps=0.01, seed=seed)
        (own := folder / str(seed)).mkdir()
        copies, results = _results(pool, "gpt_tied", layout, own, **asked, **low)
        single = one_device("gpt_tied", data_size=copies, **asked, **low)
        exact = one_device("gpt_tied", data_size=copies, **low)
        runs.append([(exact, single, result) for result in results])
    lines = [line for of_rank in zip(*runs, strict=True) for line in equality.compare_low_of(of_rank, copies)]
    assert not lines, "\n" + "\n".join(lines[:40])


# -------------------------------------------------------------------------------------------------------- the page


def page_table() -> str:
    """The table in `docs/law.md`, of the same data that the tests are made from."""
    lines = ["| layout | ranks | models | equal | refused |", "|---|---|---|---|---|"]
    for name, layout in (TWO | FOUR).items():
        cases = [case for case, where in CELLS if where == name]
        refused = sum((name, case) in REFUSED for case in cases)
        ranks = prod(size for key, size in layout.items() if key.endswith("_size"))
        lines.append(f"| {name} | {ranks} | {len(cases)} | {len(cases) - refused} | {refused} |")
    return "\n".join(lines)


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "law.md").read_text()
    assert page_table() in page
    assert f"{len(CELLS)} cells of models and layouts" in page
    assert f"{len(OPTIONS) * len(TWO | FOUR)} of options and layouts" in page


if __name__ == "__main__":
    print(page_table())
