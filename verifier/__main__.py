"""`python -m verifier`: run the verifier service."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import structlog

from outrider.base.config import KV_TOKENS, flags, main
from outrider.base.logs import set_up_logs
from outrider.base.openmp import use_threads
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions, pick_device, pick_dtype
from outrider.engine.mock import MockEngine
from outrider.engine.tensor_parallel import RankGroup, join_ranks, run_follower
from outrider.engine.vllm.compatibility import check_installed, installed_version
from outrider.engine.vllm.core import CoreOptions, node_rank, run_ranks
from outrider.models.hub import locate_safetensors
from outrider.models.tokenizer import save_tokenizer
from outrider.observability.tracing import Tracing, make_tracing
from outrider.protocol.errors import StartupError
from outrider.runtime.serving import Service
from outrider.runtime.worker import run_worker
from outrider.settings.verifier import VerifierSettings
from verifier.engine_target import EngineTarget
from verifier.service import VerifierService

log = structlog.get_logger(__name__)


def build(
    settings: VerifierSettings, scratch: Path, progress: Callable[[str], None], rank_group: RankGroup | None
) -> VerifierService:
    tracing = make_tracing(settings.otlp_endpoint, "verifier")
    if settings.selected_engine == "mock":
        log.warning("mock engine selected: no model, for measuring overhead only")
        mock = MockEngine()
        return VerifierService(
            EngineTarget(mock), mock.vocabulary, mock.save_tokenizer(scratch), settings, tracing=tracing
        )
    if runs_on_vllm(settings):
        return build_on_vllm(settings, scratch, progress, tracing)
    loaded = load_model(settings.target, EngineOptions.of(settings), progress, rank_group)
    files = save_tokenizer(loaded.tokenizer, scratch)
    fitted = settings.model_copy(update={"kv_tokens": settings.kv_tokens or loaded.engine.capacity_tokens})
    return VerifierService(EngineTarget(loaded.engine), loaded.vocabulary, files, fitted, loaded.cost, tracing)


def build_on_vllm(
    settings: VerifierSettings, scratch: Path, progress: Callable[[str], None], tracing: Tracing
) -> VerifierService:
    # Imported here: not everybody has vLLM.
    from outrider.engine.vllm.loading import load_core
    from verifier.vllm_target import VllmTarget

    loaded = load_core(settings.target, vllm_options(settings), progress)
    files = save_tokenizer(loaded.tokenizer, scratch)
    fitted = settings.model_copy(update={"kv_tokens": loaded.core.capacity_tokens})
    target = VllmTarget(loaded.core, loaded.info)
    return VerifierService(target, loaded.vocabulary, files, fitted, loaded.cost, tracing)


def vllm_options(settings: VerifierSettings) -> CoreOptions:
    """Return the options of vLLM; the place of the model is found later."""
    check_installed()
    if settings.quantization == "int8":
        raise StartupError("int8 is a format of engine native", field="quantization", value="int8", limit="none or fp8")
    if settings.pipeline_parallel > 1:
        raise StartupError(
            "pipeline parallelism does not work on vLLM yet: use --tensor-parallel, also over several machines",
            field="pipeline_parallel",
            value=settings.pipeline_parallel,
            limit="1",
        )
    device = pick_device(settings.device)
    on_cpu = device.type == "cpu"
    return CoreOptions(
        model=Path(),
        dtype=str(pick_dtype(settings.dtype, device)).removeprefix("torch."),
        max_guesses=settings.guess_rows,
        max_sessions=settings.max_sessions,
        max_prompt_tokens=settings.prefill_rows,
        # On a GPU the cache takes the memory that is free, unless a size is given.
        kv_tokens=settings.kv_tokens or (KV_TOKENS if on_cpu else None),
        tensor_parallel=settings.tensor_parallel,
        pipeline_parallel=settings.pipeline_parallel,
        quantization="" if settings.quantization == "none" else settings.quantization,
        gpu_memory_share=settings.gpu_memory,
        max_model_len=settings.max_model_len,
        more=settings.vllm_args,
    )


def runs_on_vllm(settings: VerifierSettings) -> bool:
    """Return whether vLLM runs the model; raise StartupError for its settings without it."""
    engine = settings.selected_engine
    if engine == "vllm":
        return True
    device = pick_device(settings.device, engine)
    if engine == "auto" and device.type == "cuda" and installed_version() is not None:
        log.info("engine vllm selected, as vLLM is installed", device=str(device), version=installed_version())
        return True
    for name in ("pipeline_parallel", "gpu_memory", "max_model_len", "vllm_args"):
        value, default = getattr(settings, name), VerifierSettings.model_fields[name].default
        if value != default:
            raise StartupError(
                f"--{name.replace('_', '-')} needs --engine vllm", field=name, value=value, limit=f"{default!r} here"
            )
    return False


def serve(settings: VerifierSettings, rank_group: RankGroup | None = None) -> None:
    with tempfile.TemporaryDirectory(prefix="outrider-verifier-") as scratch:
        use_threads(settings.threads)

        def built(progress: Callable[[str], None]) -> Service:
            return build(settings, Path(scratch), progress, rank_group)

        run_worker("verifier", settings, built)


def follow(settings: VerifierSettings, rank: int) -> None:
    """Run this machine's processes of a model whose verifier is on another machine."""
    set_up_logs(settings.log_level, as_json=settings.log_json, service="verifier")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    options = replace(vllm_options(settings), model=Path(locate_safetensors(settings.target, log.info)))
    log.info("running processes of a verifier on another machine", node_rank=rank)
    run_ranks(options)
    log.error("a process of the model ended, so this machine's end too", node_rank=rank)
    sys.exit(1)


def run(settings: VerifierSettings) -> None:
    rank = node_rank(settings.vllm_args)
    if rank and runs_on_vllm(settings):
        follow(settings, rank)
        return
    if settings.tensor_parallel == 1 or runs_on_vllm(settings):
        serve(settings)
        return
    set_up_logs(settings.log_level, as_json=settings.log_json, service="verifier")
    command = [sys.executable, "-m", "verifier", *flags(settings)]
    with join_ranks(settings.tensor_parallel, settings, command) as rank_group:
        if rank_group.is_leader:
            serve(settings, rank_group)
        else:
            run_follower(
                load_model(settings.target, EngineOptions.of(settings), rank_group=rank_group).engine, rank_group
            )


if __name__ == "__main__":
    main(VerifierSettings, run, "verifier")
