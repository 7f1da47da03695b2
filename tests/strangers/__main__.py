"""What comes of strangers, a line each: `python -m tests.strangers timm peft.lora --strategy tensor_parallel`."""

from __future__ import annotations

import argparse
import time
from importlib import import_module

from tests.helpers.pool import Pool
from tests.strangers.outcome import References, run
from tests.strangers.stranger import STRATEGIES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", help="a file here, or file.stranger")
    parser.add_argument("--strategy", nargs="*", default=STRATEGIES, choices=STRATEGIES)
    parser.add_argument("--whole", action="store_true", help="print all of what a run raised")
    asked = parser.parse_args()
    for what in asked.what:
        package, _, one = what.partition(".")
        pool = Pool()
        references = References(pool)
        for name, stranger in import_module(f"tests.strangers.{package}").STRANGERS.items():
            if one and name != one:
                continue
            for strategy in stranger.strategies():
                if strategy in asked.strategy:
                    start = time.monotonic()
                    try:
                        got = run(package, name, strategy, references)
                    except Exception as error:
                        print(f"| {package}.{name} | {strategy} | BROKEN HERE | {str(error)[-3000:]}", flush=True)
                        break
                    text = got.text if asked.whole else got.text[-1500:]
                    cells = f"{got.state} | {got.share:.0%} | {got.microbatches or ''} {'; '.join(got.uncut)[:300]}"
                    seconds = time.monotonic() - start
                    print(f"| {package}.{name} | {strategy} | {cells} | {seconds:.0f} s | {text}", flush=True)
        pool.close()


if __name__ == "__main__":
    main()
