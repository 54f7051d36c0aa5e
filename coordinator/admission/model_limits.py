"""Model limits: sessions, waiting requests and lengths of one target, so that the others keep their places.

`--model-limits` has an entry for each limited target: `NAME=LIMIT:NUMBER LIMIT:NUMBER`. Each coordinator counts its own
sessions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache

from coordinator.admission.quotas import full
from coordinator.workers.target import Target
from outrider.protocol.errors import ContextExceeded, InvalidRequest, StartupError
from outrider.protocol.sampling_params import SamplingParams
from outrider.settings.coordinator import CoordinatorSettings


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits of one target. 0: only those that hold for all targets."""

    sessions: int = 0  # at once
    waiting: int = 0  # requests without a token yet
    key_sessions: int = 0  # at once, of one API key
    context: int = 0  # tokens of prompt and output together
    output: int = 0  # tokens of an output

    def admit(self, model: str, of_model: Iterable[tuple[str, bool]], tenant: str) -> None:
        """Raise Overloaded for a session too many; `of_model` tells whose each is, and whether it waits."""
        sessions = [*of_model] if self.sessions or self.waiting or self.key_sessions else []
        own = sum(holder == tenant for holder, _ in sessions)
        for name, held, message in (
            ("sessions", len(sessions), "{} sessions of model {} are running"),
            ("waiting", sum(waits for _, waits in sessions), "{} requests for model {} are waiting"),
            ("key_sessions", own, "{} sessions of this key are running on model {}"),
        ):
            limit = getattr(self, name)
            if limit and held >= limit:
                raise full(f"model.{name}", message.format(held, model), held, limit)

    def context_of(self, target: Target) -> int:
        return min(self.context or target.info.context_length, target.info.context_length)

    def fitted(
        self, params: SamplingParams, prompt: int, target: Target, *, given: bool, default: int | None
    ) -> SamplingParams:
        """Return the parameters with a length that the target allows after a prompt of this many tokens.

        `default` is the length of requests without one, where the context leaves as many. A `given` one that is too
        long is an InvalidRequest; with a default, only one beyond the context: shorter ones become what it leaves.
        """
        context, size = self.context_of(target), f"{prompt} tokens"
        budget, known = context - prompt, f". This model's maximum context length is {context} tokens"
        if budget < 1:
            raise ContextExceeded.of("prompt", size, f"under the context of {context} tokens", known)
        if given:
            wanted = params.max_tokens
            if 0 < self.output < wanted:
                raise InvalidRequest.of("params.max_tokens", wanted, f"at most {self.output}, the model's limit")
            may_be_cut = default is not None and wanted <= context
        else:
            wanted = params.max_tokens if default is None else default
            if self.output:
                wanted = min(wanted, self.output)
            may_be_cut = default is not None or wanted >= context
        if may_be_cut:
            wanted = min(wanted, budget)
        if wanted <= budget:
            return replace(params, max_tokens=wanted)
        if given:
            why = f"at most {budget}: the context is {context} tokens and the prompt has {prompt}"
            raise ContextExceeded.of("params.max_tokens", wanted, why, known)
        room = f"at most {context - wanted} to leave room for {wanted} output tokens; or set params.max_tokens"
        raise ContextExceeded.of("prompt", size, room, known)


_NO_LIMITS = ModelLimits()
_NAMES = "|".join(field.name for field in fields(ModelLimits))
_ENTRY = re.compile(rf"(?P<name>\S+)=(?P<limits>( *({_NAMES}):[1-9][0-9]{{0,8}}(?= |$))+)")


@cache
def read_limits(text: str) -> Mapping[str, ModelLimits]:
    """Read the setting: limits by the names of targets. Raise StartupError for a malformed entry."""
    known: dict[str, ModelLimits] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        found = _ENTRY.fullmatch(entry)
        pairs = [pair.split(":") for pair in found["limits"].split()] if found else []
        given = {name: int(number) for name, number in pairs}
        if found is None or len(given) < len(pairs) or found["name"] in known:
            allowed = f"NAME=LIMIT:NUMBER, once for each name and limit; LIMIT is {_NAMES.replace('|', ', ')}"
            raise StartupError.of("model_limits", entry, allowed)
        known[found["name"]] = ModelLimits(**given)
    return known


def limits_of(settings: CoordinatorSettings, target: Target) -> ModelLimits:
    """Return the limits of a target, by its own name or that for clients."""
    known = read_limits(settings.model_limits)
    return known.get(target.info.name) or known.get(target.served_name, _NO_LIMITS)
