"""Mixtures of experts in the layers of MTP modules, written plainly: each chosen expert computes its rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from drafter.published.checkpoint_config import CheckpointConfig
from drafter.published.layers import linear
from outrider.protocol.checks import MAX_IDS

_MAX_EXPERTS = 1 << 12
Expert = Callable[[torch.Tensor], torch.Tensor]


class GatedMlp(nn.Module):
    """A gated feed-forward network of any inner width."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, inner)
        self.up_proj = linear(hidden, inner)
        self.down_proj = linear(inner, hidden)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return output


class FusedExperts(nn.Module):
    """Experts whose weights lie in two tensors, as newer transformers write them."""

    def __init__(self, hidden: int, inner: int, count: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden, device="meta"))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner, device="meta"))

    def __getitem__(self, number: int) -> Expert:
        return partial(self._run, number)

    def _run(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        gate, up = functional.linear(rows, self.gate_up_proj[number]).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, self.down_proj[number])


class SparseMlp(nn.Module):
    """Experts of which a few compute each row, beside a shared one."""

    def __init__(self, config: CheckpointConfig, hidden: int, count: int, *, fused: bool) -> None:
        super().__init__()
        inner = config.integer("moe_intermediate_size", at_most=MAX_IDS)
        self._chosen = config.integer("num_experts_per_tok", at_most=count)
        self._normalised = config.flag("norm_topk_prob", True)
        self.gate = linear(hidden, count)
        self.experts: FusedExperts | nn.ModuleList = (
            FusedExperts(hidden, inner, count)
            if fused
            else nn.ModuleList(GatedMlp(hidden, inner) for _ in range(count))
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.route(rows)
        mixed = self.shared(rows)
        for number in sorted(set(chosen.flatten().tolist())):
            at, place = (chosen == number).nonzero(as_tuple=True)
            mixed = mixed.index_add(0, at, self.experts[number](rows[at]) * weights[at, place, None].to(rows))
        return mixed

    def route(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights of the chosen experts, and their numbers.  # [rows, chosen] each"""
        raise NotImplementedError

    def shared(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what the shared expert adds to each row."""
        raise NotImplementedError

    def _weights(self, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        weights = scores.gather(1, chosen)
        return weights / weights.sum(dim=-1, keepdim=True) if self._normalised else weights


class QwenExperts(SparseMlp):
    """Experts chosen by softmax; the row itself says how much of the shared one it takes."""

    def __init__(self, config: CheckpointConfig, hidden: int, *, fused: bool) -> None:
        config.must_be("decoder_sparse_step", 1)
        config.must_be("mlp_only_layers", [])
        super().__init__(config, hidden, config.integer("num_experts", at_most=_MAX_EXPERTS), fused=fused)
        self.shared_expert = GatedMlp(hidden, config.integer("shared_expert_intermediate_size", at_most=MAX_IDS))
        self.shared_expert_gate = linear(hidden, 1)

    def route(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.gate(rows).float().softmax(dim=-1)
        chosen = scores.topk(self._chosen, dim=-1).indices
        return self._weights(scores, chosen), chosen

    def shared(self, rows: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = torch.sigmoid(self.shared_expert_gate(rows)) * self.shared_expert(rows)
        return added


class DeepseekExperts(SparseMlp):
    """Experts chosen among the best groups, by sigmoids that a learned bias corrects."""

    def __init__(self, config: CheckpointConfig, hidden: int) -> None:
        config.must_be("scoring_func", "sigmoid")
        config.must_be("topk_method", "noaux_tc")
        count = config.integer("n_routed_experts", at_most=_MAX_EXPERTS)
        super().__init__(config, hidden, count, fused=False)
        self._groups = config.integer("n_group", 1, at_most=count)
        self._best_groups = config.integer("topk_group", 1, at_most=self._groups)
        if count % self._groups or self._chosen > self._best_groups * (count // self._groups):
            raise config.wrong("n_group", self._groups, f"groups of {count} experts with {self._chosen} to choose")
        self._scale = config.number("routed_scaling_factor", 1.0)
        self.gate.e_score_correction_bias = nn.Parameter(torch.empty(count, device="meta"))
        shared = config.integer("n_shared_experts", at_most=_MAX_EXPERTS)
        self.shared_experts = GatedMlp(hidden, shared * config.integer("moe_intermediate_size", at_most=MAX_IDS))

    def route(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores: Any = functional.linear(rows.float(), self.gate.weight.float()).sigmoid()
        biased = (scores + self.gate.e_score_correction_bias).view(len(rows), self._groups, -1)
        promise = biased.topk(min(2, biased.shape[-1]), dim=-1).values.sum(dim=-1)  # [rows, groups]
        best = promise.topk(self._best_groups, dim=-1).indices
        left_out = torch.ones_like(promise, dtype=torch.bool).scatter(1, best, value=False)
        chosen = biased.masked_fill(left_out[..., None], -torch.inf).flatten(1).topk(self._chosen, dim=-1).indices
        return self._weights(scores, chosen) * self._scale, chosen

    def shared(self, rows: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.shared_experts(rows)
        return added
