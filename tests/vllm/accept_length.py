"""Greedy texts and the accept length of one drafter, in vLLM with its own speculation and in ours."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from drafter.methods.published import make
from drafter.session import DraftOpening, DraftSession
from outrider.engine import SessionTokens
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.hidden_states.projection import Projection
from outrider.hidden_states.rows import encode
from outrider.protocol.hidden_states.messages import HiddenStates
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import DraftSteering
from outrider.settings.drafter import DrafterSettings

Tokens = list[int]


@dataclass(frozen=True, slots=True)
class Drafted:
    """Texts, and what was accepted of the guesses for them."""

    texts: list[Tokens]
    rounds: int
    accepted: int

    @property
    def accept_length(self) -> float:
        """Return the mean number of tokens of a round."""
        return 1 + self.accepted / self.rounds


def in_vllm(
    target: str, checkpoint: Path, prompts: Sequence[Tokens], *, gamma: int, length: int, method: str = "eagle3"
) -> Drafted:
    """Let the whole engine of vLLM generate, with the checkpoint as its drafter."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM
    from vllm import SamplingParams as VllmSampling

    speculative: dict[str, Any] = {"method": method, "model": str(checkpoint), "num_speculative_tokens": gamma}
    llm = LLM(
        target,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        block_size=32,
        max_num_seqs=len(prompts),
        kv_cache_memory_bytes=256 << 20,
        disable_log_stats=False,
        speculative_config=speculative,
    )
    # vLLM 0.32 registers its kernels anew with each core, and fails at it once numba is loaded.
    type(import_module("vllm.platforms").current_platform).register_triton_kernel_overrides = lambda *_: None
    asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    made = llm.generate(asked, VllmSampling(temperature=0.0, max_tokens=length), use_tqdm=False)
    counted = {each.name: int(getattr(each, "value", 0)) for each in llm.get_metrics()}
    llm.llm_engine.engine_core.shutdown()
    texts = [list(each.outputs[0].token_ids) for each in made]
    return Drafted(texts, counted["vllm:spec_decode_num_drafts"], counted["vllm:spec_decode_num_accepted_tokens"])


class InTurns:
    """Our engine and our drafter in turns, which hand each other what crosses the wire in a fleet."""

    def __init__(self, target: str, checkpoint: Path) -> None:
        options = EngineOptions(device="cpu", dtype="float32", prefix_tokens=0)
        self._engine = load_model(target, options).engine
        settings = DrafterSettings(
            kind="published", model=str(checkpoint), target=target, device="cpu", dtype="float32"
        )
        self._drafter = make(settings, lambda _: None)
        packed = self._drafter.projection
        self._layers, width = packed.spec.layers, self._engine.state_shape[1]
        self._project = Projection(packed.data, len(self._layers), width, self._engine.device)
        self._state_width = width

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Tokens], *, gamma: int, length: int) -> Drafted:
        texts, rounds, accepted = [], 0, 0
        for prompt in prompts:
            text, right = self._text(prompt, gamma, length)
            texts.append(text)
            rounds, accepted = rounds + len(right), accepted + sum(right)
        return Drafted(texts, rounds, accepted)

    def _text(self, prompt: Tokens, gamma: int, length: int) -> tuple[Tokens, list[int]]:
        """Return a text, and the number of accepted guesses of each round after the prompt's."""
        engine, info = self._engine, self._engine.info
        opening = DraftOpening(
            "text",
            0,
            tuple(prompt),
            len(prompt),
            # The last round guesses beyond the end too, as in vLLM.
            SamplingParams(temperature=0.0, max_tokens=length + gamma + 1),
            info.vocab_size,
            steer=DraftSteering(gamma=gamma),
        )
        session = DraftSession(opening)
        known, right = list(prompt), list[int]()
        tokens, guesses = list(prompt), Tokens()
        while len(known) < len(prompt) + length and not set(known[len(prompt) :]) & set(info.eos_token_ids):
            cached = engine.length("text")
            step = SessionTokens(
                "text", [*tokens, *guesses], logits_from=len(tokens) - 1, hidden_from=0, layers=self._layers
            )
            result = engine.extend([step])
            choices = result.logits[0].argmax(dim=-1).tolist()
            count = next((i for i, guess in enumerate(guesses) if guess != choices[i]), len(guesses))
            new = (*guesses[:count], choices[count])
            states = result.hidden_states[0][: len(tokens) + count, self._state_width :]
            engine.truncate("text", cached + len(tokens) + count)
            right += [count] * bool(guesses)
            session.commit(len(known), new, self._sent(cached, states))
            known += new
            tokens, guesses = [new[-1]], self._guesses(session)
        engine.free("text")
        self._drafter.forget(session.key)
        stop = next((i for i, token in enumerate(known[len(prompt) :], 1) if token in info.eos_token_ids), length)
        return known[len(prompt) :][: min(stop, length)], right

    def _sent(self, position: int, states: torch.Tensor) -> HiddenStates:
        rows = encode(self._project(states))
        return HiddenStates(position, rows.shape[1], rows.numpy().tobytes(), 1)

    def _guesses(self, session: DraftSession) -> Tokens:
        while (request := session.next_request()) is not None:
            session.add_guess(self._drafter.draft([request])[0], 0)
        guess = session.next_message()
        return [] if guess is None else list(guess.tokens)
