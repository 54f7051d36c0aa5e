"""The engine for any transformers causal LM: several sessions, chains and trees in one forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from outrider.engine.paged.engine import PagedEngine
from outrider.engine.paged.step import ForwardStep
from outrider.engine.transformers.attention import NAME, RaggedStep, Rule, current_step
from outrider.engine.transformers.hidden_states import StateHooks
from outrider.engine.transformers.kv_cache import KvStore
from outrider.protocol.errors import ModelMismatch
from outrider.protocol.fleet import ModelInfo


class TransformersEngine(PagedEngine):
    """An engine that sets the model to the ragged attention. `rules` holds each layer's mask rule of the last step."""

    def __init__(
        self, model: PreTrainedModel, info: ModelInfo, *, kv_tokens: int, evictable_tokens: int | None = None
    ) -> None:
        super().__init__(info, next(model.parameters()).device, kv_tokens, evictable_tokens)
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:  # noqa: SLF001 - there is no other way to ask
            raise ModelMismatch("its attention does not go through transformers' attention interface", field="target")
        self._model = model
        self.store = KvStore(self.capacity_tokens, self.device)
        self._layers: int = model.config.get_text_config().num_hidden_layers
        self._selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.rules: dict[int, Rule] = {}
        self._hooks = StateHooks(model)
        self.state_shape = self._hooks.shape

    @torch.inference_mode()
    def _run(self, step: ForwardStep) -> tuple[torch.Tensor, torch.Tensor]:
        ragged = RaggedStep(step, self.store, self.device)
        outputs = torch.tensor(step.outputs, dtype=torch.int64, device=self.device)
        self._hooks.catch(step.layers, step.num_logits if self._selects_logits else None)
        token = current_step.set(ragged)
        try:
            logits = self._model(
                **self._inputs(step),
                position_ids=torch.tensor([step.positions], device=self.device),
                # Without a mask, transformers searches the positions for several sequences.
                attention_mask=torch.ones((1, len(step.ids)), dtype=torch.int64, device=self.device),
                use_cache=False,
                **({"logits_to_keep": outputs} if self._selects_logits else {}),
            ).logits[0]
        finally:
            current_step.reset(token)
            self._hooks.catch((), None)  # the model is also called without the engine
        self.rules = ragged.rules
        if len(ragged.rules) != self._layers:
            ran = f"{self.info.architecture} ran {len(ragged.rules)} of {self._layers} layers"
            message = f"{ran} through the attention interface: it keeps state that Outrider cannot roll back"
            raise ModelMismatch(message, field="target", value=self.info.name)
        hidden = self._hooks.take(step.layers, outputs, selected=self._selects_logits)
        return logits if self._selects_logits else logits[outputs], hidden

    def _inputs(self, step: ForwardStep) -> dict[str, torch.Tensor]:
        if step.input_embeddings is None:
            return {"input_ids": torch.tensor([step.ids], device=self.device)}
        return {"inputs_embeds": step.input_embeddings.to(self.device, self._model.dtype)[None]}

    def _copy(self, old: Sequence[int], new: Sequence[int]) -> None:
        self.store.copy(old, new)
