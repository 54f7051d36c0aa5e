"""Checkpoints that are damaged, hostile or not understood are refused before they cost memory or run code."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from drafter.published.loading import PublishedCheckpoint
from drafter.published.weight_files import read_finite, weight_entries
from outrider.protocol.errors import StartupError
from outrider.train.artifacts.embeddings_and_head import EmbeddingsAndHead
from tests.published import CASES, HIDDEN, VOCAB, Weights, dflash, eagle, eagle3, weights_of, write

Change = Callable[[Weights], object]


def spoilt(folder: Path, change: Change) -> Path:
    """Return a checkpoint with other weights."""
    weights = weights_of(eagle3(folder))
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


def configured(folder: Path, **values: Any) -> Path:
    config = json.loads((eagle3(folder) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    return folder


def pickled(folder: Path, program: bytes) -> Path:
    """Write a `.bin` file whose pickle is this program."""
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/version", "3")
        archive.writestr("archive/byteorder", "little")
    return folder


def repacked(folder: Path, compression: int, limit: int | None = None) -> Path:
    """Write the parts of a `.bin` file again, compressed or with their numbers cut off."""
    parts = io.BytesIO((folder / "pytorch_model.bin").read_bytes())
    with zipfile.ZipFile(parts) as old, zipfile.ZipFile(folder / "pytorch_model.bin", "w", compression) as new:
        for part in old.infolist():
            held = old.read(part)
            new.writestr(part.filename, held[:limit] if "/data/" in part.filename else held)
    return folder


def test_a_claim_of_ten_gigabytes_in_a_small_safetensors_file(tmp_path: Path) -> None:
    size = 50_000 * 50_000 * 4
    header = json.dumps({"fc.weight": {"dtype": "F32", "shape": [50_000, 50_000], "data_offsets": [0, size]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(StartupError, match=r"damaged model.safetensors"):
        weight_entries(tmp_path)


def test_a_header_longer_than_its_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 10 << 30) + b"{}")
    with pytest.raises(StartupError, match=r"damaged model.safetensors"):
        weight_entries(tmp_path)


def test_a_claim_of_ten_gigabytes_in_a_small_bin_file(tmp_path: Path) -> None:
    """A view repeats one number; reading it as plain numbers would take all of them."""
    torch.save({"fc.weight": torch.zeros(1).expand(50_000, 50_000)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(StartupError, match=r"fc.weight larger than its numbers"):
        weight_entries(tmp_path)


def test_numbers_that_are_not_in_the_bin_file(tmp_path: Path) -> None:
    torch.save({"fc.weight": torch.ones(1000, 1000)}, tmp_path / "pytorch_model.bin")
    repacked(tmp_path, zipfile.ZIP_STORED, limit=64)
    with pytest.raises(StartupError, match=r"pytorch_model.bin"):
        weight_entries(tmp_path)


def test_a_compressed_bin_file(tmp_path: Path) -> None:
    """Its parts could be a thousand times larger than the file."""
    torch.save({"fc.weight": torch.zeros(1000, 1000)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(StartupError, match="compressed parts"):
        weight_entries(repacked(tmp_path, zipfile.ZIP_DEFLATED))


class Command:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_bin_file_with_code_inside(protocol: int, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    pickled(tmp_path, pickle.dumps({"fc.weight": Command(marker)}, protocol=protocol))
    with pytest.raises(StartupError, match=r"names (posix\.mkdir|STACK_GLOBAL) in pytorch_model.bin: not plain"):
        weight_entries(tmp_path)
    assert not marker.exists()


def test_a_bin_file_that_allocates_memory(tmp_path: Path) -> None:
    """Torch's weights-only reader would make these bytes."""
    program = b"\x80\x02cbuiltins\nbytearray\n" + b"\x8a\x05" + (1 << 33).to_bytes(5, "little") + b"\x85R."
    with pytest.raises(StartupError, match=r"names builtins\.bytearray"):
        weight_entries(pickled(tmp_path, program))


def test_a_bin_file_with_a_second_pickle(tmp_path: Path) -> None:
    """Torch takes the one beside the first part, which need not be the one that was examined."""
    torch.save({"fc.weight": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "a") as archive:
        archive.writestr("other/data.pkl", pickle.dumps({}))
    with pytest.raises(StartupError, match="has not one list of tensors"):
        weight_entries(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x80\x02}q\x00.", b"PK\x05\x06" + bytes(18), b"no zip at all"])
def test_a_bin_file_that_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(StartupError, match=r"pytorch_model.bin"):
        weight_entries(tmp_path)


def test_a_truncated_pickle(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"damaged pytorch_model.bin"):
        weight_entries(pickled(tmp_path, b"\x80\x02}q\x00X\xff"))


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x02}X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\n)Rs.",  # a tensor of nothing
        b"\x80\x02ccollections\nOrderedDict\nK\x01\x85R.",
        b"\x80\x02s.",
        b"\x80\x02h\x05.",
        b"\x80\x02K\x01Q.",
    ],
)
def test_a_pickle_that_fails_while_it_is_read(program: bytes, tmp_path: Path) -> None:
    """Torch's reader raises whatever the operation that fails raises."""
    with pytest.raises(StartupError, match=r"damaged pytorch_model.bin"):
        weight_entries(pickled(tmp_path, program))


@pytest.mark.parametrize("held", [{"fc.weight": 1}, {1: torch.zeros(1)}, [torch.zeros(1)]])
def test_a_bin_file_that_holds_more_than_tensors(held: object, tmp_path: Path) -> None:
    torch.save(held, tmp_path / "pytorch_model.bin")
    with pytest.raises(StartupError, match=r"no tensor|no table of tensors"):
        weight_entries(tmp_path)


@pytest.mark.parametrize("files", ["safetensors", "bin"])
def test_numbers_of_an_unknown_kind(files: str, tmp_path: Path) -> None:
    write(tmp_path, {}, {"fc.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn)}, files)
    with pytest.raises(StartupError, match=r"fc.weight as|names torch.float8"):
        weight_entries(tmp_path)


@pytest.mark.parametrize("files", ["safetensors", "bin"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(value: float, files: str, tmp_path: Path) -> None:
    weight = torch.zeros(4, 4, dtype=torch.bfloat16)
    weight[2, 3] = value
    write(tmp_path, {}, {"fc.weight": weight}, files)
    entry = weight_entries(tmp_path)["fc.weight"]
    with pytest.raises(StartupError, match=r"NaN or infinite values in fc.weight"):
        read_finite(tmp_path, "fc.weight", entry)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "model.pt", ""])
def test_an_index_that_names_other_files(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": name}}))
    with pytest.raises(StartupError, match="names '"):
        weight_entries(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{", '{"weight_map": {"fc.weight": 1}}', "[" * 100_000])
def test_an_index_that_is_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(StartupError, match=r"index\.json"):
        weight_entries(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="holds no weights"):
        weight_entries(tmp_path)


@pytest.mark.parametrize("content", [None, "{", "[1]", "[" * 100_000])
def test_a_configuration_that_is_none(content: str | None, tmp_path: Path) -> None:
    eagle3(tmp_path)
    (tmp_path / "config.json").unlink()
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(StartupError, match=r"config\.json"):
        PublishedCheckpoint.open(tmp_path)


def test_settings_of_any_name_are_read_as_settings(tmp_path: Path) -> None:
    assert PublishedCheckpoint.open(configured(tmp_path, self=1)).format.name == "eagle3"
    folder = dflash(tmp_path / "dflash", dflash_config={"mask_token_id": 2, "self": 1})
    assert PublishedCheckpoint.open(folder).format.name == "dflash"


def test_a_configuration_of_a_mebibyte(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"config\.json of 10\d+ bytes"):
        PublishedCheckpoint.open(configured(tmp_path, more="x" * (1 << 20)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", "128"),
        ("hidden_size", True),
        ("hidden_size", None),
        ("num_hidden_layers", 1_000_000_000),
        ("vocab_size", -1),
        ("draft_vocab_size", VOCAB + 1),
        ("num_key_value_heads", 5),
        ("num_key_value_heads", 3),
        ("head_dim", 31),
        ("rms_norm_eps", "small"),
        ("norm_output", 1),
        ("num_aux_hidden_states", 100_000),
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "fp8"}),
        ("layer_types", ["sliding_attention"]),
        ("rope_scaling", {"rope_type": "longrope", "factor": 2.0}),
        ("rope_scaling", {"rope_type": "llama3"}),
        ("rope_scaling", {"rope_type": "linear", "factor": "two"}),
        ("rope_scaling", {"rope_type": "linear", "factor": 0}),
        ("rope_scaling", {"rope_type": "linear", "factor": float("nan")}),
        ("rope_scaling", [1]),
        ("rope_scaling", {"self": 1, "rope_type": "longrope"}),
        ("partial_rotary_factor", 0.5),
        ("eagle_config", [1]),
        ("eagle_config", {"eagle_aux_hidden_state_layer_ids": [1, -1, 2]}),
        ("eagle_config", {"eagle_aux_hidden_state_layer_ids": [1, 2]}),
        ("architectures", "LlamaForCausalLMEagle3"),
        ("architectures", ["LlamaForCausalLM", 1]),
    ],
)
def test_settings_out_of_bounds_or_not_implemented(name: str, value: object, tmp_path: Path) -> None:
    shown = {"eagle_config": r"eagle_|fc\.weight", "rope_scaling": "rope_"}
    with pytest.raises(StartupError, match=shown.get(name, name)):
        PublishedCheckpoint.open(configured(tmp_path, **{name: value}))


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        ("deepseek-mtp", "mscale_all_dim", "one"),
        ("deepseek-mtp", "mscale_all_dim", float("nan")),
        ("deepseek-mtp", "rope_interleave", False),
        ("glm-mtp", "partial_rotary_factor", 0.01),
        ("glm-mtp", "partial_rotary_factor", 3 / 32),
        ("glm-mtp", "partial_rotary_factor", 1.5),
    ],
)
def test_settings_of_mtp_modules(module: str, name: str, value: object, tmp_path: Path) -> None:
    folder = CASES[module](tmp_path)
    config = json.loads((folder / "config.json").read_text())
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale_all_dim": value}
    config |= {"rope_parameters": None, "rope_scaling": yarn} if name == "mscale_all_dim" else {name: value}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match=name):
        PublishedCheckpoint.open(folder)


def test_layer_ids_of_another_number(tmp_path: Path) -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2]}
    with pytest.raises(StartupError, match="num_aux_hidden_states 3"):
        PublishedCheckpoint.open(configured(tmp_path, eagle_config=ids, num_aux_hidden_states=3))


@pytest.mark.parametrize("token", [-1, VOCAB, None])
def test_a_mask_token_beyond_the_vocabulary(token: int | None, tmp_path: Path) -> None:
    checkpoint = eagle3(tmp_path, layout="speculators", kind="peagle", mask_token_id=token)
    with pytest.raises(StartupError, match="mask_token_id"):
        PublishedCheckpoint.open(checkpoint)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 1),
        ("block_size", 1 << 20),
        ("markov_head_type", "linear"),
        ("markov_rank", 0),
        ("use_swa", True),
        ("sliding_window_non_causal", False),
        ("attention_value_scale", 0.5),
        ("attention_sink_bias", True),
        ("is_neox_style", False),
        ("target_layer_ids", [1, 3, 5]),
        ("mask_token_id", VOCAB),
    ],
)
def test_settings_of_block_drafters(name: str, value: object, tmp_path: Path) -> None:
    shown = {"target_layer_ids": r"fc\.weight"}
    with pytest.raises(StartupError, match=shown.get(name, name)):
        PublishedCheckpoint.open(dflash(tmp_path, kind="dspark", **{name: value}))


def test_a_mask_embedding_of_its_own(tmp_path: Path) -> None:
    torch.save(torch.zeros(1), dflash(tmp_path) / "mask_embedding.pt")
    with pytest.raises(StartupError, match=r"mask_embedding\.pt, which is not supported"):
        PublishedCheckpoint.open(tmp_path)


def test_a_configuration_of_a_million_layers_costs_nothing(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="num_hidden_layers 1000000"):
        PublishedCheckpoint.open(configured(tmp_path, num_hidden_layers=1_000_000))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda weights: weights.pop("norm.weight"), r"has no norm\.weight"),
        (lambda weights: weights.pop("d2t"), "has no d2t, and drafts 96 of 257 ids"),
        (lambda weights: weights.pop("lm_head.weight"), r"has no lm_head\.weight, and drafts 96 of 257 ids"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "has extra, which the format eagle3 does not have"),
        (
            lambda weights: weights.update({"fc.weight": torch.zeros(128, 383)}),
            r"fc\.weight of shape \(128, 383\), not \(128, 384\)",
        ),
        (lambda weights: weights.update(d2t=torch.zeros(95, dtype=torch.long)), "d2t of shape"),
        (lambda weights: weights.update(d2t=torch.zeros(96)), "d2t of shape"),
    ],
)
def test_tensors_that_are_not_those_of_the_configuration(change: Change, reason: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=reason):
        PublishedCheckpoint.open(spoilt(tmp_path, change))


@pytest.mark.parametrize("change", [{"softcap": 30.0}, {"head_bias": torch.zeros(VOCAB)}])
def test_a_head_that_is_not_plain_is_refused_where_the_drafter_needs_it(change: dict[str, Any], tmp_path: Path) -> None:
    matrix = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    target = replace(EmbeddingsAndHead(matrix, matrix, None, 0.0), **change)
    with_head = spoilt(tmp_path / "head", lambda weights: weights.pop("embed_tokens.weight", None))
    checkpoint = PublishedCheckpoint.open(with_head)
    assert checkpoint.lacks == ("embed_tokens.weight",)
    assert torch.equal(checkpoint.load(target).embed_tokens.weight, matrix)
    with pytest.raises(StartupError, match=r"has no lm_head\.weight, and the target has no plain one"):
        PublishedCheckpoint.open(eagle(tmp_path / "none")).load(target)


@pytest.mark.parametrize("offset", [VOCAB, -1, -(1 << 62)])
def test_drafted_ids_beyond_the_vocabulary(offset: int, tmp_path: Path) -> None:
    checkpoint = PublishedCheckpoint.open(spoilt(tmp_path, lambda weights: weights["d2t"].__setitem__(0, offset)))
    with pytest.raises(StartupError, match="names ids twice or beyond 257"):
        checkpoint.load()


def test_drafted_ids_that_are_named_twice(tmp_path: Path) -> None:
    """Absolute ids in the place of offsets would be such."""
    checkpoint = PublishedCheckpoint.open(
        spoilt(tmp_path, lambda weights: weights["d2t"].__setitem__(1, weights["d2t"][0] - 1))
    )
    with pytest.raises(StartupError, match="names ids twice or beyond 257"):
        checkpoint.load()


def test_a_weight_that_is_not_finite_is_found_by_inspection_and_by_loading(tmp_path: Path) -> None:
    spoilt(tmp_path, lambda weights: weights["fc.weight"].__setitem__((0, 0), float("nan")))
    for use in (PublishedCheckpoint.check_weights, PublishedCheckpoint.load):
        with pytest.raises(StartupError, match=r"NaN or infinite values in fc\.weight"):
            use(PublishedCheckpoint.open(tmp_path))


def test_embeddings_that_nobody_supplies(tmp_path: Path) -> None:
    checkpoint = PublishedCheckpoint.open(eagle3(tmp_path, embeddings=False))
    with pytest.raises(StartupError, match=r"has no embed_tokens\.weight"):
        checkpoint.load()


@pytest.mark.parametrize(
    "values",
    [torch.full((HIDDEN,), 1e300, dtype=torch.float64), torch.ones(HIDDEN, dtype=torch.int64)],
    ids=["beyond float32", "whole numbers"],
)
def test_weights_that_no_module_can_hold_are_refused(values: torch.Tensor, tmp_path: Path) -> None:
    """Finite in the file is not enough: a value beyond the module's numbers would be infinite in it."""
    checkpoint = eagle3(tmp_path)
    weights, config = weights_of(checkpoint), json.loads((checkpoint / "config.json").read_text())
    write(checkpoint, config, weights | {"norm.weight": values})
    opened = PublishedCheckpoint.open(checkpoint)
    with pytest.raises(StartupError, match=r"infinite values in norm\.weight"):
        opened.load()
    with pytest.raises(StartupError, match=r"infinite values in norm\.weight"):
        opened.check_weights()
