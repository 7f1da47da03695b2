"""The command line: ``python -m tests.fuzz --seed 0 --minutes 60 --strategies all``."""

from __future__ import annotations

import random
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.grammar import generate
from tests.fuzz.judging import Judge, Outcome
from tests.fuzz.layouts import FAMILIES, LAYOUTS, names_of
from tests.fuzz.program import Program
from tests.fuzz.shrinking import shrink

GOOD = ("equal", "refused", "drawn", "chaotic", "invalid")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 where something was wrong, hung or crashed."""
    asked = _parser().parse_args(arguments)
    if asked.show:
        print(generate(asked.seed, asked.without).source())
        return 0
    judge = Judge(timeout=asked.timeout)
    try:
        if asked.script:
            return _script(judge, asked)
        return Session(judge, asked).run()
    finally:
        judge.close()


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the next one has the next seed")
    parser.add_argument("--count", type=int, help="programs")
    parser.add_argument("--minutes", type=float, help="for how long")
    parser.add_argument("--strategies", nargs="+", default=["all"], help=f"families or layouts: {', '.join(FAMILIES)}")
    parser.add_argument(
        "--layouts-each", type=int, default=2, help="layouts a program is tried under, drawn by its seed"
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for a run, after which it is a hang")
    parser.add_argument("--folder", type=Path, default=Path("fuzz_found"), help="where findings are written")
    parser.add_argument("--without", nargs="+", default=[], help="pieces to leave out, as those of known findings")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--show", action="store_true", help="print the program of the seed")
    parser.add_argument("--script", type=Path, help="a program as a file, in place of seeds")
    parser.add_argument("--details", action="store_true", help="print traces, too")
    return parser


def _script(judge: Judge, asked: Namespace) -> int:
    code = 0
    for layout in names_of(asked.strategies):
        outcome = judge.judge(asked.script.read_text(), layout)
        print(f"{layout}: {outcome.kind}")
        for line in outcome.lines[:12]:
            print(f"    {line}")
        if asked.details:
            print(outcome.details)
        code |= outcome.kind not in GOOD
    return code


def layouts_of(program: Program, allowed: list[str], count: int) -> list[str]:
    """The layouts that a program is tried under, of different families where there are."""
    draw = random.Random(program.seed + 1)
    shape = "BC" if program.stem.piece.name in ("vectors", "convolution") else "BTC"
    left = [name for name in allowed if shape in LAYOUTS[name].shapes]
    found: list[str] = []
    while left and len(found) < count:
        families = sorted({LAYOUTS[name].family for name in left})
        family = draw.choices(families, [_SHARES.get(one, 1.0) for one in families])[0]
        names = [name for name in left if LAYOUTS[name].family == family]
        name = draw.choices(names, [LAYOUTS[one].weight for one in names])[0]
        found.append(name)
        left = [one for one in left if LAYOUTS[one].family != family]
    return found


_SHARES = {"pipeline": 3.0, "tensor": 1.5, "product": 0.4, "placement": 1.0, "sequence": 1.0, "data": 0.7}


class Session:
    """Many programs, and what came of them."""

    def __init__(self, judge: Judge, asked: Namespace) -> None:
        self.judge, self.asked = judge, asked
        self.allowed = names_of(asked.strategies)
        self.counts: Counter[tuple[str, str]] = Counter()
        self.messages: dict[tuple[str, str], list[str]] = {}
        self.known: set[tuple[str, str, tuple[str, ...]]] = set()
        self.bad = 0
        self.chaotic = 0

    def run(self) -> int:
        end = time.monotonic() + 60 * self.asked.minutes if self.asked.minutes else float("inf")
        seed = self.asked.seed
        while time.monotonic() < end and (self.asked.count is None or seed < self.asked.seed + self.asked.count):
            self.try_program(generate(seed, self.asked.without))
            seed += 1
            if (seed - self.asked.seed) % 25 == 0:
                self.report(seed)
        self.report(seed)
        return int(self.bad > 0)

    def try_program(self, program: Program) -> None:
        source = program.source()
        reference = self.judge.reference(source)
        if isinstance(reference, Outcome):
            self.note(program, "one device", reference)
            return
        for layout in layouts_of(program, self.allowed, self.asked.layouts_each):
            start = time.monotonic()
            outcome = self.judge.judge(source, layout, program.draws, reference)
            self.note(program, layout, outcome)
            spent = time.monotonic() - start
            print(f"seed {program.seed} {layout}: {outcome.kind} ({spent:.1f} s) {outcome.lines[:1] or ''}", flush=True)

    def note(self, program: Program, layout: str, outcome: Outcome) -> None:
        """Count it, and write it down once of each kind."""
        family = LAYOUTS[layout].family if layout in LAYOUTS else layout
        self.counts[family, outcome.kind] += 1
        if outcome.kind in ("equal", "drawn"):
            return
        if outcome.kind != "wrong":
            seen = self.messages.setdefault((outcome.kind, outcome.key), [])
            seen.append(f"{program.seed} {layout}")
            if len(seen) > 1:
                return
        self.bad += outcome.kind not in GOOD
        small = program
        if not self.asked.no_shrink and layout in LAYOUTS and outcome.kind not in ("chaotic", "refused"):
            small, outcome = self.shrunk(program, layout, outcome)
        pieces = (family, outcome.kind, tuple(sorted(set(small.names))))
        if outcome.kind == "wrong" and pieces in self.known:
            return
        self.known.add(pieces)
        self.write(program, small, layout, outcome)

    def shrunk(self, program: Program, layout: str, outcome: Outcome) -> tuple[Program, Outcome]:
        """The smallest program with the finding, and what it is there."""
        last = [outcome]

        def still(smaller: Program) -> bool:
            again = self.judge.judge(smaller.source(), layout, smaller.draws)
            alike = again.kind == outcome.kind and (outcome.kind == "wrong" or again.key == outcome.key)
            if alike:
                last.append(again)
            return alike

        small = shrink(program, still, 120.0)
        return small, last[-1]

    def write(self, program: Program, small: Program, layout: str, outcome: Outcome) -> None:
        folder = self.asked.folder / outcome.kind
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{program.seed}-{layout.replace(' ', '_')}.py"
        lines = "\n".join(f"#   {line}" for text in outcome.lines[:12] for line in text.splitlines())
        path.write_text(f"# seed {program.seed}, layout {layout}: {outcome.kind}\n{lines}\n{small.source()}")
        (folder / f"{path.stem}.txt").write_text(outcome.details)
        print(f"==> {path}: {', '.join(small.names)}", flush=True)

    def report(self, seed: int) -> None:
        """The counts so far."""
        kinds = sorted({kind for _, kind in self.counts})
        print(f"\n--- up to seed {seed}\n{'':12}" + "".join(f"{kind:>10}" for kind in kinds))
        for family in sorted({family for family, _ in self.counts}):
            print(f"{family:12}" + "".join(f"{self.counts[family, kind]:>10}" for kind in kinds))
        for (kind, key), seen in sorted(self.messages.items(), key=lambda item: (item[0][0], -len(item[1]))):
            if kind != "chaotic":
                print(f"{kind} x{len(seen)} [{seen[0]}]: {key}")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
