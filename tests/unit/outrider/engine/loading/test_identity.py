"""The identity of a loaded model: which tokens end its texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.protocol import convert
from outrider.protocol.fleet import SamplingDefaults
from outrider.testing.toy_models import make_model

END = 256  # of the tokenizer


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": [7, 9]}, {}, (7, 9, END)),
        ({"eos_token_id": 7}, {"eos_token_id": 9}, (7, END)),
        ({}, {"eos_token_id": [9, END]}, (9, END)),
        (None, {"eos_token_id": 9}, (9, END)),
        (None, {"eos_token_id": 50256}, (END,)),  # GPT-2's own, in a small vocabulary
        (None, {"eos_token_id": None}, (END,)),
        ({"eos_token_id": [7.0, 7.5, "8"]}, {}, (7, END)),
        ({"eos_token_id": [-1, 7]}, {}, (7, END)),  # no number of a token: it cannot be sent to a coordinator
    ],
)
def test_texts_end_where_transformers_ends_them(
    generation: dict[str, Any] | None, config: dict[str, Any], ends: tuple[int, ...], tmp_path: Path
) -> None:
    """A configuration that names no end token has that of its family: 2 for Llama, in any vocabulary."""
    made = make_model(tmp_path / "toy", seed=1, hidden=16, layers=1)
    settings = json.loads((made / "config.json").read_text())
    del settings["eos_token_id"]
    (made / "config.json").write_text(json.dumps(settings | config))
    (made / "generation_config.json").unlink()
    if generation is not None:
        (made / "generation_config.json").write_text(json.dumps(generation))
    loaded = load_model(str(made), EngineOptions(device="cpu", kv_tokens=256))
    assert loaded.engine.info.eos_token_ids == ends
    assert convert.model_from_proto(convert.model_to_proto(loaded.engine.info)).eos_token_ids == ends


@pytest.mark.parametrize(
    ("generation", "sampling"),
    [
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)),
        ({"temperature": 0.0, "min_p": 0.1, "max_new_tokens": 5}, SamplingDefaults(temperature=0.0, min_p=0.1)),
        ({"temperature": 0.6, "top_k": -1}, SamplingDefaults(temperature=0.6)),
        ({"temperature": "0.6"}, SamplingDefaults()),
        ({"temperature": 0.6, "top_k": 20.0}, SamplingDefaults()),
        ({"repetition_penalty": 0}, SamplingDefaults()),
        (None, SamplingDefaults()),
    ],
)
def test_the_sampling_that_the_makers_recommend_is_published_as_far_as_requests_can_have_it(
    generation: dict[str, Any] | None, sampling: SamplingDefaults, tmp_path: Path
) -> None:
    made = make_model(tmp_path / "toy", seed=1, hidden=16, layers=1)
    (made / "generation_config.json").unlink()
    if generation is not None:
        (made / "generation_config.json").write_text(json.dumps(generation))
    info = load_model(str(made), EngineOptions(device="cpu", kv_tokens=256)).engine.info
    assert info.sampling == sampling
    assert convert.model_from_proto(convert.model_to_proto(info)) == info
