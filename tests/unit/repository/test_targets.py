"""The important architectures as targets: right, or refused in a sentence. All of them: tests/prove/test_targets.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architectures import ORIGINAL, fates

FAST = {"native", "transformers"}
SLOW = {"transformers"}
SERVED = {
    **dict.fromkeys(("llama", "qwen3", "mistral", "gemma2", "gpt2"), FAST),
    **dict.fromkeys(("phi3, longrope", "llama, Llama 3's scaling", "qwen2, sliding window"), FAST),
    **dict.fromkeys(("gemma3", "mistral3"), FAST),  # these see images, and so do the next
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl"), SLOW),
    **dict.fromkeys(("mixtral", "qwen3_moe", "olmo2", "gpt_oss", "phimoe, longrope"), SLOW),
    **dict.fromkeys(("llama4_text, without temperature",), SLOW),
}
STATE = "state that Outrider cannot roll back"
REFUSED = {
    **dict.fromkeys(("falcon_h1", "jamba", "qwen3_next", "qwen3_5_text", "lfm2", "nemotron_h", "mamba", "rwkv"), STATE),
    **dict.fromkeys(("bloom", "mpt", "falcon", "gptj"), "does not go through transformers' attention interface"),
    **dict.fromkeys(("deepseek_v4", "xlnet", "hrm_text"), ""),
    **dict.fromkeys(("cpmant", "gpt_neo", "inkling_text"), ""),
    **dict.fromkeys(("roberta", "xlm-roberta"), ""),
    "doge": "an attention mask of its own",
    "llama4_text": "a token's index in the step",
}


@pytest.mark.parametrize("name", SERVED)
def test_it_is_served_and_right(name: str) -> None:
    (found,) = fates([name])
    assert not found.wrong
    assert not found.refusal
    assert not found.not_built
    assert set(found.engines) == SERVED[name]
    assert (found.context == ORIGINAL) == ("longrope" in name)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_a_sentence(name: str) -> None:
    (found,) = fates([name])
    assert not found.not_built
    assert not found.engines
    assert REFUSED[name] in found.refusal
    assert Path(found.refusal.split()[0]).name == "tiny", "the message begins with the model's name"
