"""``python -m tests.gpu_rules [--device cuda|cpu|shared] [--queue communicator|rank] [--delay SECONDS] [LAYOUT ...]``

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

_DEVICES = "fakes, none, or one real device that all ranks share"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_rules", description=__doc__)
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=f"of {', '.join(LAYOUTS)}; all by default")
    parser.add_argument("--device", choices=("cuda", "cpu", "shared"), default="cuda", help=_DEVICES)
    parser.add_argument("--queue", choices=("communicator", "rank"), default="communicator")
    parser.add_argument("--precision", default="64-true", help="of the Trainer; others than float64 are only told")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that each entry of a queue takes")
    parser.add_argument("--case", default="gpt_tied", help="of tests.helpers.models")
    parser.add_argument("--waits", action="store_true", help="each host wait of a step with its line")
    parser.add_argument("--sync", action="store_true", help="each block first waits for the device")
    options = parser.parse_args()
    pool = StrictPool(options.device, Rules(queue=options.queue, delay=options.delay))
    try:
        (one,) = pool.run(1, train, None, options.case, precision=options.precision)
        for layout in options.layouts or LAYOUTS:
            _try(pool, layout, one, options)
    finally:
        pool.close()


def _try(pool: StrictPool, layout: str, one: Trained, options: argparse.Namespace) -> None:
    began = time.monotonic()
    try:
        trained = pool.run(
            ranks(layout), train, layout, options.case, options.sync, precision=options.precision, grace=15.0
        )
    except RanksFailedError as error:
        print(f"{layout:16} FAILED in {time.monotonic() - began:.0f} s\n{_indented(_last_lines(error))}", flush=True)
        return
    weights = differences(one, trained[0])
    differ = options.precision == "64-true" and weights > 1e-9
    print(
        f"{layout:16} weights {weights:.0e}{' DIFFER' if differ else ''}, a step: "
        f"{max(each.entries for each in trained)} entries, host waits "
        f"{[blocking(each.waits).total() for each in trained]}; {max(each.groups for each in trained)} groups, "
        f"{sum(sum(report.violations.values()) for report in pool.reports)} violations, "
        f"{pool.opposite().total()} opposite orders, {time.monotonic() - began:.0f} s",
        flush=True,
    )
    print(_indented("\n".join(pool.broken())), end="", flush=True)
    if options.waits:
        lines = {(key, rank): n for rank, each in enumerate(trained) for key, n in blocking(each.waits).items()}
        told = "\n".join(f"rank {rank}: {n} x {' '.join(key)}" for (key, rank), n in sorted(lines.items()))
        print(_indented(told), end="", flush=True)


def _last_lines(error: RanksFailedError) -> str:
    tails = ((rank, text.strip().splitlines()[-8:]) for rank, text in sorted(error.reports.items()))
    return "\n".join(f"rank {rank}: {line[:600]}" for rank, lines in tails for line in lines)


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


if __name__ == "__main__":
    main()
