"""vLLM's own module classes of published drafters, loaded by its own loader: the reference of our draft logits.

Its attention kernels are replaced by the plain formula, so that rows can be dropped without an engine around them.
`python -m tests.vllm.published_oracle` writes the fixtures that `make test` compares with.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import DeepseekV3Config, Glm4MoeConfig, PretrainedConfig, Qwen2Config, Qwen3NextConfig
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
    model_parallel_is_initialized,
    parallel_state,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP
from vllm.model_executor.models.glm4_moe_mtp import Glm4MoeMTP
from vllm.model_executor.models.mimo_mtp import MiMoMTP
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
from vllm.model_executor.models.qwen3_next_mtp import Qwen3NextMTP
from vllm.utils.torch_utils import set_default_torch_dtype

from outrider.testing.toy_models import make_model
from tests import published
from tests.published import CASES, Call

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "published"
METHODS: dict[str, dict[str, Any]] = {
    "dflash": {"method": "dflash"},
    "dspark": {"method": "dspark"},
    "eagle": {"method": "eagle"},
    "eagle3": {"method": "eagle3"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
}
# Classes of modules within targets, and the configurations that they read.
MODULES: dict[str, tuple[type, type[PretrainedConfig]]] = {
    "deepseek": (DeepSeekMTP, DeepseekV3Config),
    "glm": (Glm4MoeMTP, Glm4MoeConfig),
    "mimo": (MiMoMTP, Qwen2Config),  # transformers do not know MiMo's, which is that of Qwen2 with more
    "mtp": (Qwen3NextMTP, Qwen3NextConfig),
    "qwen": (Qwen3NextMTP, Qwen3NextConfig),
}


class Oracle:
    """A drafter of vLLM with the interface of ours."""

    def __init__(self, target: Path, checkpoint: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        method = METHODS.get(name.partition("-")[0].partition(".")[0])
        self._cached: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._length = 0
        oracle = self

        def forward(layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> torch.Tensor:
            return oracle._attend(layer, query, key, value)

        monkeypatch.setattr(Attention, "forward", forward)
        monkeypatch.setattr(VllmConfig, "_validate_v1_model_runner", lambda _: None)  # no runner runs
        monkeypatch.setattr(DFlashQwen3Model, "_normalize_context_k", _normed_keys)
        monkeypatch.setenv("VLLM_MLA_DISABLE", "1")  # its kernels need a device
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # fails without an accelerator
        speculative = None if method is None else {**method, "model": str(checkpoint), "num_speculative_tokens": 3}
        config = EngineArgs(
            model=str(target), dtype="float32", enforce_eager=True, max_model_len=512, speculative_config=speculative
        ).create_engine_config()
        with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
            if not model_parallel_is_initialized():
                init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
                ensure_model_parallel_initialized(1, 1)
            monkeypatch.setattr(parallel_state, "_EP", parallel_state.get_tp_group())  # a toy target has no experts
            if speculative:
                self._model = get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
            else:
                self._model = _module(config, checkpoint, *MODULES[name.partition("-")[0]])
        self._config = config
        self._hidden = torch.empty(0)
        self._own = published.weights_of(checkpoint).keys()
        self.markov: Any = None

    def share(self, matrix: torch.Tensor) -> None:
        """Use the target's embeddings and head where the checkpoint has none, as vLLM does."""
        if not self._own & {"embed_tokens.weight", "model.embed_tokens.weight"}:
            self._model.model.embed_tokens.weight.data[: len(matrix)].copy_(matrix)
        if "lm_head.weight" not in self._own:
            self._model.compute_logits = self._model.compute_draft_logits = lambda hidden: functional.linear(
                hidden, matrix
            )

    @torch.no_grad()
    def run(self, call: Call) -> torch.Tensor:
        """Return the logits of the call's rows over the target's vocabulary."""
        self._length = call.cut
        tokens, combine = call.tokens, getattr(self._model, "combine_hidden_states", lambda states: states)
        hidden = self._hidden[-1:] if call.states is None else combine(call.states)
        if isinstance(self._model, DFlashQwen3ForCausalLM):
            return self._block(call, hidden)
        if call.masks:
            masks = torch.full((call.masks,), self._model.config.pard_token)
            tokens = torch.cat([tokens, masks])
            hidden = torch.cat([hidden, combine(self._model.mask_hidden).expand(call.masks, -1)])
        positions = torch.arange(call.cut, call.cut + len(tokens))
        with set_forward_context(None, self._config):
            output = self._model(tokens, positions, hidden)
        output, self._hidden = output if isinstance(output, tuple) else (output, output)
        logits: torch.Tensor = self._model.compute_logits(output)
        return logits

    def _block(self, call: Call, context: torch.Tensor) -> torch.Tensor:
        """Return the logits of a block; for DSpark with its bias, and its confidence as a last column."""
        model, count = self._model, len(context)
        for layer in model.model.layers:
            layer.self_attn.attn.impl.do_kv_cache_update = self._store
        slots = torch.arange(call.cut, call.cut + count)
        model.precompute_and_store_context_kv(context, slots, slots)
        self._length = call.cut + count
        tokens = torch.full((call.masks + 1,), 5)
        tokens[0] = call.tokens[-1]
        hidden = model(tokens, torch.arange(self._length, self._length + len(tokens)))
        if not isinstance(model, Qwen3DSparkForCausalLM):
            logits: torch.Tensor = model.compute_logits(hidden[1:])
            return logits
        hidden = hidden[0 if getattr(model.config, "sample_from_anchor", True) else 1 :]
        previous = published.previous_tokens(call, len(hidden))
        embedded = model.markov_embed(previous)
        bias = model.markov_bias(embedded)
        if self.markov is not None:
            bias = self.markov.block_bias(prev_token_ids=previous[None], hidden_states=hidden[None])[0]
        logits = model.compute_draft_logits(hidden) + bias
        return torch.cat([logits, model.compute_confidence(hidden, embedded)[:, None]], dim=-1)

    def _store(self, layer: Any, keys: torch.Tensor, values: torch.Tensor, _: object, slots: torch.Tensor) -> None:
        """Keep keys and values of committed tokens in the place of vLLM's paged cache."""
        first = int(slots[0])
        old = self._cached.get(layer.layer_name, (keys[:0], values[:0]))
        self._cached[layer.layer_name] = torch.cat([old[0][:first], keys]), torch.cat([old[1][:first], values])

    def drafted(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the columns of drafted ids, and these ids. DSpark's logits have no others, but the confidence."""
        if isinstance(self._model, Qwen3DSparkForCausalLM):
            return logits, self._model.map_draft_to_target(torch.arange(logits.shape[1] - 1))
        ids = (logits[0] > -torch.inf).nonzero()[:, 0]
        return logits[:, ids], ids

    def _attend(self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        rows = len(query)
        keys, values = key.view(rows, -1, layer.head_size), value.view(rows, -1, layer.head_size)
        if layer.layer_name in self._cached:
            known = self._cached[layer.layer_name]
            keys = torch.cat([known[0][: self._length], keys])
            values = torch.cat([known[1][: self._length], values])
        causal = not isinstance(self._model, DFlashQwen3ForCausalLM)
        if causal:  # the rows of a block are not kept
            self._cached[layer.layer_name] = keys, values
        queries = query.view(rows, -1, layer.head_size)
        groups = queries.shape[1] // keys.shape[1]
        scores = torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(groups, 1)) * layer.impl.scale
        future = torch.arange(len(keys)) > torch.arange(self._length, self._length + rows)[:, None]
        weights = functional.softmax(scores.masked_fill(future & causal, -torch.inf), dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(groups, 1)).flatten(1)


def _normed_keys(model: DFlashQwen3Model, keys: torch.Tensor) -> torch.Tensor:
    """Norm the keys of each layer by its own weights; vLLM's kernel for CPUs reads those of the first layer for all."""
    return torch.stack([layer.self_attn.k_norm(each) for layer, each in zip(model.layers, keys, strict=True)])


def _module(config: Any, checkpoint: Path, kind: Any, settings: type[PretrainedConfig]) -> Any:
    """Return a module that lies within a target."""
    values, weights = json.loads((checkpoint / "config.json").read_text()), published.weights_of(checkpoint)
    if "speculators_model_type" in values:
        values, weights = values["transformer_layer_config"], published.together(weights)
    for name in ("model_type", "architectures"):
        values.pop(name, None)
    read = settings(**values)
    config.model_config.hf_config = config.model_config.hf_text_config = read
    drafting = {"draft_model_config": SimpleNamespace(hf_config=read), "enable_adaptive_verification": False}
    config.speculative_config = SimpleNamespace(**drafting)
    with set_default_torch_dtype(torch.float32):
        model = kind(vllm_config=config)
    model.load_weights(weights.items())
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model.eval()


def _readable(checkpoint: Path) -> Path:
    """Return a checkpoint that vLLM reads: with the plain Markov head in the place of others."""
    weights, values = published.weights_of(checkpoint), json.loads((checkpoint / "config.json").read_text())
    if values.get("markov_head_type", "vanilla") == "vanilla":
        return checkpoint
    kept = {name: weight for name, weight in weights.items() if not name.startswith(_OTHER_HEADS)}
    return published.write(checkpoint.parent / "plain", values | {"markov_head_type": "vanilla"}, kept)


_OTHER_HEADS = ("markov_head.gate_proj", "markov_head.joint_proj")


def _markov(checkpoint: Path) -> Any:
    """Return a Markov head of the `speculators` library, for the kinds that vLLM does not have.

    `make prove-vllm` puts it beside the environment's packages: its release 0.9 needs other versions than these.
    """
    weights = published.weights_of(checkpoint)
    own = {name.removeprefix("markov_head."): weight for name, weight in weights.items() if "markov_head" in name}
    kind = "gated" if "gate_proj.weight" in own else "rnn" if "joint_proj.weight" in own else ""
    if not kind:
        return None
    file = Path(sys.prefix, "speculators", "speculators", "models", "dspark", "model_definitions.py")
    spec = importlib.util.spec_from_file_location("speculators_dspark", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vocab, rank = own["markov_w1.weight"].shape
    sizes = {"verifier_vocab_size": vocab, "draft_vocab_size": len(own["markov_w2.weight"]), "markov_rank": rank}
    head = module.MarkovHead(**sizes, hidden_size=published.HIDDEN, head_type=kind)
    head.load_state_dict(own)
    return head


def reference(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, list[tuple[Call, torch.Tensor, torch.Tensor]]]:
    """Return the checkpoint of a case, and its calls with vLLM's logits and drafted ids."""
    checkpoint = CASES[name](folder / name)
    target = make_model(folder / "target", seed=7, hidden=published.target_hidden(checkpoint), layers=6, context=1024)
    oracle = Oracle(target, _readable(checkpoint), name, monkeypatch)
    oracle.markov = _markov(checkpoint)
    oracle.share(published.target_embeddings())
    return checkpoint, [(call, *oracle.drafted(oracle.run(call))) for call in published.calls(name, checkpoint)]


def write_fixtures() -> None:
    FIXTURES.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
            _, results = reference(name, Path(folder), monkeypatch)
            recorded = {"logits": torch.cat([logits for _, logits, _ in results])}
            recorded["ids"] = results[0][2].clone()
            save_file(recorded, FIXTURES / f"{name}.safetensors")


if __name__ == "__main__":
    write_fixtures()
