"""``python -m tests.gpu_rules [--device cuda|cpu] [--queue communicator|rank] [--delay SECONDS] [LAYOUT ...]``

Trains a small GPT under each layout, and prints how far its weights are from one device's, what was broken, what a step
issued, and where the host waited in one.
"""

from __future__ import annotations

import argparse
import time

from tests.gpu_rules.layouts import LAYOUTS, ranks
from tests.gpu_rules.ranks import StrictPool
from tests.gpu_rules.report import Rules
from tests.gpu_rules.training import Trained, differences, train
from tests.gpu_rules.waits import blocking
from tests.helpers.pool import RanksFailedError


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_rules", description=__doc__)
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=f"of {', '.join(LAYOUTS)}; all by default")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--queue", choices=("communicator", "rank"), default="communicator")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that each entry of a queue takes")
    parser.add_argument("--case", default="gpt_tied", help="of tests.helpers.models")
    parser.add_argument("--waits", action="store_true", help="each host wait of a step with its line")
    options = parser.parse_args()
    pool = StrictPool(options.device, Rules(queue=options.queue, delay=options.delay))
    try:
        (one,) = pool.run(1, train, None, options.case)
        for layout in options.layouts or LAYOUTS:
            _try(pool, layout, options.case, one, options.waits)
    finally:
        pool.close()


def _try(pool: StrictPool, layout: str, case: str, one: Trained, each_wait: bool) -> None:
    began = time.monotonic()
    try:
        trained = pool.run(ranks(layout), train, layout, case, grace=15.0)
    except RanksFailedError as error:
        print(f"{layout:16} FAILED in {time.monotonic() - began:.0f} s\n{_indented(_last_lines(error))}", flush=True)
        return
    weights = differences(one, trained[0])
    print(
        f"{layout:16} weights {weights:.0e}{' DIFFER' if weights > 1e-9 else ''}, a step: "
        f"{max(each.entries for each in trained)} entries, host waits "
        f"{[blocking(each.waits).total() for each in trained]}; {max(each.groups for each in trained)} groups, "
        f"{sum(sum(report.violations.values()) for report in pool.reports)} violations, "
        f"{pool.opposite().total()} opposite orders, {time.monotonic() - began:.0f} s",
        flush=True,
    )
    print(_indented("\n".join(pool.broken())), end="", flush=True)
    if each_wait:
        lines = {(key, rank): n for rank, each in enumerate(trained) for key, n in blocking(each.waits).items()}
        told = "\n".join(f"rank {rank}: {n} x {' '.join(key)}" for (key, rank), n in sorted(lines.items()))
        print(_indented(told), end="", flush=True)


def _last_lines(error: RanksFailedError) -> str:
    return "\n".join(f"rank {rank}: {text.strip()[-1500:]}" for rank, text in sorted(error.reports.items()))


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


if __name__ == "__main__":
    main()
