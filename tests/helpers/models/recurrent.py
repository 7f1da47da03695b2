"""Recurrent nets, torch's own and written by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.models.bases import Base
from tests.helpers.models.case import Case
from tests.helpers.models.data import text


class LSTM(Base):
    """A recurrent language model, head tied to the embedding."""

    def __init__(self, kind: type[nn.Module] = nn.LSTM, hand: bool = False) -> None:
        super().__init__()
        self.hand = hand
        self.embed = nn.Embedding(48, 16)
        if hand:
            self.cell = nn.LSTMCell(16, 16)
        else:
            self.rnn = kind(16, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 48)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if not self.hand:
            return self.head(self.rnn(x)[0])
        state, outputs = None, []
        for t in range(ids.size(1)):
            state = self.cell(x[:, t], state)
            outputs.append(self.head(state[0]))
        return torch.stack(outputs, dim=1)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x).transpose(1, 2), y)


ROWS: dict[str, Case] = {
    "lstm": Case(LSTM, text()),
    "gru": Case(lambda: LSTM(nn.GRU), text()),
    "lstm_cell": Case(lambda: LSTM(hand=True), text()),
}
