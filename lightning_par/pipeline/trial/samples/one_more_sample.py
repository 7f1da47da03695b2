"""A step on a batch with one more sample: the shapes that are others there are of tensors that hold samples."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_par.mesh.positions import Positions
from lightning_par.pipeline.plan.stage_ranges import Stages
from lightning_par.pipeline.run.microbatch import MicrobatchAxis
from lightning_par.pipeline.trial.analysis import Analysis
from lightning_par.pipeline.trial.analysis_notes import Layouts
from lightning_par.pipeline.trial.analysis_run import AnalysisRun
from lightning_par.pipeline.trial.survey import Seen, Survey, same
from lightning_par.python_state.nested_tensors import map_tensors, tensors_in
from lightning_par.python_state.tensor_classes import of_its_class, plain
from lightning_par.trial.guesses import EndlessError, Guesses
from lightning_par.trial.step import Step


def with_one_more(step: Step) -> Step:
    """On a batch with one more sample, not one less, since BatchNorm takes no single one."""

    def longer(x: Tensor) -> Tensor:
        if not x.ndim or x.shape[0] != step.samples:
            return x
        values = plain(x)
        return of_its_class(x, torch.cat([values, values[-1:]]))

    return replace(step, batch=map_tensors(longer, step.batch))


def as_whole(step: Step, stages: Stages, surveyed: Survey | None) -> tuple[Analysis, list[Seen], list[Seen] | None]:
    """The step before it is cut, what it does on its batch, and on one with another sample, if that is known.

    Where all is known of the batch, the run is on one with another sample, if the step does the same there. It is run
    on its own batch where units leave something behind: the ranks go by what that is like.
    """
    known = [] if surveyed is None else [*surveyed.outside(stages.homes)]
    larger = _larger(step, stages) if surveyed is not None and surveyed.samples == step.samples else None
    if larger is not None and not larger.changes.aftereffects and _are_alike(known, larger.seen()):
        return larger, known, larger.seen()
    whole, _ = AnalysisRun(step, stages, keeps=True).explored()
    ours = whole.seen()
    if larger is not None and larger.guesses.patterns == whole.guesses.patterns:
        return whole, ours, larger.seen()
    one_more = surveyed is not None and surveyed.samples == step.samples + 1
    return whole, ours, known if one_more and _are_alike(ours, known) else None


def _larger(step: Step, stages: Stages) -> Analysis | None:
    """The step as a whole, on a batch with another sample."""
    try:
        return AnalysisRun(with_one_more(step), stages, keeps=True).explored()[0]
    except (Exception, EndlessError):  # a step may count on its batch size
        return None


def _are_alike(ours: list[Seen], theirs: list[Seen]) -> bool:
    return len(ours) == len(theirs) and all(map(Seen.is_as, ours, theirs))


def sample_layouts(step: Step, stages: Stages, whole: Analysis, ours: list[Seen], theirs: list[Seen] | None) -> Layouts:
    """Tensors of the batch alone that hold samples: their shapes follow the number of samples."""
    samples = step.samples
    layouts: Layouts = {}
    positions = Positions.even
    for n, x in enumerate(tensors_in(step.batch)):
        if x.ndim and x.shape[0] == samples:
            layouts[-1, n] = (0, positions(samples, 1))
    if not any(size % samples == 0 for seen in ours for shape in seen.shapes for size in shape):
        return layouts
    if theirs is None:
        theirs = _larger_again(step, stages, whole)
    for index, other in same(ours, theirs):
        for n, (a, b) in enumerate(zip(ours[index].shapes, theirs[other].shapes)):
            dims = [d for d, (x, y) in enumerate(zip(a, b)) if x != y] if len(a) == len(b) else []
            if len(dims) == 1 and a[dims[0]] * (samples + 1) == b[dims[0]] * samples:
                # each sample has so many rows, one behind another
                layouts[index, n] = (dims[0], positions(samples, 1).repeat(a[dims[0]] // samples))
    return layouts


def _larger_again(step: Step, stages: Stages, whole: Analysis) -> list[Seen]:
    """What the run ``whole`` does with another sample; nothing where it can't be."""
    try:
        return AnalysisRun(with_one_more(step), stages).once(Guesses(whole.guesses.patterns))[0].seen()
    except (Exception, EndlessError):  # a step may count on its batch size
        return []


def cut_layouts(layouts: Layouts, samples: int, axis: MicrobatchAxis) -> Layouts:
    """Of `sample_layouts`, what a microbatch holds of each tensor."""
    own = axis.positions(samples)
    return {key: (dim, own.repeat(positions.size // samples)) for key, (dim, positions) in layouts.items()}
