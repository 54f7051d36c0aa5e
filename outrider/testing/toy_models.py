"""Toy models with seeded random weights and a byte-level tokenizer, for tests and model-independent benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(extra: tuple[str, ...] = (), letters: Sequence[str] | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the 256 bytes, or of `letters` in this order, an end token and `extra` tokens."""
    alphabet = letters or sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, chat_template=TEMPLATE)
    fast.add_tokens(list(extra))
    return fast


def make_model(
    folder: Path,
    *,
    seed: int,
    hidden: int = 64,
    layers: int = 2,
    context: int = 2048,
    extra_tokens: tuple[str, ...] = (),
    sharpness: float = 1.0,
    like: Path | None = None,
    blur: float = 0.0,
    focus: float = 1.0,
    letters: Sequence[str] | None = None,
) -> Path:
    """Make a Llama with random weights.

    `sharpness` scales the logits, `focus` the output of attention: with little of it the text repeats itself. `like`
    and `blur` make a near copy of another model.
    """
    tokenizer = byte_tokenizer(extra_tokens, letters)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden * 2,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    if like is not None:
        model.load_state_dict(LlamaForCausalLM.from_pretrained(like, dtype=torch.float32).state_dict())
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * weight.std() * blur)
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(focus)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
