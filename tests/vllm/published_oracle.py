"""vLLM's own module classes of published drafters, loaded by its own loader: the reference of our draft logits.

Its attention kernels are replaced by the plain formula, so that rows can be dropped without an engine around them.
`python -m tests.vllm.published_oracle` writes the fixtures that `make test` compares with.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import Qwen2Config
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
    model_parallel_is_initialized,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models.mimo_mtp import MiMoMTP
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
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


class Oracle:
    """A drafter of vLLM with the interface of ours."""

    def __init__(
        self, target: Path, checkpoint: Path, method: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._cached: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._length = 0
        oracle = self

        def forward(layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> torch.Tensor:
            return oracle._attend(layer, query, key, value)

        monkeypatch.setattr(Attention, "forward", forward)
        monkeypatch.setattr(VllmConfig, "_validate_v1_model_runner", lambda _: None)  # no runner runs
        monkeypatch.setattr(DFlashQwen3Model, "_normalize_context_k", _normed_keys)
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # fails without an accelerator
        speculative = None if method is None else {**method, "model": str(checkpoint), "num_speculative_tokens": 3}
        config = EngineArgs(
            model=str(target), dtype="float32", enforce_eager=True, max_model_len=512, speculative_config=speculative
        ).create_engine_config()
        with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
            if not model_parallel_is_initialized():
                init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
                ensure_model_parallel_initialized(1, 1)
            if speculative:
                self._model = get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
            else:
                self._model = _mimo(config, checkpoint)
        self._hidden = torch.empty(0)
        self._own = published.weights_of(checkpoint).keys()

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
        embedded = model.markov_embed(published.previous_tokens(call, len(hidden)))
        logits = model.compute_draft_logits(hidden) + model.markov_bias(embedded)
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


def _mimo(config: Any, checkpoint: Path) -> Any:
    """Return the module of MiMo; transformers do not know its configuration, which is that of Qwen2 with more."""
    values = json.loads((checkpoint / "config.json").read_text())
    del values["model_type"], values["architectures"]
    config.model_config.hf_config = Qwen2Config(**values)
    with set_default_torch_dtype(torch.float32):
        model = MiMoMTP(vllm_config=config)
    model.load_weights(published.weights_of(checkpoint).items())
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model.eval()


def reference(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, list[tuple[Call, torch.Tensor, torch.Tensor]]]:
    """Return the checkpoint of a case, and its calls with vLLM's logits and drafted ids."""
    checkpoint = CASES[name](folder / name)
    target = make_model(folder / "target", seed=7, hidden=published.target_hidden(checkpoint), layers=6, context=1024)
    oracle = Oracle(target, checkpoint, METHODS.get(name.partition("-")[0].partition(".")[0]), monkeypatch)
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
