"""Weights as they are in their files. GGUF files: a folder with all else, and the weights in the file's own blocks.

The folder holds configuration, tokenizer, the file itself (linked), and an index: digest of the file, and where each
weight is. Files of other architectures have no such places: their models are loaded from safetensors only.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors import safe_open
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import cached_file

from outrider.models import GGUF, INDEX, INDEX_VERSION
from outrider.models.gguf_rope import add_positions
from outrider.models.tokenizer import save_tokenizer
from outrider.protocol.errors import StartupError

_TIED = ("lm_head.weight", "model.embed_tokens.weight")
_IN_PLACE = [gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "BF16")]
# What transformers does not read for all architectures: a field, and its place in a configuration.
_SIZES = {"expert_feed_forward_length": "moe_intermediate_size", "attention.layer_norm_epsilon": "norm_eps"}
_SIZES |= {"expert_shared_feed_forward_length": "shared_expert_intermediate_size", "context_length": "n_positions"}
_SIZES |= {"attention.sliding_window": "sliding_window", "attn_logit_softcapping": "attn_logit_softcapping"}
_SIZES |= {"final_logit_softcapping": "final_logit_softcapping", "attention.key_length": "head_dim"}
_SAMPLED = {"temp": "temperature", "penalty_repeat": "repetition_penalty"} | {n: n for n in ("top_k", "top_p", "min_p")}
NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}  # ggml's formats without blocks
_LAYER = re.compile(r"([^.]+\.)*?\d+(?=\.)")  # of a weight's name, up to its number
# Saved by earlier releases of transformers, and scales of a quantised KV cache: they change no logits.
_BUFFER = re.compile(
    r"(inv_freq|_cached|mask(ed_bias)?|position_ids|\b(q|k|v|kv)_scale|\b(self_)?att(n|ention)\.bias)$"
)
_LIKE_LLAMA = {"llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3_text"}  # in safetensors
_ARCHITECTURES = {"llama", "qwen2", "qwen3", "gemma2", "gemma3"}  # their weights are found without transformers
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


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows of a weight in the blocks of a GGUF file."""

    kind: int  # number of the block format in ggml
    stored: torch.Tensor  # [outputs, bytes of a row]
    inputs: int
    heads: int = 0  # llama.cpp interleaved the halves of each of so many heads
    file: mmap.mmap | None = None  # where `stored` is mapped from

    @property
    def rows(self) -> torch.Tensor:
        """Return the rows in the model's order; interleaved ones are copied."""
        if not self.heads:
            return self.stored
        return self.stored.view(self.heads, -1, 2, *self.stored.shape[1:]).transpose(1, 2).reshape(self.stored.shape)

    def dequantize(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return rows as float32; None: all."""
        rows = self.rows if ids is None else self.rows[ids]
        return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType(self.kind)))

    def sample(self, stride: int) -> torch.Tensor:
        """Return every so many-th number as float32; only its block is dequantised."""
        width, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(self.kind)]
        at = torch.arange(0, len(self.stored) * self.inputs, stride)
        blocks = QuantizedRows(self.kind, self.rows.reshape(-1, size)[at // width], width)
        return blocks.dequantize()[torch.arange(len(at)), at % width]


Dequantize = Callable[[QuantizedRows, torch.Tensor | None], torch.Tensor]


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
    if architecture in {*_ARCHITECTURES, "phi3", "starcoder2", "stablelm", "nemotron"}:
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
    kind = fields["pre"].contents() if "pre" in fields else "qwen2" if architecture == "qwen2" else "default"
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
    names = ("bos_token", "eos_token", "unk_token", "pad_token", "add_eos_token")
    kept = {name: getattr(found, name) for name in names} | {"tokenizer_object": made, "add_bos_token": add_bos}
    named = {name[24:]: it.contents() for name, it in fields.items() if name.startswith("tokenizer.chat_template.")}
    default = found.chat_template
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
    # A token with letters beyond those of bytes is spelled anew there and can replace another. Added ones (3, 4) stay.
    spelled = {at: token for token, at in found.get_vocab().items()}
    vocab = {token if types[at] in (3, 4) else spelled.get(at, token): at for at, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in fields["merges"].contents()]
    made = Tokenizer(models.BPE(vocab, merges, ignore_merges=kind in _WHOLE_WORDS))
    made.pre_tokenizer, made.decoder = splits, decoders.ByteLevel()
    for add, added in ((made.add_special_tokens, 3), (made.add_tokens, 4)):  # control tokens, and those of users
        add([AddedToken(token, normalized=False) for token, each in zip(tokens, types, strict=True) if each == added])
    return made


class _FastReader(gguf.GGUFReader):
    def _build_fields(self, offs: int, count: int) -> int:
        self.data = self.data.view(np.ndarray)  # type: ignore[assignment]  # each slice of a map takes long
        return super()._build_fields(offs, count)


@contextlib.contextmanager
def _read_once(source: Path) -> Iterator[gguf.GGUFReader]:
    """Return a file's reader, which transformers also uses inside: it would read all names and tokens several times."""
    reader, original = _FastReader(source), gguf.GGUFReader
    gguf.GGUFReader = lambda at: reader if Path(at).samefile(source) else original(at)  # type: ignore[assignment,misc]
    try:
        yield reader
    finally:
        gguf.GGUFReader = original  # type: ignore[misc]


def unread_beside(stored: Iterable[str], wanted: Collection[str]) -> list[str]:
    """Return the stored tensors that a model does not read although it reads others of their module or layer."""
    read = {name.removesuffix(".weight") for name in wanted} | {at[0] for at in map(_LAYER.match, wanted) if at}
    unread = (each for each in stored if each not in wanted and not _BUFFER.search(each))
    return sorted(each for each in unread if not read.isdisjoint(accumulate(each.split(".")[:-1], "{}.{}".format)))


def _check_tensors(stored: set[str], architecture: str, model: PreTrainedModel) -> None:
    """Raise StartupError for a file that lacks weights, or has some that the model of this architecture ignores."""
    names = _tensor_names(architecture, model.config)
    wanted = {names.get_name(name, try_suffixes=(".weight", ".bias")) for name, _ in model.named_parameters()}
    differing = sorted(map(str, (stored ^ wanted) - {"output.weight"}))
    if odd := [name for name in differing if not name.startswith("rope_") and "attn_rot_embd" not in name]:
        message = f"a {architecture} GGUF file lacks these weights, or no model reads them"
        raise StartupError(f"{message}: {', '.join(odd[:3])}", field="target", value=odd[0], limit="a known model")


def _tensor_names(architecture: str, config: Any) -> gguf.TensorNameMap:
    architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(architectures[architecture], config.num_hidden_layers)


def rows_in_file(folder: Path | str, model: PreTrainedModel) -> dict[str, QuantizedRows]:
    """Return a model's weights in the mapped GGUF file of a folder; none where they cannot be read in place."""
    index = json.loads((Path(folder) / INDEX).read_text()) if (Path(folder) / INDEX).is_file() else {}
    if index.get("architecture") not in _ARCHITECTURES:
        return {}
    with (Path(folder) / GGUF).open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    data = torch.frombuffer(mapped, dtype=torch.uint8)
    config, names = model.config, _tensor_names(index["architecture"], model.config)
    interleaved = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    rows = {}
    for name, weight in model.named_parameters():
        stored_as = names.get_name(name, try_suffixes=(".weight", ".bias"))
        kind, start, inputs, *outputs = index["tensors"].get(stored_as, (0, 0, 0))
        if [*outputs, inputs] != list(weight.shape):
            return {}
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        stored = data[start : start + weight.numel() // block * size].view(*outputs, -1)
        heads = interleaved.get(str(stored_as).split(".")[-2], 0) if index["architecture"] == "llama" else 0
        rows[name] = QuantizedRows(kind, stored, inputs, heads, mapped)
    return rows


def rows_in_safetensors(folder: Path | str, model: PreTrainedModel) -> dict[str, QuantizedRows]:
    """Return a model's weights in the mapped safetensors of a folder, if all are there by name, and are bfloat16."""
    rows, files = {}, dict[str, Any]()
    single, index = Path(folder) / "model.safetensors", Path(folder) / "model.safetensors.index.json"
    shards = json.loads(index.read_text())["weight_map"].values() if index.is_file() else ()
    paths = [single] if single.is_file() else sorted({Path(folder) / name for name in shards})
    if not all(path.is_file() for path in paths):  # a download goes on, or was interrupted
        return {}
    for path in paths:
        opened: Any = safe_open(path, framework="pt")
        files |= dict.fromkeys(opened.keys(), opened)
    wanted = dict(model.named_parameters())
    tied = [files[name].get_tensor(name) for name in _TIED if name in files and _TIED[0] not in wanted]
    differ = len(tied) == len(_TIED) and (tied[0].dtype != tied[1].dtype or not torch.equal(*tied))
    if differ or unread_beside(files, wanted):
        return {}  # a head that is tied by name only stays apart in transformers
    for name, weight in wanted.items():
        stored = files[name].get_tensor(name) if name in files and model.config.model_type in _LIKE_LLAMA else None
        if stored is None or stored.dtype != torch.bfloat16 or stored.shape != weight.shape:
            return {}
        rows[name] = rows_of(stored)
    return rows


def load_in_place(
    folder: Path | str, dequantize: Dequantize, config: Any, dtype: torch.dtype = torch.float32
) -> PreTrainedModel | None:
    """Load a model whose large weights stay in its files, as blocks or bfloat16; None where they cannot be read there.

    Each module dequantises its weight while it runs. In its place is NaN of the same shape, which takes no memory.
    """
    if not Path(folder).is_dir():  # a hub id
        folder = Path(str(cached_file(str(folder), "config.json", local_files_only=True))).parent
    empty, nothing = empty_model(config, folder), torch.full((1,), torch.nan, dtype=dtype)
    if not (rows := rows_in_file(folder, empty) or rows_in_safetensors(folder, empty)):
        return None
    stay = {name for name, each in rows.items() if each.kind in _IN_PLACE and each.stored.ndim == 2}
    from_one = config.model_type.startswith("gemma") and (Path(folder) / INDEX).is_file()
    state = {
        name: nothing.expand(len(each.stored), each.inputs)
        if name in stay
        else each.dequantize() - float(from_one and name.endswith("norm.weight"))
        for name, each in rows.items()
    }
    loading = {"config": config, "state_dict": state, "dtype": dtype, "attn_implementation": "eager"}
    model: PreTrainedModel = type(empty).from_pretrained(None, **loading)
    model.generation_config = empty.generation_config
    for name in stay:
        model.get_parameter(name).quantized = rows[name]
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and (quantized := quantized_rows(module)):
            _dequantize_while_running(module, quantized, dequantize)
    return model


def _dequantize_while_running(module: Any, rows: QuantizedRows, dequantize: Dequantize) -> None:
    dtype = module.weight.dtype
    if not isinstance(module, nn.Embedding):
        module.row_hooks = replace_while_running(module, lambda _: {"weight": dequantize(rows, None).to(dtype)})
        return
    number = lambda _, x: (torch.arange(x[0].numel()).view(x[0].shape),)  # noqa: E731 - of the dequantised rows
    hooks = replace_while_running(module, lambda x: {"weight": dequantize(rows, x[0].reshape(-1)).to(dtype)})
    module.__dict__["row_hooks"] = [*hooks, module.register_forward_pre_hook(number)]
    module.padding_idx = None  # a gradient's business; it counts rows of the whole weight


def replace_while_running(module: nn.Module, make: Callable[[Any], dict[str, torch.Tensor]]) -> list[RemovableHandle]:
    """Replace parameters of a module while it runs, by what `make` returns for its inputs. Return the hooks."""
    own: dict[str, nn.Parameter] = {}

    def put(_: nn.Module, inputs: Any) -> None:
        own.update(module.named_parameters(recurse=False))
        with torch.inference_mode(False), torch.no_grad():  # a rank's share cannot be a parameter otherwise
            for name, value in make(inputs).items():
                setattr(module, name, nn.Parameter(value, requires_grad=False))

    def restore(*_: Any) -> None:
        while own:  # keeps none of them
            setattr(module, *own.popitem())

    # The last one that replaced restores first.
    restoring = module.register_forward_hook(restore, prepend=True, always_call=True)
    return [module.register_forward_pre_hook(put), restoring]


def rows_of(weight: torch.Tensor) -> QuantizedRows:
    """Return a weight in numbers as rows of a file would be."""
    return QuantizedRows(NUMBERS[weight.dtype], weight.contiguous().view(torch.uint8), weight.shape[-1])


def quantized_rows(module: Any) -> QuantizedRows | None:
    """Return the blocks of a module's weight."""
    return getattr(module.weight, "quantized", None)


def detach_rows(model: PreTrainedModel, dequantize: Dequantize) -> None:
    """Unmap the file. Embeddings that have rows keep a copy of them, and dequantise those they are asked for."""
    embeddings: Any = model.get_input_embeddings()
    mapped = quantized_rows(embeddings)
    for module in model.modules():
        for hook in module.__dict__.pop("row_hooks", ()):
            hook.remove()
    for weight in model.parameters():
        weight.__dict__.pop("quantized", None)
    if mapped is not None:
        kept = replace(mapped, stored=mapped.stored.clone(), file=None)
        embeddings.rows = kept if embeddings.weight.dtype == torch.float32 else None
        _dequantize_while_running(embeddings, kept, dequantize)


def empty_model(config: Any, folder: Path | str = "") -> PreTrainedModel:
    """Return a model without memory for its weights, as a folder says how it ends."""
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(config)
    if folder and (Path(folder) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def load_whole(name: str, folder: Path | str, **loading: Any) -> PreTrainedModel:
    """Load a model, in float32 unless told otherwise; raise StartupError for weights missing or left out as scales."""
    loading = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False} | loading
    config = loading.setdefault("config", AutoConfig.from_pretrained(folder, trust_remote_code=False))
    model, found = auto_class(config).from_pretrained(folder, output_loading_info=True, **loading)
    if missing := found["missing_keys"]:  # transformers would draw them
        raise StartupError.of("target", f"{name} without {', '.join(sorted(missing)[:3])}", "with all its weights")
    if unread := unread_beside(found["unexpected_keys"], dict(model.named_parameters())):
        raise StartupError.of("target", f"{name} with {', '.join(unread[:3])}", "without tensors that no model reads")
    for weight in model.parameters():  # beside layers that were in fp8, transformers leaves all others in 16 bits
        if loading["dtype"] == torch.float32 and weight.dtype in (torch.bfloat16, torch.float16):
            weight.data = weight.data.float()
    return model


def auto_class(config: Any) -> Any:
    """Return transformers' class for language models, or for those that see images: they answer texts as well."""
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return transformers.AutoModelForImageTextToText
    raise StartupError.of("target", f"of type {config.model_type}", "a language model that transformers knows")
