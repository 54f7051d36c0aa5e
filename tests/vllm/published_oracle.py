"""vLLM's own module classes of published drafters, loaded by its own loader: the reference of our draft logits.

Its attention kernels are replaced by the plain formula, so that rows can be dropped without an engine around them.
`python -m tests.vllm.published_oracle` writes the fixtures that `make test` compares with.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import Qwen2Config
from vllm.config import set_current_vllm_config
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
from vllm.utils.torch_utils import set_default_torch_dtype

from outrider.testing.toy_models import make_model
from tests import published
from tests.published import CASES, Call

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "published"
METHODS: dict[str, dict[str, Any]] = {
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

    def share(self, matrix: torch.Tensor) -> None:
        """Use the target's embeddings and head, as vLLM does for checkpoints without them."""
        self._model.model.embed_tokens.weight.data[: len(matrix)].copy_(matrix)
        if hasattr(self._model, "lm_head"):
            self._model.lm_head.weight.data[: len(matrix)].copy_(matrix)

    @torch.no_grad()
    def run(self, call: Call) -> torch.Tensor:
        """Return the logits of the call's rows over the target's vocabulary."""
        self._length = call.cut
        tokens, combine = call.tokens, getattr(self._model, "combine_hidden_states", lambda states: states)
        hidden = self._hidden[-1:] if call.states is None else combine(call.states)
        if call.masks:
            masks = torch.full((call.masks,), self._model.config.pard_token)
            tokens = torch.cat([tokens, masks])
            hidden = torch.cat([hidden, combine(self._model.mask_hidden).expand(call.masks, -1)])
        positions = torch.arange(call.cut, call.cut + len(tokens))
        output = self._model(tokens, positions, hidden)
        output, self._hidden = output if isinstance(output, tuple) else (output, output)
        if not hasattr(self._model, "lm_head"):  # vLLM lends EAGLE-1 the target's
            return functional.linear(output, published.target_embeddings())
        logits: torch.Tensor = self._model.compute_logits(output)
        return logits

    def _attend(self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        rows = len(query)
        keys, values = key.view(rows, -1, layer.head_size), value.view(rows, -1, layer.head_size)
        if layer.layer_name in self._cached:
            known = self._cached[layer.layer_name]
            keys = torch.cat([known[0][: self._length], keys])
            values = torch.cat([known[1][: self._length], values])
        self._cached[layer.layer_name] = keys, values
        queries = query.view(rows, -1, layer.head_size)
        groups = queries.shape[1] // keys.shape[1]
        scores = torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(groups, 1)) * layer.impl.scale
        future = torch.arange(len(keys)) > torch.arange(self._length, self._length + rows)[:, None]
        weights = functional.softmax(scores.masked_fill(future, -torch.inf), dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(groups, 1)).flatten(1)


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
) -> tuple[Path, Iterator[tuple[Call, torch.Tensor]]]:
    """Return the checkpoint of a case, and its calls with vLLM's logits."""
    checkpoint = CASES[name](folder / name)
    target = make_model(folder / "target", seed=7, hidden=published.target_hidden(checkpoint), layers=6, context=1024)
    oracle = Oracle(target, checkpoint, METHODS.get(name.partition("-")[0].partition(".")[0]), monkeypatch)
    if not published.weights_of(checkpoint).keys() & {"embed_tokens.weight", "model.embed_tokens.weight"}:
        oracle.share(published.target_embeddings())
    return checkpoint, ((call, oracle.run(call)) for call in published.calls(name, checkpoint))


def write_fixtures() -> None:
    FIXTURES.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
            _, results = reference(name, Path(folder), monkeypatch)
            logits = torch.cat([logits for _, logits in results])
            drafted = logits[0] > -torch.inf
            save_file(
                {"logits": logits[:, drafted].contiguous(), "ids": drafted.nonzero()[:, 0]},
                FIXTURES / f"{name}.safetensors",
            )


if __name__ == "__main__":
    write_fixtures()
