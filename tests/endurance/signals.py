"""Sends signals to jobs at random moments, and resumes them: `python -m tests.endurance.signals --help`.

For each strategy and way of sending, a job is told to end at random moments between its set-up and its end. Each time
all of its ranks must end by themselves within the grace period, by one code, with one checkpoint of one step, from
which the job resumes to the weights of one that was never told: to 1e-9, in float64. Where nothing was trained yet,
there is no checkpoint to be had. A line tells of each moment, a table of all.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed import TCPStore

from tests.endurance.signal_job import STRATEGIES, become, fit

GRACE = 30.0  # seconds
SENDINGS = {
    # the signal, whether one rank alone gets it, and the code by which ranks end
    "SIGTERM to all": (signal.SIGTERM, False, 128 + signal.SIGTERM),
    "SIGTERM to one": (signal.SIGTERM, True, 128 + signal.SIGTERM),
    "SIGUSR1": (signal.SIGUSR1, False, 0),
    "SIGINT": (signal.SIGINT, False, 1),
}


@dataclass
class Job:
    """A job that runs.

    Args:
        strategy: a key of `STRATEGIES`.
        folder: for its files.
        slurm: whether it runs as under SLURM.
        resume: for ``fit(ckpt_path=...)``.
        pause: seconds of each step, at least.
    """

    strategy: str
    folder: Path
    slurm: bool = False
    resume: str | None = None
    pause: float = 0.02

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.world = STRATEGIES[self.strategy][0]
        scontrol = self.folder / "scontrol"
        scontrol.write_text(
            f'#!/bin/sh\n[ "$1" = requeue ] && echo "$2" >> "{self.folder}/requeued"\necho "KillWait = 30 sec"\n'
        )
        scontrol.chmod(0o755)
        told, tell = os.pipe()
        self.pids: list[int] = []
        for rank in range(self.world):
            pid = os.fork()
            if pid == 0:
                become(self.folder / f"log-{rank}")
                os.environ["MASTER_PORT"] = str(int.from_bytes(os.read(told, 4), "big"))
                os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
                fit(self.strategy, self.folder, rank, self.resume, self.slurm, self.pause)
                sys.exit(0)
            self.pids.append(pid)
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # its thread is in no fork
        os.write(tell, self.store.port.to_bytes(4, "big") * self.world)
        os.close(tell)
        os.close(told)

    def wait_for(self, name: str, seconds: float = 120.0) -> None:
        """Until each rank has made a file."""
        end = time.monotonic() + seconds
        while not all((self.folder / f"{name}-{rank}").exists() for rank in range(self.world)):
            assert time.monotonic() < end, (self.folder, "did not begin")
            time.sleep(0.002)

    def end(self, seconds: float) -> list[int | None]:
        """The ranks' exit codes, None of one that had to be killed after so many seconds."""
        codes: dict[int, int | None] = {}
        end = time.monotonic() + seconds
        while len(codes) < len(self.pids):
            for pid in self.pids:
                if pid not in codes and (got := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[pid] = os.waitstatus_to_exitcode(got[1])
            if time.monotonic() > end:
                for pid in self.pids:
                    if pid not in codes:
                        os.killpg(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)
                        codes[pid] = None
            time.sleep(0.005)
        del self.store
        return [codes[pid] for pid in self.pids]


class FailedMoment(Exception):  # noqa: N818 (not of the program's)
    """What was wrong after a signal."""


class Campaign:
    """Args:
    folder: for the jobs' files.
    keep: whether those of failed moments stay.
    """

    def __init__(self, folder: Path, keep: bool = False) -> None:
        self.folder, self.keep = folder, keep
        self._whole: dict[str, tuple[float, dict[str, torch.Tensor]]] = {}
        gc.freeze()  # else each fork copies all of it, as it collects

    def whole(self, strategy: str) -> tuple[float, dict[str, torch.Tensor]]:
        """How many seconds a job takes that is left alone, from its set-up to its last weights, and these."""
        if strategy not in self._whole:
            job = Job(strategy, self.folder / "whole" / strategy)
            job.start()
            job.wait_for("began")
            since = time.monotonic()
            codes = job.end(300.0)
            assert codes == [0] * job.world, (codes, (job.folder / "log-0").read_text()[-3000:])
            final = job.folder / "final.pt"
            ended = time.monotonic() - (time.time() - final.stat().st_mtime)
            self._whole[strategy] = ended - since, torch.load(final)
        return self._whole[strategy]

    def moment(self, strategy: str, sending: str, draw: random.Random) -> str:
        """Send once, and resume; where the job stood.

        Raises:
            FailedMoment: the job did not end well, or did not resume to the same weights.
        """
        lasts, weights = self.whole(strategy)
        signum, one, _ = SENDINGS[sending]
        folder = self.folder / f"{strategy} {sending} {draw.randrange(10**9)}"
        job = Job(strategy, folder, slurm=signum == signal.SIGUSR1)
        job.start()
        job.wait_for("began")
        time.sleep(draw.uniform(0.0, lasts))
        targets = [draw.choice(job.pids)] if one else job.pids
        for pid in targets:
            os.kill(pid, signum)
        since = time.monotonic()
        codes = job.end(GRACE)
        where = f"after {time.monotonic() - since:.1f} s"
        if None in codes:
            raise FailedMoment(f"hung: codes {codes}; see {folder}")
        told = [path.read_text() for path in sorted(folder.glob("told-*"))]
        where = f"{told[0] if told else 'at its end'}, {where}"
        self._check(job, codes, sending, where)
        if (folder / "trained").exists() and not (folder / "final.pt").exists():
            self._resume(job, weights, where)
        shutil.rmtree(folder)
        return where

    def _check(self, job: Job, codes: list[int | None], sending: str, where: str) -> None:
        folder = job.folder
        signum, _, code = SENDINGS[sending]
        finished, trained = (folder / "final.pt").exists(), (folder / "trained").exists()
        # Who has ended its run, and is about to end, ends as Python does.
        if not {*codes} <= ({0, code, -signum} if finished else {code}):
            raise FailedMoment(f"codes {codes} instead of {code}, {where}; see {folder}")
        found = saved(job)
        if len(found) != (trained and not finished) and not (finished and len(found) <= 1):
            raise FailedMoment(f"checkpoints {found}, {where}; see {folder}")
        asked = (folder / "requeued").read_text().split() if (folder / "requeued").exists() else []
        if job.slurm and asked != ["4711"] and not finished:
            raise FailedMoment(f"requeued {asked}, {where}; see {folder}")

    def _resume(self, job: Job, weights: dict[str, torch.Tensor], where: str) -> None:
        resume = None if job.slurm else "last"
        again = Job(job.strategy, job.folder, job.slurm, resume, pause=0.0)
        step = torch.load(saved(job)[0], weights_only=True)["global_step"]
        again.start()
        codes = again.end(300.0)
        if codes != [0] * job.world:
            raise FailedMoment(f"resumed from step {step}: codes {codes}, {where}; see {job.folder}")
        log = (job.folder / "log-0").read_text()
        if "Restored all states" not in log:
            raise FailedMoment(f"did not resume, {where}; see {job.folder}")
        ended = torch.load(job.folder / "final.pt")
        off = max((ended[name] - weights[name]).abs().max() / weights[name].abs().max() for name in weights)
        if off > 1e-9:
            raise FailedMoment(f"resumed from step {step}: {off:.1e} off, {where}; see {job.folder}")


def saved(job: Job) -> list[str]:
    """The checkpoints that a job has saved since it was told to end."""
    pattern = "hpc_ckpt_*" if job.slurm else "checkpoints/last-preempted*"
    return [str(path) for path in sorted(job.folder.glob(pattern))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=30, help="of each strategy and sending")
    parser.add_argument("--strategies", nargs="+", default=[*STRATEGIES], choices=[*STRATEGIES])
    parser.add_argument("--sendings", nargs="+", default=[*SENDINGS], choices=[*SENDINGS])
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    campaign = Campaign(folder)
    counts: dict[tuple[str, str], Counter[bool]] = {}
    for number in range(given.moments):
        for strategy in given.strategies:
            for sending in given.sendings:
                draw = random.Random(f"{given.seed} {number} {strategy} {sending}")
                try:
                    told, good = campaign.moment(strategy, sending, draw), True
                except FailedMoment as error:
                    told, good = str(error), False
                counts.setdefault((strategy, sending), Counter())[good] += 1
                mark = "ok    " if good else "FAILED"
                print(f"{mark} seed {given.seed}, moment {number}, {strategy}, {sending}: {told}", flush=True)
    print(f"\n| strategy | {' | '.join(given.sendings)} |\n|---|{'---|' * len(given.sendings)}")
    for strategy in given.strategies:
        row = [counts[strategy, sending] for sending in given.sendings]
        print(f"| {strategy} | {' | '.join(f'{count[True]} of {count.total()}' for count in row)} |")
    failed = any(count[False] for count in counts.values())
    if not failed:
        shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
