"""Settings of the drafter."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr

from outrider.base.config import DrafterKey, Int, WorkerSettings


class DrafterSettings(WorkerSettings, DrafterKey):
    """Propose tokens for the target model of a verifier."""

    kind: str = Field(
        "auto",
        description="Drafting method: ngram, suffix, model, translate, early-exit, medusa, eagle, published, or "
        "several joined by +. auto: the method of --model; without --model, the best method for the target that needs "
        "no further files.",
    )
    model: str = Field(
        "",
        description="For model and translate: a directory, a .gguf file or a hub id. For eagle, medusa and early-exit: "
        "a directory made by `outrider train`; empty: the bundled one. For early-exit also: a number of layers. For "
        "published: the directory of a checkpoint.",
    )
    target: str = Field(
        "default", description="Target model, for methods that read parts of it: a directory, a .gguf file or a hub id."
    )
    feature_dtype: Literal["float16", "fp8"] = Field(
        "float16",
        description="Number format of hidden states on the wire; fp8 halves their bytes and costs acceptance.",
    )
    draft_candidates: int = Field(24, ge=1, le=32, description="Candidate ids per guess in rejection and block mode.")
    draft_vocabulary: str = Field(
        "", description="JSON file with the ids that a model may draft, as a list or under 'ids'; empty: all."
    )
    suffix_shared_tokens: Int = Field(65_536, ge=0, description="suffix: tokens kept of ended sessions per salt.")
    suffix_factor: float = Field(2.0, gt=0, le=64, description="suffix: maximum length of a guess per matched token.")
    suffix_certainty: float = Field(0.1, gt=0, le=1, description="suffix: least probability that a token's path holds.")
    ngram_max: int = Field(4, ge=1, le=16, description="ngram: longest sequence to look up, tokens.")
    ngram_min: int = Field(2, ge=1, le=16, description="ngram: shortest sequence to look up, tokens.")

    @property
    def own_key(self) -> tuple[str, SecretStr]:
        """Return the drafter key, or the fleet key if only that is set: a drafter needs fewer rights than it grants."""
        has_own = bool(self.drafter_key.get_secret_value().strip())
        return super().own_key if self.fleet_key and not has_own else ("drafter_key", self.drafter_key)
