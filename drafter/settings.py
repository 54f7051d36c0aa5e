"""Settings of the drafter."""

from __future__ import annotations

from pydantic import Field, SecretStr

from outrider.base.config import DrafterKey, WorkerSettings


class DrafterSettings(WorkerSettings, DrafterKey):
    """Serve guesses for a target that a verifier holds."""

    kind: str = Field(
        "auto",
        description="How to draft: ngram, suffix, model, translate, early-exit, medusa, eagle, or several joined by +. "
        "auto: what --model is; without one what is best for the target of what comes with Outrider.",
    )
    model: str = Field(
        "",
        description="For model and translate: a directory, a .gguf file or a hub id. For eagle, medusa and early-exit: "
        "a folder made by `outrider train`; empty: the bundled one. For early-exit also: how many layers.",
    )
    target: str = Field(
        "default", description="For kinds that read parts of it: the target, a directory, a .gguf file or a hub id."
    )
    draft_candidates: int = Field(
        24, ge=1, le=32, description="Ids a model drafts from per token; fewer make smaller messages in rejection mode."
    )
    draft_vocabulary: str = Field(
        "", description="JSON file with the ids that a model may draft, as a list or under 'ids'; empty: all."
    )
    suffix_shared_tokens: int = Field(
        65_536, ge=0, description="Tokens of ended sessions that suffix remembers per cache salt; 0 for none."
    )
    suffix_factor: float = Field(2.0, gt=0, le=64, description="Tokens that suffix guesses per token that matched.")
    suffix_certainty: float = Field(
        0.1, gt=0, le=1, description="How likely a token must be to be reached for suffix to guess it."
    )
    ngram_max: int = Field(4, ge=1, le=16, description="Longest run of tokens that ngram looks up.")
    ngram_min: int = Field(2, ge=1, le=16, description="Shortest run of tokens that ngram looks up.")

    @property
    def own_key(self) -> tuple[str, SecretStr]:
        """The fleet key opens more than a drafter needs; it does where no other is given."""
        return ("drafter_key", self.drafter_key) if self.drafter_key.get_secret_value() else super().own_key
