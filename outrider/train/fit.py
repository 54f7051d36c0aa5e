"""Statistics of the data before training: the ids to draft, and the best linear map."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from outrider.protocol.errors import StartupError
from outrider.train.data import Example

_MAX_POSITIONS = 100_000
_RIDGE = 1e-4


def frequent_ids(examples: Iterable[Example], count: int, vocab_size: int, known: Sequence[int] = ()) -> torch.Tensor:
    """Return the ids that the target generates most often, ascending, filled up with `known`, then the lowest ones."""
    counts = Counter(token for example in examples for token in example.tokens[example.prompt_length :].tolist())
    best = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))][:count]
    best += [token for token in dict.fromkeys((*known, *range(vocab_size))) if token not in counts][: count - len(best)]
    return torch.tensor(sorted(best))


def best_linear(examples: Sequence[Example], embeddings: torch.Tensor, ahead: int) -> tuple[torch.Tensor, float]:
    """Return the linear map from token i + 1's embedding and the state after token i to the state `ahead` tokens later.

    It is fitted at positions that the target generated. The second result is the root mean square of the state.
    # [hidden, 2 · hidden]
    """
    inputs, wanted, count = [], [], 0
    for example in examples:
        first, last = max(0, example.prompt_length - 2), len(example.hidden_states) - ahead
        if last <= first:
            continue
        hidden_states = example.hidden_states.to(embeddings)
        inputs.append(torch.cat([embeddings[example.tokens[first + 1 : last + 1]], hidden_states[first:last]], dim=-1))
        wanted.append(hidden_states[first + ahead : last + ahead])
        count += last - first
        if count > _MAX_POSITIONS:
            break
    if not inputs:
        raise StartupError.of("heads", ahead, "at most the tokens of the target's longest answer")
    x, y = torch.cat(inputs), torch.cat(wanted)
    gram = x.T @ x + _RIDGE * len(x) * torch.eye(x.shape[1], device=x.device)
    return torch.linalg.solve(gram, x.T @ y).T, float(y.pow(2).mean().sqrt())
