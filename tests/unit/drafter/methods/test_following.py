"""Published drafters that follow their target by its states: guesses hold, and depend on each state's position."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from drafter.interface import Drafter, DraftRequest
from drafter.methods.published import make
from outrider.hidden_states.projection import Projection
from outrider.hidden_states.rows import encode
from outrider.protocol.hidden_states.messages import FINAL_STATES, HiddenStates
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import Guess
from outrider.settings.drafter import DrafterSettings
from tests import turning
from tests.published import HIDDEN, VOCAB

TEXT = list(range(40, 60))
DRAWS = 30


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return turning.target(tmp_path_factory.mktemp("models") / "target")


@dataclass
class Followed:
    """A drafter, and the target's states of a text as the verifier would send them."""

    drafter: Drafter
    states: torch.Tensor  # [tokens, width]
    number: int

    @classmethod
    @torch.no_grad()
    def of(cls, kind: str, folder: Path, target: Path, text: list[int]) -> Followed:
        checkpoint = turning.drafter(kind, folder, target, from_state=1.0)
        drafter = make(
            DrafterSettings(kind="published", model=str(checkpoint), target=str(target), device="cpu"), print
        )
        offered = getattr(drafter, "projection", None)
        spec = FINAL_STATES if offered is None else offered.spec
        model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        output = model.model(torch.tensor([text]), output_hidden_states=True)
        if offered is None:
            return cls(drafter, output.last_hidden_state[0], 0)
        joined = torch.cat([output.hidden_states[layer][0] for layer in spec.layers], dim=1)
        project = Projection(offered.data, len(spec.layers), HIDDEN, torch.device("cpu"))
        return cls(drafter, project(joined), 1)

    def guess(self, text: list[int], *, late: int = 0, session: str = "s", **more: Any) -> Guess:
        """Guess after a text, from states that are `late` positions behind where they belong."""
        rows = encode(self.states[late : late + len(text) - 1]).numpy().tobytes()
        given = {"params": SamplingParams(temperature=0.0, seed=1), "max_new_tokens": 4} | more
        request = DraftRequest(
            session,
            text,
            len(text),
            len(text),
            vocab_size=VOCAB,
            open_guess=Guess(len(text), 0, 0, ()),
            hidden_states=(HiddenStates(0, HIDDEN, rows, self.number),),
            **given,
        )
        return self.drafter.draft([request])[0]


@pytest.mark.parametrize("kind", turning.KINDS)
def test_guesses_hold_by_the_states_alone(kind: str, target: Path, tmp_path: Path) -> None:
    followed, ahead = Followed.of(kind, tmp_path, target, TEXT), [TEXT[10] + step for step in range(4)]
    assert list(followed.guess(TEXT[:10]).tokens) == ahead
    wrong = followed.guess(TEXT[:10], late=1, session="late")
    assert list(wrong.tokens) == [token + 1 for token in ahead], "a state of another position is another token's"
    tree = followed.guess(TEXT[:10], session="tree", branches=3, budget=12, depth=4)
    assert max(map(len, tree.children.values())) > 1
    assert any(list(path) == ahead for path in tree.paths)


@pytest.mark.parametrize("kind", turning.KINDS)
def test_draws_agree_with_the_targets_own(kind: str, target: Path, tmp_path: Path) -> None:
    """Of the drafter's draws, as many are the likeliest token as the target gives that one."""
    followed = Followed.of(kind, tmp_path, target, TEXT)
    drawn = [
        followed.guess(TEXT[:10], session=str(seed), params=SamplingParams(temperature=1.0, seed=seed)).tokens[0]
        for seed in range(DRAWS)
    ]
    assert DRAWS // 2 < drawn.count(TEXT[10]) < DRAWS
