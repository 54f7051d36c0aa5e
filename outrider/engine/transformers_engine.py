"""Any transformers causal LM as an engine: several sessions, chains and trees in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from outrider.engine.attention import RaggedStep, Segment, current_step
from outrider.engine.interface import Rows, StepResult
from outrider.engine.kv import SessionCache
from outrider.errors import ModelMismatch
from outrider.messages import ModelInfo


class TransformersEngine:
    """The model must have been loaded with the ragged attention: see `load.load_model`."""

    def __init__(self, model: PreTrainedModel, info: ModelInfo) -> None:
        self._model = model
        self._info = info
        self._device: torch.device = next(model.parameters()).device
        self._caches: dict[str, SessionCache] = {}
        self._layers: int = model.config.get_text_config().num_hidden_layers
        self._hidden = torch.empty(0)
        model.get_output_embeddings().register_forward_pre_hook(self._catch_hidden)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def cached_tokens(self) -> int:
        return sum(cache.length for cache in self._caches.values())

    def length(self, session: str) -> int:
        cache = self._caches.get(session)
        return cache.length if cache else 0

    @torch.inference_mode()
    def extend(self, batch: Sequence[Rows], *, features: bool = False) -> StepResult:
        ids: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        counts: list[int] = []
        segments: list[Segment] = []
        for rows in batch:
            cache = self._caches.setdefault(rows.session, SessionCache())
            start = len(ids)
            ids.extend(rows.tokens)
            positions.extend(cache.length + depth for depth in rows.depths())
            wanted.extend(range(start + rows.logits_from, len(ids)))
            counts.append(len(ids) - start - rows.logits_from)
            segments.append(Segment(cache, rows, start, len(ids)))
        step = RaggedStep(segments)
        logits = self._forward(step, ids, positions, wanted)
        if step.layers_run != self._layers:
            raise ModelMismatch(
                f"{self._info.architecture} ran {step.layers_run} of {self._layers} layers through the attention "
                "interface: it keeps state that Outrider cannot roll back",
                field="target",
                value=self._info.name,
            )
        for segment in segments:
            segment.cache.length += segment.end - segment.start
        hidden = list(torch.split(self._hidden[0], counts)) if features else None
        return StepResult(list(torch.split(logits, counts)), hidden)

    def truncate(self, session: str, length: int) -> None:
        cache = self._caches.get(session)
        if cache is not None:
            cache.length = min(cache.length, length)

    @torch.inference_mode()
    def keep(self, session: str, base: int, rows: Sequence[int]) -> None:
        self._caches[session].keep(base, rows)

    @torch.inference_mode()
    def fork(self, session: str, copy: str) -> None:
        self._caches[copy] = self._caches[session].copy()

    def free(self, session: str) -> None:
        self._caches.pop(session, None)

    def _forward(
        self, step: RaggedStep, ids: Sequence[int], positions: Sequence[int], wanted: Sequence[int]
    ) -> torch.Tensor:
        token = current_step.set(step)
        try:
            return self._model(  # type: ignore[no-any-return]
                input_ids=torch.tensor([ids], device=self._device),
                position_ids=torch.tensor([positions], device=self._device),
                logits_to_keep=torch.tensor(wanted, dtype=torch.int64, device=self._device),
                use_cache=False,
            ).logits[0]
        finally:
            current_step.reset(token)

    def _catch_hidden(self, _module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        self._hidden = inputs[0]
