"""By which numbers a unit decides, and what it asks of them."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_par.pipeline.trial.code_attributes import watched_numbers
from lightning_par.pipeline.trial.deciding_numbers import Questions, answers, asked, watch_arguments, watching


def test_what_a_layer_decides_by_a_number_is_asked_of_other_numbers() -> None:
    def layer(x: str, step: int, *, rate: float) -> bool:
        return (step - 1) % 3 == 0 or (step > 7 and rate < 0.5)

    questions: Questions = {}
    assert watching(layer, questions)("x", 2, rate=0.1) is False
    said = {step: answers(asked(questions), ("x", step), {"rate": 0.1}) for step in range(2, 10)}
    assert said == {step: ((step - 1) % 3 == 0, step > 7) for step in said}
    assert answers(asked(questions), ("x", "2"), {}) == (None, None)


@pytest.mark.parametrize("first, second", [(3, 5), (5.5, 4.0)])
def test_what_is_decided_by_two_numbers_is_asked_of_both(first: float, second: float) -> None:
    """The second was taken to be as in the trial."""
    questions: Questions = {}
    watching(lambda x, y: x * x < y * 2, questions)(first, second)
    for x, y in [(1, 5), (4, 5), (4.5, 40.0), (0, 0)]:
        assert answers(asked(questions), (x, y), {}) == (x * x < y * 2,)


def test_a_whole_number_made_of_a_float_is_asked_for() -> None:
    questions: Questions = {}
    watching(lambda x: [*range(int(x))], questions)(2.5)
    assert answers(asked(questions), (3.7,), {}) == (3,)
    assert answers(asked(questions), (float("nan"),), {}) == (None,)


def test_what_decides_beside_an_argument_is_noted_of_both() -> None:
    """The one on the right of an operator was passed over."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.unread = 1.5, 3.0

        def forward(self, x: float) -> bool:
            return x < self.scale

    model, noted, questions = nn.ModuleDict({"layer": Layer()}), set[str](), Questions()
    with watched_numbers(model, ["layer"], noted):
        (x,), _ = watch_arguments((1.0,), {}, questions, (float,))
        assert model["layer"](x)
    assert noted == {"layer.scale"} and questions.keys() == {frozenset((0,))}
    assert type(model["layer"].scale) is float
