"""Folders of GGUF files: configuration, tokenizer, the file itself (linked), and an index of where each weight is."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedModel

from outrider.models import GGUF, INDEX_VERSION
from outrider.models.gguf_rope import add_positions
from outrider.models.in_place import ARCHITECTURES, tensor_names
from outrider.models.pretrained import empty_model, load_whole
from outrider.models.tokenizer import save_tokenizer
from outrider.protocol.errors import StartupError

# What transformers does not read for all architectures: a field, and its place in a configuration.
_SIZES = {"expert_feed_forward_length": "moe_intermediate_size", "attention.layer_norm_epsilon": "norm_eps"}
_SIZES |= {"expert_shared_feed_forward_length": "shared_expert_intermediate_size", "context_length": "n_positions"}
_SIZES |= {"attention.sliding_window": "sliding_window", "attn_logit_softcapping": "attn_logit_softcapping"}
_SIZES |= {"final_logit_softcapping": "final_logit_softcapping", "attention.key_length": "head_dim"}
_SAMPLED = {"temp": "temperature", "penalty_repeat": "repetition_penalty"} | {n: n for n in ("top_k", "top_p", "min_p")}
_ADDED = (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED)  # kinds of tokens: special ones, and those of users
_TURN_ENDS = {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"}  # ends for llama.cpp, too
# By kind of `tokenizer.ggml.pre`: what cuts a text into words, one rule after the other, as llama.cpp has them.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+%s|\s*[\r\n]+|\s+(?!\S)|\s+"
_LIKE_GPT2 = ("default", "gpt-2", "phi-2", "olmo", "mpt", "trillion", "mellum", "gigachat", "a.x-4.0", "exaone4")
_LIKE_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "lfm2", "pixtral", "midm-2.0")
_RULES: dict[str, tuple[str, ...]] = dict.fromkeys(_LIKE_GPT2, (_GPT2,))
_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_RULES |= dict.fromkeys(_DIGITS_APART, (r"\p{N}", _GPT2))
_RULES |= dict.fromkeys(_LIKE_LLAMA3, (_LLAMA3 % ("{1,3}", r"[\r\n]*"),)) | {"seed-coder": (_LLAMA3 % ("", ""),)}
_RULES |= dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez"), (_LLAMA3 % ("", r"[\r\n]*"),))
_RULES["deepseek-coder"] = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+", r"\p{N}")
_WHOLE_WORDS = {*_LIKE_LLAMA3, "tekken"}  # whatever the merges


def convert_gguf(folder: Path, into: Path) -> None:
    """Dequantise the GGUF file of a folder, and save it as safetensors with its tokenizer."""
    model = load_whole(folder.name, str(folder), gguf_file=GGUF)
    if hasattr(model, "hf_quantizer"):  # transformers refuses to save a model that was loaded as quantised
        del model.hf_quantizer, model.config.quantization_config
    model.generation_config = GenerationConfig.from_pretrained(folder)  # with all end tokens
    model.save_pretrained(into)
    for weights in into.glob("*.safetensors"):
        weights.chmod(0o644)  # services may run as other users
    AutoTokenizer.from_pretrained(folder).save_pretrained(into)


def index_gguf(source: Path, folder: Path) -> dict[str, Any]:
    """Put the configuration and the tokenizer of a GGUF file into its folder. Return the places of its tensors."""
    with _read_once(source) as reader:
        architecture = reader.fields["general.architecture"].contents()
        if architecture in ("gemma4", "gpt-oss"):  # of whose configurations transformers reads a part
            raise StartupError.of("general.architecture", architecture, "another: load the model's safetensors instead")
        config = AutoConfig.from_pretrained(str(folder), gguf_file=GGUF)
        tokenizer = _tokenizer_of(folder, reader)
    turns = {it: number for it, number in tokenizer.get_vocab().items() if it in _TURN_ENDS}  # special, of any type
    tokenizer.add_tokens([AddedToken(it, normalized=False, special=True) for it in turns], special_tokens=True)
    save_tokenizer(tokenizer, folder)
    for name, attribute in _SIZES.items():
        if attribute in vars(config) and (field := reader.fields.get(f"{architecture}.{name}")) is not None:
            setattr(config, attribute, field.contents() or None)
    add_positions(config, reader)
    model = empty_model(config)
    if architecture in {*ARCHITECTURES, "phi3", "starcoder2", "stablelm", "nemotron"}:
        _check_tensors({it.name for it in reader.tensors}, architecture, model)
    ends = [reader.fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    model.generation_config.eos_token_id = sorted({*turns.values(), *(it.contents() for it in ends if it)}) or None
    model.generation_config.do_sample = True  # else no sampling parameters may be saved
    for name, parameter in _SAMPLED.items():
        if (field := reader.fields.get(f"general.sampling.{name}")) is not None:
            setattr(model.generation_config, parameter, round(field.contents(), 6))  # a float32 of the number
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    places = {it.name: [int(it.tensor_type), int(it.data_offset), *map(int, it.shape)] for it in reader.tensors}
    return {"version": INDEX_VERSION, "architecture": architecture, "tensors": places}


def _tokenizer_of(folder: Path, reader: gguf.GGUFReader) -> Any:
    """Return the tokenizer of a GGUF file: transformers reads a part of it."""
    found: Any = AutoTokenizer.from_pretrained(str(folder), gguf_file=GGUF)
    fields = {name.removeprefix("tokenizer.ggml."): field for name, field in reader.fields.items()}
    architecture, made = fields["general.architecture"].contents(), found.backend_tokenizer
    in_bytes, add_bos = fields["model"].contents() == "gpt2", found.add_bos_token
    kind = "qwen2" if architecture == "qwen2" else "default"
    if "pre" in fields:
        kind = fields["pre"].contents()
    is_qwen = in_bytes and _RULES.get(kind) == _RULES["qwen2"]
    if architecture == "qwen2" and not is_qwen:  # transformers gives it these splits whenever it is loaded
        raise StartupError.of("tokenizer.ggml.pre", kind, "qwen2 in a model of this architecture")
    types = fields["token_type"].contents() if "token_type" in fields else [0] * len(fields["tokens"].data)
    spaced = "add_space_prefix" not in fields or fields["add_space_prefix"].contents()
    if in_bytes:
        made = _byte_level(found, fields, types, kind)
        made.normalizer = normalizers.NFC() if architecture[:4] == "qwen" and (is_qwen or kind == "qwen35") else None
        add_bos = add_bos if "add_bos_token" in fields else kind in _WHOLE_WORDS  # as llama.cpp does
    elif isinstance(made.pre_tokenizer, pre_tokenizers.Metaspace) and not spaced:
        made.pre_tokenizer.prepend_scheme = "never"  # and the decoder strips no space
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = [it.contents() + 1 for name, it in fields.items() if name.endswith("_token_id")]
    count = max((*special, *(at for at, each in enumerate(types, 1) if each != gguf.TokenType.UNUSED)))
    if made.get_vocab_size() > count:  # with <s> or others of transformers' class, or such as [PAD151665]
        parts = json.loads(made.to_str())
        parts["added_tokens"] = [token for token in parts["added_tokens"] if token["id"] < count]
        vocab = parts["model"]["vocab"]  # a list where tokens have scores
        first = vocab[:count] if isinstance(vocab, list) else {token: at for token, at in vocab.items() if at < count}
        parts["model"]["vocab"] = first
        made = Tokenizer.from_str(json.dumps(parts))
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    last = fields["tokens"].contents(-1)  # as transformers reads an id of -1
    kept = {it: getattr(found, it) for it in names if getattr(found, it) != last or f"{names[it]}_token_id" in fields}
    kept |= {"tokenizer_object": made, "add_bos_token": add_bos, "add_eos_token": found.add_eos_token}
    prefix, default = "tokenizer.chat_template.", found.chat_template
    named = {name.removeprefix(prefix): it.contents() for name, it in fields.items() if name.startswith(prefix)}
    kept["chat_template"] = {"default": default, **named} if named and default else default
    return transformers.PreTrainedTokenizerFast(**kept)  # others split in their own way whenever they are loaded


def _byte_level(found: Any, fields: Mapping[str, Any], types: Sequence[int], kind: str) -> Tokenizer:
    """Return a tokenizer with the file's tokens as it spells them, and with the splits of its kind."""
    splits, tokens = found.backend_tokenizer.pre_tokenizer, fields["tokens"].contents()
    if kind in _RULES:
        apart = [pre_tokenizers.Split(Regex(rule), "isolated") for rule in _RULES[kind]]
        splits = pre_tokenizers.Sequence([*apart, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    elif isinstance(splits, pre_tokenizers.ByteLevel):
        raise StartupError.of("tokenizer.ggml.pre", kind, "one that is known: load the model's safetensors instead")
    # A token with letters beyond those of bytes is spelled anew there and can replace another. Added ones stay.
    spelled = {at: token for token, at in found.get_vocab().items()}
    vocab = {token if types[at] in _ADDED else spelled.get(at, token): at for at, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in fields["merges"].contents()]
    made = Tokenizer(models.BPE(vocab, merges, ignore_merges=kind in _WHOLE_WORDS))
    made.pre_tokenizer, made.decoder = splits, decoders.ByteLevel()
    for add, kind_of in zip((made.add_special_tokens, made.add_tokens), _ADDED, strict=True):
        add([AddedToken(token, normalized=False) for token, each in zip(tokens, types, strict=True) if each == kind_of])
    return made


class _FastReader(gguf.GGUFReader):
    def _build_fields(self, offs: int, count: int) -> int:
        self.data = self.data.view(np.ndarray)  # type: ignore[assignment]  # each slice of a map takes long
        return super()._build_fields(offs, count)


@contextlib.contextmanager
def _read_once(source: Path) -> Iterator[gguf.GGUFReader]:
    """Return a file's reader, which transformers also uses inside: it would read all names and tokens several times."""
    reader, original = _FastReader(source), gguf.GGUFReader
    number = len(reader.fields["tokenizer.ggml.tokens"].data)
    for name, field in list(reader.fields.items()):
        if name.endswith("_token_id") and not 0 <= field.contents() < number:  # such as -1: there is none
            del reader.fields[name]
    gguf.GGUFReader = lambda at: reader if Path(at).samefile(source) else original(at)  # type: ignore[assignment,misc]
    try:
        yield reader
    finally:
        gguf.GGUFReader = original  # type: ignore[misc]


def _check_tensors(stored: set[str], architecture: str, model: PreTrainedModel) -> None:
    """Raise StartupError for a file that lacks weights, or has some that the model of this architecture ignores."""
    names = tensor_names(architecture, model.config)
    wanted = {names.get_name(name, try_suffixes=(".weight", ".bias")) for name, _ in model.named_parameters()}
    differing = sorted(map(str, (stored ^ wanted) - {"output.weight"}))
    if odd := [name for name in differing if not name.startswith("rope_") and "attn_rot_embd" not in name]:
        message = f"a {architecture} GGUF file lacks these weights, or no model reads them"
        raise StartupError(f"{message}: {', '.join(odd[:3])}", field="target", value=odd[0], limit="a known model")
