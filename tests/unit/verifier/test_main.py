"""A verifier's KV cache: of the given size, or on a GPU as large as its free memory allows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from outrider.base.config import command
from outrider.engine.loading import selection
from outrider.engine.throttled import ThrottledEngine
from outrider.protocol.errors import StartupError
from outrider.settings.verifier import VerifierSettings
from tests.conftest import Models
from tests.emulated_cuda import emulated_cuda
from verifier.service import VerifierService
from verifier.startup import _build_all, build, serve
from verifier.vllm_target import follow


def _built(folder: Path, **given: object) -> VerifierService:
    return build(VerifierSettings(**given), folder, lambda stage: None, None)  # type: ignore[arg-type]


def _capacity(service: VerifierService) -> tuple[int, int]:
    """Return the tokens that sessions may reserve, and those that the engine holds."""
    return service.loop.load().kv_tokens_total, service._target._engine.capacity_tokens  # type: ignore[attr-defined]


async def test_without_a_size_the_cache_takes_a_gpus_free_memory(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "_GPU_RESERVE", 1 << 20)
    target = str(models.target)
    with emulated_cuda() as device:
        device.free_bytes = 64 << 20
        free = _capacity(_built(tmp_path, target=target, device="cuda"))
        given = _capacity(_built(tmp_path, target=target, device="cuda", kv_tokens=4096))
    assert free[0] == free[1] > 65_536
    assert given == (4096, 4096)
    assert _capacity(_built(tmp_path, target=target, device="cpu")) == (65_536, 65_536)


def test_a_drafter_that_is_not_there_is_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    stages: list[str] = []
    settings = VerifierSettings(target=str(tmp_path), own_drafter="suffix+eagle:/no/path")
    with pytest.raises(StartupError, match=r"drafter is suffix.eagle:/no/path: there is nothing at /no/path"):
        _build_all(settings, stages.append, None)
    assert not stages


def test_an_own_drafter_whose_metrics_would_have_no_port_is_refused_at_once(tmp_path: Path) -> None:
    settings = VerifierSettings(target=str(tmp_path), own_drafter="suffix", metrics_port=65535)
    with pytest.raises(StartupError, match="metrics_port is 65535, must be at most 65534: its own drafter"):
        _build_all(settings, print, None)


@pytest.mark.parametrize(("line", "wanted"), [([], 0), (["--kv-tokens", "0"], 0), (["--kv-tokens", "4096"], 4096)])
def test_the_command_line_may_leave_the_size_out(line: list[str], wanted: int) -> None:
    given: list[VerifierSettings] = []
    app = typer.Typer()
    app.command()(command(VerifierSettings, given.append, "verifier"))
    assert CliRunner().invoke(app, line).exit_code == 0
    assert [settings.kv_tokens for settings in given] == [wanted]


def test_a_size_has_a_least() -> None:
    app = typer.Typer()
    app.command()(command(VerifierSettings, lambda settings: None, "verifier"))
    assert CliRunner().invoke(app, ["--kv-tokens", "63"]).exit_code == 2


def test_options_are_refused_before_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifier.vllm_target.locate_safetensors", lambda *_: pytest.fail("downloads"))
    monkeypatch.setattr("verifier.vllm_target.check_installed", lambda: None)
    monkeypatch.setattr("verifier.vllm_target.set_up_logs", lambda *_, **__: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(StartupError, match="int8"):
        follow(VerifierSettings(engine="vllm", quantization="int8"), 1)


def test_the_mock_engine_has_a_pace(tmp_path: Path) -> None:
    service = build(VerifierSettings(engine="mock", pace="1:25"), tmp_path, print, None)
    assert isinstance(service._target._engine, ThrottledEngine)  # type: ignore[attr-defined]


def test_a_verifier_that_is_killed_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is restarted, and each time there was another copy of its tokenizer on the disk."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    served: list[str] = []

    def run(_name: str, _settings: VerifierSettings, build: Callable[[Callable[[str], None]], VerifierService]) -> None:
        service = build(lambda stage: None)
        served.append(service._tokenizer())
        assert not list(tmp_path.iterdir()), "a process that is killed now leaves them"

    monkeypatch.setattr("verifier.startup.run_worker", run)
    serve(VerifierSettings(engine="mock"))
    assert "WordLevel" in served[0]
