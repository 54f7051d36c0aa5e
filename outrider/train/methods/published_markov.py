"""DSpark's Markov heads: what the tokens before a guess add to its logits, through a narrow row of each token.

`vanilla` reads the last token alone. `gated` weighs it by the guess's hidden state. `rnn` reads all tokens since the
block's anchor through a state of its own.
"""

from __future__ import annotations

import torch
from torch import nn


class MarkovHead(nn.Module):
    """The plain head. Its state has no numbers, nor has that of the gated one."""

    def __init__(self, vocab: int, draft_vocab: int, rank: int, hidden: int) -> None:
        super().__init__()
        self.state_width = 0
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab, bias=False)

    def forward(
        self, state: torch.Tensor, previous: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states after each previous token, and the logits to add.  # [guesses, state], [guesses, ids]"""
        return state, self.markov_w2(self.markov_w1(previous))


class GatedMarkovHead(MarkovHead):
    """A head that takes some of each number of the token's row."""

    def __init__(self, vocab: int, draft_vocab: int, rank: int, hidden: int) -> None:
        super().__init__(vocab, draft_vocab, rank, hidden)
        self.gate_proj = nn.Linear(hidden + rank, rank)

    def forward(
        self, state: torch.Tensor, previous: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self.markov_w1(previous)
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1)))
        return state, self.markov_w2(gate * embedded)


class RecurrentMarkovHead(MarkovHead):
    """A head with a gated recurrent state, zero before a block's anchor."""

    def __init__(self, vocab: int, draft_vocab: int, rank: int, hidden: int) -> None:
        super().__init__(vocab, draft_vocab, rank, hidden)
        self.state_width = rank
        self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def forward(
        self, state: torch.Tensor, previous: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.cat([state, self.markov_w1(previous), hidden], dim=-1)
        gate, candidate, output = self.joint_proj(inputs).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return gate * state + (1 - gate) * torch.tanh(candidate), self.markov_w2(torch.tanh(output))


MARKOV_HEADS: dict[str, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RecurrentMarkovHead,
}
