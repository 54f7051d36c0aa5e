"""Targets by hub id, downloaded before anything is read from them, their identity, and arguments that are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch

from outrider.engine.vllm import core, loading
from outrider.protocol.errors import StartupError
from tests.vllm.conftest import options


class Started(BaseException):
    """Stands for a vLLM that starts; an Exception would be one that does not."""


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


def served(model: Path, *, name: str = "", cache_dtype: str = "auto", **more: Any) -> Any:
    """Return vLLM's configuration, as far as a model's identity is read from it."""
    given = {
        "revision": None,
        "tokenizer": str(model),
        "quantization": None,
        "dtype": torch.float32,
        "max_model_len": 64,
        "hf_overrides": {},
        "quantization_config": None,
        "hf_config_path": None,
        "get_vocab_size": lambda: 100,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(model=name or str(model), **given | more),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        device_config=SimpleNamespace(device_type="cpu"),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
    )


def test_an_attached_engine_is_described_by_its_hub_id(model: Path, hub: dict[str, Any]) -> None:
    hub["folder"] = model
    info = loading.describe_served(served(model, name="owner/name", revision="v2"))
    assert (info.vocab_size, info.device, hub["owner/name"]) == (100, "cpu", ["v2"])


def test_arguments_that_change_the_numbers_change_the_identity(model: Path) -> None:
    """Verifiers with equal fingerprints replace each other, and one text is promised of our own engine and vLLM."""
    settings: list[dict[str, Any]] = [
        {"cache_dtype": "fp8"},
        {"quantization": "fp8"},
        {"hf_overrides": {"rope_theta": 100.0}},
        {"quantization_config": {"linear": "int8"}},
        {"hf_config_path": "elsewhere"},
    ]
    plain, *others = [loading.describe_served(served(model, **each)) for each in ({}, *settings)]
    assert plain.text_digest
    assert not any(each.text_digest for each in others)
    assert len({each.fingerprint for each in (plain, *others)}) == 1 + len(settings)


def test_arguments_that_cannot_be_given_are_named(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of another model the verifier would tell the identity of its target, and a pipeline changes texts."""
    parallel = ("--pipeline-parallel-size 2", "--data-parallel-size 2")
    for given in ("--no-such-flag", "--help", "--model other", *parallel):
        with pytest.raises(StartupError, match=f"vLLM refuses its settings: .*{given.split()[0]}"):
            loading.load_core(str(model), options(more=given), lambda stage: None)
    told = "".join(capfd.readouterr())
    assert "usage:" not in told, "a reason, not hundreds of flags"
    assert "Traceback" not in told


def test_each_worker_judges_all_requests(model: Path) -> None:
    """vLLM can share the requests of a step out among its workers: of all but the first one's nothing was known."""
    given = options(more="--enable-batch-sharded-sampling", tensor_parallel=2)
    config = core._config(replace(given, model=model))
    assert not config.parallel_config.enable_batch_sharded_sampling
