"""Messages between the scheduler and the workers, on vLLM's own messages.

vLLM pickles its messages for workers in other processes, with all attributes of an instance. So ours are an
attribute of them, and of `SamplingParams.extra_args`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import Distribution
from outrider.speculation.verification import VerifyResult

EXTRA = "outrider"  # attribute of vLLM's messages, and key in its sampling parameters
LAYERS = "outrider_layers"  # key in vLLM's additional configuration: after which hidden states are needed
PADDING = -1  # a guess that is none


@dataclass(frozen=True, slots=True)
class Opening:
    """The sampling of one session, for the workers."""

    params: SamplingParams
    prompt_length: int


@dataclass(frozen=True, slots=True)
class PlannedSession:
    """The work of one session in a step."""

    num_tokens: int  # committed tokens and guesses, at most
    guesses: tuple[int, ...] = ()
    draft_probs: tuple[Distribution, ...] = ()  # one for each guess where verification needs them
    hidden_from: int | None = None  # position from which hidden states are needed; None: of no token


Plan = Mapping[str, PlannedSession]  # by request


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of a step for one session."""

    verified: VerifyResult | None = None  # None: a prompt chunk
    # Of consecutive committed tokens: the final ones, and those after each captured layer behind them.
    hidden_states: torch.Tensor | None = None  # [tokens, width]
    error: str = ""  # verification failed


@dataclass(frozen=True, slots=True)
class StepMasks:
    """Tokens that grammars allow at each row of a request, in place of vLLM's own grammar masks."""

    packed: Mapping[str, npt.NDArray[np.uint8]]  # [rows, vocabulary / 8]
    vocab_size: int

    def unpack(self, request: str) -> npt.NDArray[np.bool_] | None:
        """Return the masks of a request; None: it has no grammar.  # [rows, vocabulary]"""
        found = self.packed.get(request)
        return None if found is None else np.unpackbits(found, axis=-1, count=self.vocab_size).astype(np.bool_)


def extra(message: Any) -> Any:
    """Return our part of one of vLLM's messages, or an empty one."""
    return getattr(message, EXTRA, None) or {}
