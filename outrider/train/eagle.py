"""Training EAGLE drafters: the target's own next-token distribution is what is learnt, some steps ahead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from outrider.trained.eagle import Eagle, Shape
from outrider.trained.ends import Ends
from outrider.train.data import Example
from outrider.train.method import Batch

_JUDGED_SHARE = 0.35  # of the places, at random in each step: the head is most of the work
_STATE_WEIGHT = 0.1
_ONE_STEP_SHARE = 0.6  # of the training: what is far ahead is learnt when what is near is known
_FITTED_PLACES = 100_000
_RIDGE = 1e-4


def frequent_ids(examples: Iterable[Example], count: int, vocab_size: int) -> torch.Tensor:
    """The ids that the target writes most, ascending; where it wrote fewer, the lowest others."""
    counts: Counter[int] = Counter()
    for example in examples:
        counts.update(example.tokens[example.prompt_length :].tolist())
    best = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))][:count]
    others = (token for token in range(vocab_size) if token not in counts)
    while len(best) < min(count, vocab_size):
        best.append(next(others))
    return torch.tensor(sorted(best))


class EagleMethod:
    name = "eagle"

    def __init__(
        self,
        target: PreTrainedModel,
        ends: Ends,
        ids: torch.Tensor,
        examples: Sequence[Example],
        *,
        layers: int,
        steps: int,
    ) -> None:
        self._eagle = Eagle(Shape.like(target, layers), ids, ends)
        self._ends = ends
        self._steps = steps
        _begin(self._eagle, target, examples)

    @property
    def module(self) -> nn.Module:
        return self._eagle

    @property
    def shape(self) -> Mapping[str, Any]:
        return self._eagle.described

    def loss(self, batch: Batch, chance: torch.Generator, done: float) -> torch.Tensor:
        steps = self._steps if done >= _ONE_STEP_SHARE else 1
        answers = self._eagle.unroll(batch.features, batch.tokens, batch.lengths, batch.starts, steps)
        total = torch.zeros(())
        for step, answer in enumerate(answers):
            judged = batch.written.clone()
            judged[:, :step] = False
            judged &= torch.rand(judged.shape, generator=chance).to(judged.device) < _JUDGED_SHARE
            wanted = batch.wanted[judged]
            target = torch.softmax(self._ends.logits(wanted, self._eagle.ids).float(), dim=-1)
            found = torch.log_softmax(self._eagle.head(answer[judged]).float(), dim=-1)
            surprise = -(target * found).sum(dim=-1).mean()
            distance = nn.functional.smooth_l1_loss(answer[judged].float(), wanted)
            total = total + 0.9**step * (surprise + _STATE_WEIGHT * distance)
        return total

    @torch.inference_mode()
    def held(self, batch: Batch) -> torch.Tensor:
        steps = self._depth
        answers = self._eagle.unroll(batch.features, batch.tokens, batch.lengths, batch.starts, steps)
        everything = torch.arange(self._ends.head.shape[0], device=batch.tokens.device)
        likeliest = self._ends.logits(batch.wanted, everything).argmax(dim=-1)
        written = batch.written
        held = torch.where(written, 0, -1)
        still = written
        for step, answer in enumerate(answers):
            right = (self._eagle.ids[self._eagle.head(answer).argmax(dim=-1)] == likeliest) & written
            # The chain that began `step` places before stands here now.
            right = torch.cat([right[:, step:], right.new_zeros(right.shape[0], step)], dim=1)
            still = still & right
            held = held + still.int()
        return held

    _depth = 5

    def weights(self) -> dict[str, torch.Tensor]:
        return self._eagle.weights()


@torch.no_grad()
def _begin(eagle: Eagle, target: PreTrainedModel, examples: Sequence[Example]) -> None:
    """From the best that no layer at all can do: the linear map from state and embedding to the next state.

    The layer adds nothing to it yet; where it is built as the target's own, it looks for what the last of those does.
    """
    states, tokens, wanted = _places(examples)
    inputs = torch.cat([eagle.embeddings[tokens], states], dim=-1)
    gram = inputs.T @ inputs + _RIDGE * len(inputs) * torch.eye(inputs.shape[1])
    eagle.mix.weight.copy_(torch.linalg.solve(gram, inputs.T @ wanted).T)
    theirs = list(getattr(target.base_model, "layers", ()))
    for mine, other in zip(reversed(eagle.body.model.layers), reversed(theirs), strict=False):
        known = other.state_dict()
        if {name: w.shape for name, w in known.items()} == {name: w.shape for name, w in mine.state_dict().items()}:
            mine.load_state_dict({name: weight.float() for name, weight in known.items()})
    for layer in eagle.body.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    eagle.body.model.norm.weight.fill_(float(wanted.pow(2).mean().sqrt()))


def _places(examples: Sequence[Example]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Written places of as many examples as it takes: state before, token, state after."""
    states, tokens, wanted = [], [], []
    count = 0
    for example in examples:
        first = max(0, example.prompt_length - 2)
        states.append(example.features[first:-1].float())
        tokens.append(example.tokens[first + 1 : -1])
        wanted.append(example.features[first + 1 :].float())
        count += len(tokens[-1])
        if count > _FITTED_PLACES:
            break
    return torch.cat(states), torch.cat(tokens), torch.cat(wanted)
