"""What no step calls has a home of its own, unless that is another name of what one calls."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_par.pipeline.plan.uncalled import homes_of_uncalled


class Refers(nn.Module):
    """Has a layer by a second name, as what renews the random features of another one does."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.instance = layer


class Net(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.updater, self.other = Refers(self.layers), nn.Sequential(nn.Linear(4, 4))
        self.tied = nn.Linear(4, 4, bias=bias)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.first(x))  # type: ignore[no-any-return]


def test_a_second_name_is_no_home_and_a_tied_layer_is_one() -> None:
    homes = {"first": (0,), "layers.0": (0,), "layers.1": (1,)}
    for bias in (False, True):
        assert set(homes_of_uncalled(Net(bias), homes)) == {"other", "other.0", "tied"}
