"""Constants of a machine set without one set of published runs, and how far that set is off then:
``python -m tests.planner.left_out``.

For each set of runs, the shares of their peak that products and attention reach are scaled so that the step times of
the other sets on the same machine come out best in the median; printed are the errors of the set that was left out, so
and with the constants as they are.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from lightning_par.planner.machine.machines import Machine
from tests.planner.published import layout_of, measured_time, planner_of, rows

HELD_BACK = Path(__file__).with_name("held_back.json")
PRODUCTS = (0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15)
ATTENTION = (0.7, 0.85, 1.0, 1.2)


def error(row: dict[str, Any], scales: tuple[float, float]) -> float:
    """How far the predicted step time is off, relatively, with the machine's shares scaled."""
    planner = planner_of(row)
    base: Machine = planner.machine
    planner.machine = replace(
        base,
        product_share=base.product_share * scales[0],
        attention_share=(base.attention_share[0] * scales[1], base.attention_share[1] * scales[1]),
    )
    try:
        return planner.evaluate(layout_of(row), row["gpus"], row["global_batch"]).seconds / measured_time(row) - 1
    finally:
        planner.machine = base


def fitted(known: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """The scales by which ``known`` come out best."""
    return min(product(PRODUCTS, ATTENTION), key=lambda scales: median(abs(error(row, scales)) for row in known))


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    by_machine: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in (*rows(), *rows(HELD_BACK)):
        if row["tier_time"] != "C":
            by_machine[row["gpu"]].append(row)
    every: list[float] = []
    for machine, found in by_machine.items():
        sets = sorted({row["set"] for row in found})
        for name in sets:
            known = [row for row in found if row["set"] != name]
            if not known:
                print(f"{machine}: {name} is the only set")
                continue
            scales = fitted(known)
            left = [row for row in found if row["set"] == name]
            off = [abs(error(row, scales)) for row in left]
            own = [abs(error(row, (1.0, 1.0))) for row in left]
            every += off
            print(f"{machine}: without {name} ({len(left)} rows) scales {scales}: median {median(off):.1%}, worst "
                  f"{max(off):.1%}; as they are {median(own):.1%}, {max(own):.1%}", flush=True)  # fmt: skip
    print(f"all that were left out: median {median(every):.1%}, worst {max(every):.1%} of {len(every)}")


if __name__ == "__main__":
    main()
