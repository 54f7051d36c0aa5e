"""vLLM's engine core in this process. Only workers of a split model are processes of their own."""

from __future__ import annotations

import os
import re
import shlex
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.engine.vllm.compatibility import check_installed
from outrider.engine.vllm.messages import EXTRA, LAYERS, Opening, Plan
from outrider.protocol.errors import StartupError

_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the core runs in this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "PYTHONSAFEPATH": "1",  # processes of vLLM run no modules of the folder that they start in
}
_SLACK = 64  # tokens beyond a session's last: vLLM must not end it
# vLLM makes room for guesses only where it has a drafter. This one needs no model; the judge silences it.
_ROOM = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 4}


@dataclass(frozen=True, slots=True)
class CoreOptions:
    """Settings of vLLM that Outrider decides."""

    dtype: str
    max_guesses: int
    max_sessions: int
    max_prompt_tokens: int  # per step
    kv_tokens: int | None = None  # None: as many as vLLM finds room for
    tensor_parallel: int = 1
    quantization: str = ""
    gpu_memory_share: float = 0.0  # 0: vLLM's default
    max_model_len: int = 0  # 0: the model's context
    layers: tuple[int, ...] = ()  # after which hidden states are handed out
    more: str = ""  # further arguments of `vllm serve`
    model: Path = Path()  # its folder, once it is located


class VllmCore:
    """An engine core with the judge installed in its workers."""

    def __init__(self, options: CoreOptions) -> None:
        _prepare()
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        config = _config(options)
        self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._threads = torch.get_num_threads()
        self._thread = threading.local()
        self._thread.counted = True
        self.layers = tuple(sorted(set(options.layers)))
        self.runner: str = self._core.collective_rpc("install_judge")[0]
        self.config = config
        self.scheduler: Any = self._core.scheduler  # the GuessingScheduler
        self._pool = self.scheduler.kv_cache_manager.block_pool

    @property
    def state_shape(self) -> tuple[int, int]:
        """Return the number of layers whose states can be handed out, and the width of a state."""
        model = self.config.model_config
        return (int(model.hf_text_config.num_hidden_layers) if self.layers else 0, int(model.get_hidden_size()))

    @property
    def state_device(self) -> torch.device:
        """Return where hidden states are: those of a split model come from another process."""
        alone = self.config.parallel_config.world_size == 1
        return torch.device(self.config.device_config.device_type if alone else "cpu")

    @property
    def block_tokens(self) -> int:
        return int(self.config.cache_config.block_size)

    @property
    def capacity_tokens(self) -> int:
        """Return how many tokens are held at once: of short sessions, or of one with the whole context."""
        return max(self._tokens_in(int(self._pool.num_gpu_blocks) - 1), self.context_length)  # one block is vLLM's own

    @property
    def free_tokens(self) -> int:
        """Return the capacity that no request holds; cached blocks of ended ones count as free."""
        return self._tokens_in(int(self._pool.get_num_free_blocks()))

    @property
    def evictable_tokens(self) -> int:
        """Return the capacity of cached blocks of ended requests, at most."""
        return min(self.free_tokens, self._tokens_in(len(self._pool.cached_block_hash_to_block)))

    def _tokens_in(self, blocks: int) -> int:
        """Return the tokens of short sessions in blocks: each kind of layers, such as windows, takes its own ones."""
        return blocks * self.block_tokens // len(self.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups)

    @property
    def context_length(self) -> int:
        return int(self.config.model_config.max_model_len)

    def add(self, name: str, tokens: Sequence[int], opening: Opening, salt: str = "") -> None:
        """Begin a request. Stops and lengths are not vLLM's to decide: it generates until `abort`."""
        from vllm import SamplingParams as VllmSampling
        from vllm.v1.engine import EngineCoreRequest

        sampling = VllmSampling(
            max_tokens=opening.prompt_length + opening.params.max_tokens - len(tokens) + _SLACK,
            ignore_eos=True,
            temperature=0.0,
            detokenize=False,
            extra_args={EXTRA: opening},
        )
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(tokens),
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=salt or None,
            data_parallel_rank=None,
        )
        self._core.add_request(*self._core.preprocess_add_request(request))

    def step(self, plan: Plan, masks: Any = None) -> None:
        """Run one step with the planned requests; `scheduler.computed` has what came of it."""
        if not hasattr(self._thread, "counted"):
            # OpenMP's number of threads belongs to the calling thread; vLLM's CPU kernels need that of the start.
            # vLLM has disabled torch.set_num_threads.
            self._thread.counted = True
            torch._C.set_num_threads(self._threads)
        self.scheduler.plan = plan
        self.scheduler.masks = masks or (lambda request, guesses: None)
        self.scheduler.computed = {}
        self._core.step_fn()

    def num_computed(self, name: str) -> int | None:
        """Return how many tokens of a request are cached; None: vLLM has ended it."""
        request = self.scheduler.requests.get(name)
        return None if request is None else int(request.num_computed_tokens)

    def abort(self, names: Iterable[str]) -> None:
        """End requests; unknown ones are accepted."""
        self._core.abort_requests(list(names))

    def close(self) -> None:
        self._core.shutdown()


def node_rank(more: str) -> int:
    """Return the rank of this machine among those that run the model, from further arguments of `vllm serve`."""
    found = re.search(r"(?:^|\s)(?:--node[-_]rank|-r)[\s=]+(\d+)", more)
    return int(found[1]) if found else 0


def run_ranks(options: CoreOptions) -> None:
    """Run the processes of a machine whose rank is not 0, until one of them ends. The core on rank 0 commands them."""
    _prepare()
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    executor = MultiprocExecutor(_config(options), monitor_workers=False)
    executor.start_worker_monitor(inline=True)


def _prepare() -> None:
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    check_installed()


def _config(options: CoreOptions) -> Any:
    """Return vLLM's configuration: arguments of `vllm serve` below, Outrider's own above."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    tokens_per_step = options.max_sessions * (1 + options.max_guesses) + options.max_prompt_tokens
    line = [
        *("--model", str(options.model), "--dtype", options.dtype, "--seed", "0", "--skip-tokenizer-init"),
        *("--max-num-seqs", str(options.max_sessions), "--max-num-batched-tokens", str(tokens_per_step)),
        *("--tensor-parallel-size", str(options.tensor_parallel)),
    ]
    if options.quantization:
        line += ["--quantization", options.quantization]
    if options.gpu_memory_share:
        line += ["--gpu-memory-utilization", str(options.gpu_memory_share)]
    if options.max_model_len:
        line += ["--max-model-len", str(options.max_model_len)]
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False, add_help=False))
    parser.error = _refuse  # vLLM's prints its usage, and ends the process without the reason
    try:
        given = parser.parse_args([*line, *shlex.split(options.more)])
        # Another identity, other texts, and a core that waits for others.
        if (given.model, given.pipeline_parallel_size, given.data_parallel_size) != (str(options.model), 1, 1):
            _refuse("--model is --target here, --pipeline-parallel-size and --data-parallel-size are 1")
        arguments = EngineArgs.from_cli_args(given)
        arguments.speculative_config = {**_ROOM, "num_speculative_tokens": options.max_guesses}
        arguments.scheduler_cls = "outrider.engine.vllm.scheduler.GuessingScheduler"
        arguments.worker_extension_cls = "outrider.engine.vllm.runners.JudgingWorker"
        if options.layers:
            arguments.worker_cls = "outrider.engine.vllm.capture.CapturingWorker"
            arguments.additional_config = {**arguments.additional_config, LAYERS: list(options.layers)}
        arguments.async_scheduling = False  # a guess hangs from the verdict of the step before
        arguments.enable_batch_sharded_sampling = False  # each worker judges all requests
        arguments.disable_log_stats = True
        config = arguments.create_engine_config()
    except Exception as error:
        message, limit = f"vLLM refuses its settings: {' '.join(str(error).split())}", "arguments of `vllm serve`"
        raise StartupError(message, field="vllm_args", value=options.more, limit=limit) from error
    if options.layers:
        _check_layers(config, options.layers)
    if options.kv_tokens is not None:
        _reserve(config, options.kv_tokens)
    return config


def _refuse(message: str) -> None:
    raise ValueError(message)


def _check_layers(config: Any, layers: Sequence[int]) -> None:
    """Raise StartupError unless the model hands out hidden states after these layers."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    model = config.model_config
    cls, architecture = model.registry.resolve_model_cls(model.architectures, model)
    given, number = ",".join(map(str, layers)), int(model.hf_text_config.num_hidden_layers)
    if max(layers) > number:
        raise StartupError(f"the model has {number} layers", field="state_layers", value=given, limit=f"1 to {number}")
    if not supports_eagle3(cls):
        message = f"vLLM hands out no hidden states of the layers of {architecture}"
        raise StartupError(message, field="state_layers", value=given, limit="none")


def _reserve(config: Any, kv_tokens: int) -> None:
    """Fix the KV cache's size in tokens. On a CPU vLLM would take nine tenths of the memory."""
    from vllm.platforms import current_platform

    text, block = config.model_config.hf_text_config, config.cache_config.block_size
    longest = config.model_config.max_model_len
    recent = (getattr(text, "sliding_window", None) or longest) + config.scheduler_config.max_num_batched_tokens
    # A token has a block in each group of layers, all of equal size. Those with windows keep recent ones, and a part.
    kinds = Counter(getattr(text, "layer_types", None) or ["full_attention"])
    needed = {kind: 1 + _parts(min(recent, longest), block) for kind in kinds}
    needed["full_attention"] = _parts(longest, block)
    groups = {kind: _parts(count, min(kinds.values())) for kind, count in kinds.items()}
    of_longest = sum(number * needed[kind] for kind, number in groups.items())
    blocks = 1 + max(_parts(kv_tokens, block), of_longest)  # one is vLLM's own
    config.cache_config.num_gpu_blocks_override = blocks
    if current_platform.is_cpu():
        model, parallel = config.model_config, config.parallel_config
        layers = _parts(model.get_num_layers(parallel), sum(groups.values()))  # of a group, and thus of a block
        values = 2 * layers * model.get_num_kv_heads(parallel) * model.get_head_size()
        config.cache_config.kv_cache_memory_bytes = blocks * block * values * model.dtype.itemsize


def _parts(whole: int, size: int) -> int:
    """Return the number of parts of a size, the last one maybe smaller."""
    return -(-whole // size)
