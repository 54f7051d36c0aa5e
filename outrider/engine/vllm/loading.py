"""Loading a target on vLLM: start, self-test, identity and cost, before it serves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider.engine.checks.step_cost import rising
from outrider.engine.loading.identity import WeightSample, describe, sample_stride
from outrider.engine.loading.selection import startup_errors
from outrider.engine.paged.arithmetic import USUAL_KERNELS, combine, kernel_arithmetic, torch_functions_digest
from outrider.engine.vllm.compatibility import installed_version
from outrider.engine.vllm.core import CoreOptions, VllmCore
from outrider.engine.vllm.messages import Opening, PlannedSession
from outrider.models.hub import download, find_path, locate, locate_safetensors
from outrider.models.pretrained import empty_model
from outrider.models.tokenizer import read_tokenizer
from outrider.protocol.cost_curve import UNKNOWN_COST, CostCurve
from outrider.protocol.errors import StartupError
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.vocabulary import Vocabulary

COST_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_CONTEXT = 64
_ROUNDS = 2
_BUDGET_S = 20.0
_TEST_TOKENS = 8
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # of a model on the hub


@dataclass(frozen=True, slots=True)
class LoadedCore:
    """A tested engine core, with its identity, tokenizer, vocabulary and cost curve."""

    core: VllmCore
    info: ModelInfo
    tokenizer: PreTrainedTokenizerBase
    vocabulary: Vocabulary
    cost: CostCurve


def load_core(name: str, options: CoreOptions, progress: Callable[[str], None]) -> LoadedCore:
    """Locate a model and start vLLM with it; raise StartupError with the reason and remedy."""
    path = _folder(locate_safetensors(name, progress))
    if not path.is_dir() or not list(path.glob("*.safetensors")):
        message = f"engine vllm needs a directory with safetensors, {name} is none"
        raise StartupError(message, field="target", value=name, limit="a directory or hub id with safetensors")
    with startup_errors(name, "this architecture"):
        tokenizer = read_tokenizer(path)
        vocabulary = Vocabulary.of(tokenizer)
        model = _empty(path)
    progress(f"loading {name} with vLLM {installed_version()}")
    with startup_errors(name):
        core = VllmCore(replace(options, model=path))
    try:
        info = _describe(path, model, core.config, tokenizer, vocabulary)
        progress("testing guesses")
        self_test(core, options)
        progress("measuring step times")
        cost = measure_cost(core, options)
    except BaseException:
        core.close()
        raise
    progress(f"engine vllm {installed_version()} ({core.runner}) on {info.device}, weights in {info.dtype}")
    return LoadedCore(core, info, tokenizer, vocabulary, cost)


def self_test(core: VllmCore, options: CoreOptions) -> None:
    """Raise StartupError unless guesses change no token and right ones are accepted: vLLM might ignore them."""
    width = min(options.max_guesses, _TEST_TOKENS - 1)
    plain, steps = _generate(core, "self-test plain", lambda done: ())
    right, right_steps = _generate(core, "self-test right", lambda done: plain[done : done + width])
    vocab_size = core.config.model_config.get_vocab_size()
    wrong, wrong_steps = _generate(
        core, "self-test wrong", lambda done: [(token + 1) % vocab_size for token in plain[done : done + width]]
    )
    expected = 1 + -(-(_TEST_TOKENS - 1) // (1 + width))
    if not plain == right == wrong or (steps, right_steps, wrong_steps) != (_TEST_TOKENS, expected, _TEST_TOKENS):
        raise StartupError(
            f"vLLM does not verify guesses as it must: {len(plain)} tokens took {steps} steps without guesses, "
            f"{right_steps} with right ones instead of {expected}, {wrong_steps} with wrong ones; texts are "
            f"{'equal' if plain == right == wrong else 'not equal'}",
            field="engine",
            value="vllm",
            limit="another version of vLLM, or another engine",
        )


def _generate(core: VllmCore, name: str, guess: Callable[[int], Sequence[int]]) -> tuple[list[int], int]:
    """Return a few tokens that follow a fixed prompt, and the number of steps that they took."""
    prompt = [1 + index % 7 for index in range(16)]
    params = SamplingParams(seed=1, temperature=0.0, max_tokens=_TEST_TOKENS)
    core.add(name, prompt, Opening(params, len(prompt)), salt=name)
    tokens: list[int] = []
    steps = 0
    while len(tokens) < _TEST_TOKENS and steps < 2 * _TEST_TOKENS:
        guesses = tuple(guess(len(tokens))[: _TEST_TOKENS - len(tokens) - 1]) if tokens else ()
        core.step({name: PlannedSession(len(prompt) + len(guesses), guesses)})
        steps += 1
        computed = core.scheduler.computed[name]
        if computed.verified is None:
            reason = computed.error or "no token came"
            raise StartupError(f"vLLM's first steps failed: {reason}", field="engine", value="vllm")
        tokens += computed.verified.tokens
    core.abort([name])
    return tokens, steps


def measure_cost(core: VllmCore, options: CoreOptions) -> CostCurve:
    """Return the best times of steps by their tokens, spread over as many sessions as they take."""
    per_session = 1 + options.max_guesses
    room = _CONTEXT + _ROUNDS * len(COST_TOKENS) + per_session + core.block_tokens  # of a session
    most = min(options.max_sessions, core.capacity_tokens // room)
    context = min(_CONTEXT, core.context_length // 4)
    counts = [tokens for tokens in COST_TOKENS if -(-tokens // per_session) <= most]
    if not counts or core.context_length < room:
        return UNKNOWN_COST
    names = [f"cost {index}" for index in range(-(-counts[-1] // per_session))]
    params = SamplingParams(seed=1, temperature=0.0, max_tokens=core.context_length - context)
    for index, name in enumerate(names):
        core.add(name, [1 + index % 7] * context, Opening(params, context), salt=name)
        core.step({name: PlannedSession(context)})
    best = [float("inf")] * len(counts)
    started = time.perf_counter()
    for _ in range(_ROUNDS):
        for index, tokens in enumerate(counts):
            plan = dict(_spread(names, tokens, per_session))
            began = time.perf_counter()
            core.step(plan)
            best[index] = min(best[index], 1000 * (time.perf_counter() - began))
        if time.perf_counter() - started > _BUDGET_S:
            break
    core.abort(names)
    return CostCurve(tuple(counts), rising(best))


def _spread(names: Iterable[str], tokens: int, per_session: int) -> Iterator[tuple[str, PlannedSession]]:
    """Yield sessions with `tokens` tokens in all; their guesses are wrong."""
    for name in names:
        if tokens <= 0:
            return
        count = min(tokens, per_session)
        yield name, PlannedSession(count, (0,) * (count - 1))
        tokens -= count


def _empty(path: Path) -> PreTrainedModel:
    """Return the model without weights; one that needs code of its own is refused without a question."""
    return empty_model(AutoConfig.from_pretrained(path, trust_remote_code=False), path)


def describe_served(vllm_config: Any) -> ModelInfo:
    """Return the identity of the model that a vLLM with this configuration serves."""
    config = vllm_config.model_config
    with startup_errors(config.model, "this architecture"):
        found = locate(config.model, lambda stage: None) if find_path(config.model) else config.model
        path = _folder(found, config.revision)
        tokenizer = read_tokenizer(config.tokenizer)
        vocabulary = Vocabulary.of(tokenizer)
        return _describe(path, _empty(path), vllm_config, tokenizer, vocabulary)


def _folder(found: Path | str, revision: str | None = None) -> Path:
    """Return the folder of a model. That of a hub id is downloaded once, to where vLLM keeps it."""
    if isinstance(found, Path):
        return found
    return download(found, "model", revision=revision, allow_patterns=_FILES)


def _describe(
    path: Path, model: PreTrainedModel, vllm_config: Any, tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary
) -> ModelInfo:
    """Return the identity of the weights; what else decides the numbers, as vLLM has it, is in the fingerprint."""
    config, parallel = vllm_config.model_config, vllm_config.parallel_config
    samples = list(_read_samples(path, model, config.dtype))
    info = describe(path.name, model, tokenizer, vocabulary, config.quantization or "none", samples)
    device = str(vllm_config.device_config.device_type)
    ranks = f"{parallel.tensor_parallel_size} x {parallel.pipeline_parallel_size} ranks"
    arithmetic = f"vLLM {installed_version()} on {device}, {ranks}, torch {torch.__version__}"
    changed = "" if (cache := vllm_config.cache_config.cache_dtype) == "auto" else f", {cache} cache"
    more = (config.hf_overrides, config.quantization_config, config.hf_config_path)
    changed += "".join(f", {each}" for each in more if each)
    exact = device == "cpu" and info.dtype == "float32" and not changed
    return replace(
        info,
        fingerprint=combine(info.fingerprint, f"{arithmetic}{changed}, torch's functions {torch_functions_digest()}"),
        # In float32 on a CPU the text is that of Outrider's own kernels, but for ties closer than rounding.
        text_digest=combine(info.fingerprint, kernel_arithmetic(USUAL_KERNELS)) if exact else "",
        vocab_size=config.get_vocab_size(),
        context_length=min(info.context_length, int(config.max_model_len)),
        device=device,
    )


def _read_samples(path: Path, model: PreTrainedModel, dtype: torch.dtype) -> Iterator[WeightSample]:
    """Yield samples of a model's weights from its files, in the model's order and the number format `dtype`.

    A family whose files name weights otherwise is sampled by the files' names: no trained drafter fits it then.
    """
    files: dict[str, Any] = {}
    for file in sorted(path.glob("*.safetensors")):
        opened = safe_open(file, framework="pt")
        files |= dict.fromkeys(opened.keys(), opened)  # type: ignore[no-untyped-call]
    stored = _stored_names(model, files) or {name: name for name in sorted(files)}
    for name, where in stored.items():
        part = files[where].get_slice(where)
        shape = tuple(part.get_shape())
        yield WeightSample(name, shape, _strided(part, shape).to(dtype))


def _stored_names(model: PreTrainedModel, files: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the name in the files of each of a model's weights; None: some are not there."""
    found: dict[str, str] = {}
    by_name = dict(model.named_parameters(remove_duplicate=False))
    # Tied weights are stored once.
    shared = {id(parameter): name for name, parameter in by_name.items() if name in files}
    for name in model.state_dict():
        where = name if name in files else shared.get(id(by_name.get(name)))
        if where is None:
            return None
        found[name] = where
    return found


def _strided(part: Any, shape: Sequence[int]) -> torch.Tensor:
    """Read evenly spread values of a stored weight, without reading all of it."""
    num_values = math.prod(shape)
    if len(shape) < 2:
        values: torch.Tensor = part[:] if shape else part[...].reshape(1)
        return values[:: sample_stride(num_values)]
    width = num_values // shape[0]
    indices = range(0, num_values, sample_stride(num_values))
    rows = {row: part[row : row + 1].reshape(-1) for row in sorted({index // width for index in indices})}
    return torch.stack([rows[index // width][index % width] for index in indices])
