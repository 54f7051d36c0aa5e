"""The identity of a loaded model: which tokens end its texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
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
