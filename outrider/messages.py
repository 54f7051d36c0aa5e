"""What the parts of Outrider say to each other, as plain frozen values.

No torch, no protobuf: `wire` translates these to the contract and back, the
rules and the engine work on them. Sampling parameters are defined and
checked here, once, for every edge.
"""

from __future__ import annotations

import bisect
import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from outrider.errors import InvalidRequest

MAX_SEED = 2**64 - 1
MAX_ID_CHARACTERS = 128
MAX_EPOCH = 10**15 - 1  # as far as Redis counts exactly
MAX_SALT_CHARACTERS = 256
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 512
MAX_STOP_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_GAMMA = 64
MAX_BRANCHES = 8
MAX_NODES = 256  # guesses of a session that are open at the same time
MAX_CANDIDATES = 64  # ids of a distribution that a guess was drawn from
MAX_FEATURE_WIDTH = 131_072  # numbers of one position's hidden states
MAX_FEATURE_ROWS = 512  # positions whose hidden states travel in one message
MAX_PATIENCE_US = 10_000_000
MAX_GRAMMAR_BYTES = 64 * 1024
GRAMMAR_FORMS = ("json_schema", "json_object", "regex", "lark")
WHOLE = 65536  # the parts a Distribution is made of
# Under these, logits overflow and there is nothing left to draw from.
MIN_TEMPERATURE = 1e-6
MIN_REPETITION_PENALTY = 0.01


class Verification(enum.Enum):
    GREEDY = 1
    COUPLED = 2
    REJECTION = 3
    BLOCK = 4

    @property
    def needs_draft_probs(self) -> bool:
        """Whether guesses must carry the distribution that they were drawn from."""
        return self in (Verification.REJECTION, Verification.BLOCK)


class TokenKind(enum.IntEnum):
    """Where a committed token came from."""

    NONE = 0
    ACCEPTED = 1
    RECOVERED = 2
    BONUS = 3
    PLAIN = 4


class FinishReason(enum.IntEnum):
    NONE = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must be; exactly one of these is given. See Grammar in common.proto."""

    json_schema: str = ""
    json_object: bool = False
    regex: str = ""
    lark: str = ""

    @property
    def form(self) -> str:
        """The name of the one that is given."""
        return self._given[0]

    @property
    def text(self) -> str:
        return "" if self.json_object else str(getattr(self, self.form))

    @property
    def field(self) -> str:
        return f"params.grammar.{self.form}"

    @property
    def _given(self) -> list[str]:
        return [name for name in GRAMMAR_FORMS if getattr(self, name)]

    def check(self) -> None:
        """Whether it can be one at all; see `grammar.Grammars` for whether it says something."""
        if len(self._given) != 1:
            given = " and ".join(self._given) or "empty"
            raise InvalidRequest.of("params.grammar", given, "one of json_schema, json_object (true), regex, lark")
        size = len(self.text.encode("utf-8", "surrogatepass"))
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest.of(self.field, f"{size} bytes", f"at most {MAX_GRAMMAR_BYTES} bytes")
        if self.json_schema:
            self._check_schema()

    def _check_schema(self) -> None:
        try:
            schema = json.loads(self.json_schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest.of(self.field, self.json_schema, f"JSON: {error}") from error
        if not isinstance(schema, dict):
            raise InvalidRequest.of(self.field, self.json_schema, "a JSON object")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request draws its tokens; the defaults are the documented ones."""

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
        """The verification in force: the one asked for, else the default."""
        return self.verification or (Verification.GREEDY if self.greedy else Verification.COUPLED)

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def with_seed(self, seed: int) -> SamplingParams:
        return replace(self, seed=seed)

    def check(self, vocab_size: int | None = None) -> None:
        """Raise InvalidRequest naming the first field that cannot be."""
        _number("params.temperature", self.temperature, 0.0, 10.0)
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise InvalidRequest.of("params.temperature", self.temperature, f"0 or at least {MIN_TEMPERATURE}")
        _whole("params.top_k", self.top_k, 0, 2**31 - 1)
        _number("params.top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("params.min_p", self.min_p, 0.0, 1.0)
        _number("params.repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 10.0)
        _number("params.presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("params.frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _whole("params.max_tokens", self.max_tokens, 1, 2**31 - 1)
        if self.seed is not None:
            _whole("params.seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _whole("params.logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _count("params.logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        for token, bias in self.logit_bias.items():
            _token(f"params.logit_bias[{token}]", token, vocab_size)
            _number(f"params.logit_bias[{token}]", bias, -100.0, 100.0)
        self._check_stops(vocab_size)
        if self.verification is Verification.GREEDY and not self.greedy:
            raise InvalidRequest.of("params.temperature", self.temperature, "0 when verification is greedy")
        if self.verification not in (None, Verification.GREEDY) and self.greedy:
            raise InvalidRequest.of("params.verification", self.mode.name.lower(), "greedy when temperature is 0")
        if self.grammar is not None:
            self.grammar.check()

    def _check_stops(self, vocab_size: int | None) -> None:
        _count("params.stop_token_ids", len(self.stop_token_ids), MAX_STOP_IDS)
        for index, token in enumerate(self.stop_token_ids):
            _token(f"params.stop_token_ids[{index}]", token, vocab_size)
        _count("params.stop", len(self.stop), MAX_STOP_STRINGS)
        for index, text in enumerate(self.stop):
            if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                raise InvalidRequest.of(
                    f"params.stop[{index}]", f"{len(text)} characters", f"1 to {MAX_STOP_CHARACTERS} characters"
                )


@dataclass(frozen=True, slots=True)
class Steering:
    """How a session is to be drafted: absent means unchanged."""

    gamma: int | None = None
    branches: int | None = None
    patience_us: int | None = None
    features: bool | None = None
    nodes: int | None = None
    eager: bool | None = None

    def check(self) -> None:
        for name, value, high in (
            ("steer.gamma", self.gamma, MAX_GAMMA),
            ("steer.branches", self.branches, MAX_BRANCHES),
            ("steer.patience_us", self.patience_us, MAX_PATIENCE_US),
            ("steer.nodes", self.nodes, MAX_NODES),
        ):
            if value is not None:
                _number(name, value, 0, high)


NO_STEERING = Steering()


@dataclass(frozen=True, slots=True)
class Distribution:
    """A sparse distribution in whole parts of 65536: small on the wire and exact on both sides."""

    ids: tuple[int, ...]
    weights: tuple[int, ...]

    def check(self, name: str, vocab_size: int) -> None:
        if len(self.ids) != len(self.weights) or not self.ids:
            raise InvalidRequest.of(
                name, f"{len(self.ids)} ids and {len(self.weights)} weights", "as many weights as ids, at least one"
            )
        if any(b <= a for a, b in pairwise(self.ids)):
            raise InvalidRequest.of(f"{name}.id_deltas", "not ascending", "ascending ids, each once")
        _token(f"{name}.id_deltas", self.ids[0], vocab_size)
        _token(f"{name}.id_deltas", self.ids[-1], vocab_size)
        if min(self.weights) < 1 or sum(self.weights) != WHOLE:
            raise InvalidRequest.of(
                f"{name}.weights", f"a sum of {sum(self.weights)}", f"parts of at least 1 that sum to {WHOLE}"
            )


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens for position, position+1, … in a chain, or in a tree with `parents`; see Guess in common.proto."""

    position: int
    first_id: int
    parent: int
    tokens: tuple[int, ...]
    draft_probs: tuple[Distribution, ...] = ()
    draft_us: int = 0
    source: int = 0
    parents: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Features:
    """Hidden states of committed positions: float16 rows, little endian."""

    position: int
    width: int
    rows: bytes


@dataclass(frozen=True, slots=True)
class VerifyTimings:
    wait_us: int = 0
    forward_us: int = 0
    step_us: int = 0
    sessions: int = 1
    rows: int = 1
    session_rows: int = 1
    cached_tokens: int = 0
    step_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SourceTally:
    """How one of a session's drafters did in a step."""

    source: int
    offered: int  # length of its longest path that was checked
    accepted: int  # accepted tokens that it had guessed


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one verifier step committed for one session."""

    position: int
    tokens: tuple[int, ...]
    accepted: int
    last: TokenKind
    offered: int = 0
    skipped: int = 0
    finish_reason: FinishReason = FinishReason.NONE
    timings: VerifyTimings = VerifyTimings()
    logprobs: tuple[TokenLogprobs, ...] = ()
    features: Features | None = None
    sources: tuple[SourceTally, ...] = ()
    nodes: int = 0  # guesses that were checked, all branches together
    left: int = 0  # longest guessed path that goes on from here
    beside: int = 0  # accepted guesses that were not the first for their place

    @property
    def kinds(self) -> tuple[TokenKind, ...]:
        rest = len(self.tokens) - self.accepted
        return (TokenKind.ACCEPTED,) * self.accepted + (self.last,) * rest


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a model is. Equal fingerprints give equal text."""

    name: str
    fingerprint: str
    architecture: str = ""
    vocab_size: int = 0
    vocabulary_digest: str = ""
    context_length: int = 0
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = ""
    device: str = ""
    parameters: int = 0
    lineage: str = ""
    made_for: str = ""


@dataclass(frozen=True, slots=True)
class CostCurve:
    """How long a step takes by the tokens that go through it: the line between two points, the last slope after them.

    Without points it is not known.
    """

    rows: tuple[int, ...] = ()
    ms: tuple[float, ...] = ()

    @classmethod
    def line(cls, first_ms: float, row_ms: float) -> CostCurve:
        """So much for one row, so much for every further one."""
        return cls((1, 2), (first_ms, first_ms + row_ms))

    def at(self, rows: float) -> float:
        if len(self.rows) < 2 or rows <= self.rows[0]:
            return self.ms[0]
        after = min(bisect.bisect_left(self.rows, rows), len(self.rows) - 1)
        before = after - 1
        slope = (self.ms[after] - self.ms[before]) / (self.rows[after] - self.rows[before])
        return self.ms[before] + slope * (rows - self.rows[before])

    def rows_within(self, ms: float, most: int) -> int:
        """The most rows, up to `most`, that take no longer."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.at(middle) <= ms else (low, middle - 1)
        return low

    def scaled(self, factor: float) -> CostCurve:
        return replace(self, ms=tuple(ms * factor for ms in self.ms))


UNKNOWN_COST = CostCurve()


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    sessions: int = 0
    waiting: int = 0
    kv_tokens_used: int = 0
    kv_tokens_total: int = 0
    step_ms: float = 0.0
    cost: CostCurve = UNKNOWN_COST
    kv_tokens_idle: int = 0


class Role(enum.IntEnum):
    VERIFIER = 1
    DRAFTER = 2


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    worker_id: str
    role: Role
    address: str
    model: ModelInfo
    kind: str = ""
    capacity: int = 1
    load: WorkerLoad = WorkerLoad()
    draining: bool = False
    round_trip_ms: float = 0.0
    features: bool = False  # a drafter that wants hidden states
    machine: str = ""  # equal on one machine


def check_opening(
    session_id: str,
    tokens: Sequence[int],
    prompt_length: int,
    params: SamplingParams,
    steering: Steering,
    vocab_size: int,
    cache_salt: str = "",
) -> None:
    """What must hold of the first message of a session's stream, at the verifier and at the drafter."""
    if not 1 <= len(session_id) <= MAX_ID_CHARACTERS:
        raise InvalidRequest.of("open.session_id", session_id, f"1 to {MAX_ID_CHARACTERS} characters")
    if not tokens:
        raise InvalidRequest.of("open.tokens", "empty", "at least one token")
    if not 1 <= prompt_length <= len(tokens):
        raise InvalidRequest.of("open.prompt_length", prompt_length, f"in [1, {len(tokens)}]")
    check_tokens("open.tokens", tokens, vocab_size)
    check_salt("open.cache_salt", cache_salt)
    params.check(vocab_size)
    steering.check()
    if params.seed is None:
        raise InvalidRequest.of("params.seed", "absent", "given: only the coordinator draws one")


def check_salt(name: str, salt: str) -> None:
    if len(salt) > MAX_SALT_CHARACTERS:
        raise InvalidRequest.of(name, f"{len(salt)} characters", f"at most {MAX_SALT_CHARACTERS} characters")


def check_tokens(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Every id must exist in the target's vocabulary."""
    if tokens and max(tokens) >= vocab_size:
        index = next(i for i, token in enumerate(tokens) if token >= vocab_size)
        _token(f"{name}[{index}]", tokens[index], vocab_size)


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    # Comparisons refuse NaN by being false, and whole numbers too large for a float without an error.
    if low <= value <= high and not (open_low and value == low):
        return
    bracket = "(" if open_low else "["
    raise InvalidRequest.of(name, value, f"in {bracket}{_plain(low)}, {_plain(high)}]")


def _whole(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int):
        raise InvalidRequest.of(name, value, f"a whole number in [{low}, {high}]")
    _number(name, value, low, high)


def _plain(limit: float) -> str:
    return str(int(limit)) if limit == int(limit) else str(limit)


def _count(name: str, count: int, high: int) -> None:
    if count > high:
        raise InvalidRequest.of(name, f"{count} entries", f"at most {high} entries")


def _token(name: str, token: int, vocab_size: int | None) -> None:
    if vocab_size is not None and not 0 <= token < vocab_size:
        raise InvalidRequest.of(name, token, f"a token id in [0, {vocab_size - 1}]")
