"""Targets by hub id: their files are downloaded before anything is read from them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch

from outrider.engine.vllm import loading
from outrider.protocol.errors import StartupError
from tests.vllm.conftest import options


class Started(Exception):
    """Stands for a vLLM that starts."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the revisions that were asked for, by id; the folder is put there under "folder"."""
    asked: dict[str, Any] = {}

    def download(name: str, *, allow_patterns: list[str], revision: str | None = None) -> str:
        if name == "owner/absent":
            raise OSError("no such repository")
        asked.setdefault(name, []).append(revision)
        return str(asked["folder"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def test_a_verifier_starts_with_a_hub_id(model: Path, hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def start(given: Any) -> None:
        raise Started(given.model)

    monkeypatch.setattr(loading, "VllmCore", start)
    hub["folder"] = model
    with pytest.raises(Started, match=str(model)):
        loading.load_core("owner/name", options(), lambda stage: None)
    with pytest.raises(StartupError, match="no such repository"):
        loading.load_core("owner/absent", options(), lambda stage: None)


def test_an_attached_engine_is_described_by_its_hub_id(model: Path, hub: dict[str, Any]) -> None:
    hub["folder"] = model
    config = SimpleNamespace(
        model="owner/name",
        revision="v2",
        tokenizer=str(model),
        quantization=None,
        dtype=torch.float32,
        max_model_len=64,
        get_vocab_size=lambda: 100,
    )
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
    device = SimpleNamespace(device_type="cpu")
    served: Any = SimpleNamespace(model_config=config, parallel_config=parallel, device_config=device)
    info = loading.describe_served(served)
    assert (info.vocab_size, info.device, hub["owner/name"]) == (100, "cpu", ["v2"])
