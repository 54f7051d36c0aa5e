"""Sampling parameters and grammar of a request, validated here once for gRPC and HTTP."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from outrider.protocol.checks import check_count, check_number, check_token, check_whole
from outrider.protocol.errors import InvalidRequest

MAX_SEED = 2**64 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 512
MAX_STOP_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_GRAMMAR_BYTES = 64 * 1024
GRAMMAR_FORMS = ("json_schema", "json_object", "regex", "lark")
# Below these, logits overflow and no token can be drawn.
MIN_TEMPERATURE = 1e-6
MIN_REPETITION_PENALTY = 0.01


class Verification(enum.Enum):
    GREEDY = 1
    COUPLED = 2
    REJECTION = 3
    BLOCK = 4

    @property
    def needs_draft_probs(self) -> bool:
        """Return whether guesses must carry the distribution they were drawn from."""
        return self in (Verification.REJECTION, Verification.BLOCK)


@dataclass(frozen=True, slots=True)
class Grammar:
    """Constraint on an output; exactly one field is given. See Grammar in common.proto."""

    json_schema: str = ""
    json_object: bool = False
    regex: str = ""
    lark: str = ""

    @property
    def text(self) -> str:
        return "" if self.json_object else str(getattr(self, self._given[0]))

    @property
    def field(self) -> str:
        return f"params.grammar.{self._given[0]}"

    @property
    def _given(self) -> list[str]:
        """Return the names of the given fields."""
        return [name for name in GRAMMAR_FORMS if getattr(self, name)]

    def check(self) -> None:
        """Raise InvalidRequest for a malformed grammar; `grammar.GrammarCompiler` checks its content."""
        if len(self._given) != 1:
            given = " and ".join(self._given) or "empty"
            raise InvalidRequest.of("params.grammar", given, "one of json_schema, json_object (true), regex, lark")
        check_count(self.field, len(self.text.encode("utf-8", "surrogatepass")), MAX_GRAMMAR_BYTES, "bytes")
        if not self.json_schema:
            return
        try:
            schema = json.loads(self.json_schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest.of(self.field, self.json_schema, f"JSON: {error}") from error
        if not isinstance(schema, dict):
            raise InvalidRequest.of(self.field, self.json_schema, "a JSON object")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    max_tokens: int = 256
    ignore_eos: bool = False
    logprobs: int | None = None
    verification: Verification | None = None
    grammar: Grammar | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def mode(self) -> Verification:
        """Return the verification mode: the requested one, else the default."""
        return self.verification or (Verification.GREEDY if self.greedy else Verification.COUPLED)

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def ending_tokens(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """Return the tokens on which a verifier ends the output, at a target with these end tokens."""
        return frozenset((*self.stop_token_ids, *(() if self.ignore_eos and self.grammar is None else eos_token_ids)))

    def check(self, vocab_size: int | None = None) -> None:
        """Raise InvalidRequest for the first invalid field."""
        check_number("params.temperature", self.temperature, 0.0, 10.0)
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise InvalidRequest.of("params.temperature", self.temperature, f"0 or at least {MIN_TEMPERATURE}")
        check_whole("params.top_k", self.top_k, 0, 2**31 - 1)
        check_number("params.top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_number("params.min_p", self.min_p, 0.0, 1.0)
        check_number("params.repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 10.0)
        check_number("params.presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("params.frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_whole("params.max_tokens", self.max_tokens, 1, 2**31 - 1)
        if self.seed is not None:
            check_whole("params.seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            check_whole("params.logprobs", self.logprobs, 0, min(MAX_LOGPROBS, vocab_size or MAX_LOGPROBS))
        check_count("params.logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        for token, bias in self.logit_bias.items():
            check_token(f"params.logit_bias[{token}]", token, vocab_size)
            check_number(f"params.logit_bias[{token}]", bias, -100.0, 100.0)
        self._check_stops(vocab_size)
        if self.verification is Verification.GREEDY and not self.greedy:
            raise InvalidRequest.of("params.temperature", self.temperature, "0 when verification is greedy")
        if self.verification not in (None, Verification.GREEDY) and self.greedy:
            raise InvalidRequest.of("params.verification", self.mode.name.lower(), "greedy when temperature is 0")
        if self.grammar is not None:
            self.grammar.check()

    def _check_stops(self, vocab_size: int | None) -> None:
        check_count("params.stop_token_ids", len(self.stop_token_ids), MAX_STOP_IDS)
        for index, token in enumerate(self.stop_token_ids):
            check_token(f"params.stop_token_ids[{index}]", token, vocab_size)
        check_count("params.stop", len(self.stop), MAX_STOP_STRINGS)
        for index, text in enumerate(self.stop):
            if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                limit = f"1 to {MAX_STOP_CHARACTERS} characters"
                raise InvalidRequest.of(f"params.stop[{index}]", f"{len(text)} characters", limit)
