"""Models for tests of several packages."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AddedToken, AutoTokenizer, LlamaForCausalLM

from outrider.testing.toy_models import byte_tokenizer


def permuted_vocabulary(folder: Path, source: Path) -> Path:
    """Make a copy of a model that generates the same text with permuted token ids."""
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    end = tokenizer.eos_token_id
    letters = tokenizer.convert_ids_to_tokens(range(end))
    byte_tokenizer(letters=letters[::-1]).save_pretrained(folder)
    order = [*reversed(range(end)), end]
    with torch.no_grad():
        for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
            weight.copy_(weight[order])
    model.save_pretrained(folder)
    return folder


def added_tokens(folder: Path, source: Path, *tokens: str, rows: int = 0) -> Path:
    """Make a copy of a model whose vocabulary has more tokens, and as many rows as that or more."""
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in tokens], special_tokens=True)
    torch.manual_seed(1)
    model.resize_token_embeddings(max(rows, len(tokenizer)), mean_resizing=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def likelier_end(folder: Path, source: Path) -> Path:
    """Make a copy of a model whose answers end by themselves, in most cases after a few tokens."""
    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id].mul_(2.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
