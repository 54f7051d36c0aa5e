"""Size limits of messages from peers, checked on the protobuf before Python code loops over it.

Protobuf's own code returns `ByteSize` and lengths of fields: megabytes are refused as quickly as a short message.
"""

from __future__ import annotations

from outrider.protocol.checks import check_count
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.hidden_states.limits import check_rows
from outrider.protocol.speculation import MAX_CANDIDATES, MAX_GAMMA
from outrider.v1 import common_pb2 as common
from outrider.v1 import drafter_pb2 as draft
from outrider.v1 import verifier_pb2 as verify

_ID_BYTES = 5  # a varint of 32 bits
_DISTRIBUTION_BYTES = MAX_CANDIDATES * (_ID_BYTES + 3) + 16
# A guess message with every field at its limit.
MAX_GUESS_BYTES = MAX_GAMMA * (_ID_BYTES + 1 + _DISTRIBUTION_BYTES) + 128
MAX_OPEN_TOKENS = 4 * 1024 * 1024  # prompt and output; contexts are shorter
MAX_SMALL_BYTES = 16 * 1024  # a message without guesses, hidden states and logprobs
# A drafter sends guesses, its description, or its load.
MAX_DRAFTER_MESSAGE_BYTES = MAX_GUESS_BYTES + MAX_SMALL_BYTES


def check_guess(guess: common.Guess) -> None:
    check_count("guess.tokens", len(guess.tokens), MAX_GAMMA, "tokens")
    for name, unit in (("parents", "parents"), ("draft_probs", "distributions")):
        if (count := len(getattr(guess, name))) not in (0, len(guess.tokens)):
            raise InvalidRequest.of(f"guess.{name}", f"{count} {unit}", f"none or {len(guess.tokens)}")
    for index, distribution in enumerate(guess.draft_probs):
        name = f"guess.draft_probs[{index}]"
        check_count(f"{name}.id_deltas", len(distribution.id_deltas), MAX_CANDIDATES, "ids")
        check_count(f"{name}.weights", len(distribution.weights), MAX_CANDIDATES, "weights")
    check_count("guess", guess.ByteSize(), MAX_GUESS_BYTES, "bytes")  # unknown fields included
    for i, parent in enumerate(guess.parents):
        if parent > i:
            raise InvalidRequest.of(f"guess.parents[{i}]", parent, f"at most {i}: an earlier token")


def check_verify_request(request: verify.VerifyRequest) -> None:
    """Raise InvalidRequest for an oversized later message of a verifier stream."""
    check_count("message", request.ByteSize(), MAX_GUESS_BYTES + MAX_SMALL_BYTES, "bytes")


def check_draft_request(request: draft.DraftRequest) -> None:
    """Raise InvalidRequest for an oversized later message of a drafter stream."""
    committed = request.committed
    check_count("committed.tokens", len(committed.tokens), MAX_GAMMA + 1, "tokens")
    given, name, states = committed.HasField("hidden_states"), "committed.hidden_states", committed.hidden_states
    if request.HasField("earlier_states"):
        given, name, states = True, "earlier_states", request.earlier_states
    if given and not check_rows(name, states):  # without a row they would wait at the drafter, uncounted
        raise InvalidRequest.of(f"{name}.rows", "empty", "at least one row")
    check_count("message", request.ByteSize(), MAX_SMALL_BYTES + len(states.rows), "bytes")
