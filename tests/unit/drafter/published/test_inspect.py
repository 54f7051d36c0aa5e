"""Recognition of checkpoints, their fit to a target, and the command that tells both."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from drafter.published.__main__ import app, main
from drafter.published.loading import PublishedCheckpoint, TargetSize
from outrider.protocol.errors import ModelMismatch, StartupError
from outrider.testing.toy_models import make_model
from tests.published import (
    CASES,
    HIDDEN,
    LLAMA,
    VOCAB,
    Maker,
    deepseek,
    dflash,
    eagle,
    eagle3,
    mimo,
    qwen,
    weights_of,
    write,
)

SPECFORGE = {"projector_type": "dspark", "mask_token_id": 5, "target_layer_ids": [1, 3]}
TARGET = TargetSize("toy", HIDDEN, VOCAB, 6)


def test_the_command_tells_format_needs_and_fit(tmp_path: Path) -> None:
    """As a user calls it, in a process of its own."""
    target = make_model(tmp_path / "target", seed=1, hidden=HIDDEN, layers=6)
    checkpoint = eagle3(tmp_path / "drafter", layout="speculators", embeddings=False)
    command = [sys.executable, "-c", "from outrider.cli.app import main; main()", "drafters", "inspect"]
    done = subprocess.run(
        [*command, str(checkpoint), "--target", str(target)], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "eagle3, speculators layout" in done.stdout
    assert "96 of 257 ids" in done.stdout
    assert "hidden states after the layers 2, 3, 3" in done.stdout
    assert "input embeddings of the target" in done.stdout
    assert "made for    toys/target" in done.stdout
    assert done.stdout.endswith(f"fits {target}\n")


def test_the_state_after_the_final_norm_is_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["inspect", str(eagle(tmp_path))])
    assert (
        "needs       hidden size 128, vocabulary size 257\n            the hidden state after the final norm"
        in done.stdout
    )
    assert "input embeddings and head of the target" in done.stdout


def test_without_a_target_the_usual_layers_are_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["inspect", str(eagle3(tmp_path))])
    assert done.exit_code == 0
    assert "eagle3, original layout" in done.stdout
    assert "2, half of them, all but 3" in done.stdout


def test_errors_have_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["drafters", "inspect", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith(f"outrider: the drafter in {tmp_path} has no readable config.json: ")


def test_a_home_that_cannot_be_written_has_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A .gguf file as the target needs a folder there."""
    (tmp_path / "file.gguf").touch()
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "file.gguf"))
    checkpoint, target = str(eagle3(tmp_path / "drafter")), str(tmp_path / "file.gguf")
    monkeypatch.setattr(sys, "argv", ["drafters", "inspect", checkpoint, "--target", target])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("outrider: [Errno 20] Not a directory: ")


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, drafter.published.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=100).returncode == 0


@pytest.mark.parametrize("command", [["drafters"], ["drafters", "inspect"], ["serve", "coordinator"]])
def test_short_help_works_below_groups_as_above(command: list[str]) -> None:
    line = [sys.executable, "-c", "from outrider.cli.app import main; main()", *command, "-h"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--help" in done.stdout
    assert "--install-completion" not in done.stdout  # which the shell would look up under another name
    assert f"Usage: outrider {' '.join(command)} [OPTIONS]" in done.stdout


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (TargetSize("toy", 64, 100, 1), "needs 128, the target has hidden size 64"),
        (TargetSize("toy", HIDDEN, 100, 1), "needs 257, the target has vocabulary size 100"),
        (TargetSize("toy", HIDDEN, VOCAB, 2), "the target has number of layers 2"),
    ],
)
def test_the_first_difference_from_the_target_is_named(target: TargetSize, reason: str, tmp_path: Path) -> None:
    checkpoint = PublishedCheckpoint.open(eagle3(tmp_path))
    checkpoint.check_target(TARGET)
    with pytest.raises(ModelMismatch, match=reason):
        checkpoint.check_target(target)


def test_embeddings_of_another_width_do_not_fit(tmp_path: Path) -> None:
    checkpoint = PublishedCheckpoint.open(eagle3(tmp_path, target_hidden=64, embeddings=False))
    with pytest.raises(ModelMismatch, match=r"needs embed_tokens\.weight of width 128, the target has width 64"):
        checkpoint.check_target(TargetSize("toy", 64, VOCAB, 6))


def test_layers_that_the_checkpoint_lists(tmp_path: Path) -> None:
    checkpoint = PublishedCheckpoint.open(
        eagle3(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 5, 7]})
    )
    with pytest.raises(ModelMismatch, match=r"needs states after the layers \(1, 5, 7\), the target has number of"):
        checkpoint.check_target(TARGET)
    checkpoint.check_target(TargetSize("toy", HIDDEN, VOCAB, 7))


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, "eagle3"),
        ({"architectures": ["LlamaForCausalLM"]}, "eagle3"),  # by its weights
    ],
)
def test_formats_are_recognised(values: dict[str, Any], name: str, tmp_path: Path) -> None:
    config = eagle3(tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | values))
    assert PublishedCheckpoint.open(tmp_path).format.name == name


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (eagle, "eagle"),
        (mimo, "mimo-mtp"),
        (CASES["deepseek-mtp"], "deepseek-mtp"),
        (CASES["glm-mtp"], "deepseek-mtp"),
        (CASES["qwen-mtp"], "qwen3-next-mtp"),
        (CASES["mtp-speculators"], "mtp"),
        (CASES["peagle"], "peagle"),
        (dflash, "dflash"),
        (CASES["dflash-speculators"], "dflash"),
        (CASES["dspark"], "dspark"),
        (partial(dflash, kind="dspark", architectures=["DFlashDraftModel"], dflash_config=SPECFORGE), "dspark"),
        (CASES["dspark-speculators"], "dspark"),
    ],
)
def test_formats_are_recognised_by_their_tensors(make: Maker, name: str, tmp_path: Path) -> None:
    checkpoint = PublishedCheckpoint.open(make(tmp_path))
    assert checkpoint.format.name == name
    checkpoint.check_target(TARGET)


def test_a_module_of_a_target_with_another_number_of_layers_does_not_fit(tmp_path: Path) -> None:
    checkpoint = PublishedCheckpoint.open(mimo(tmp_path))
    with pytest.raises(ModelMismatch, match="needs 6, the target has number of layers 7"):
        checkpoint.check_target(TargetSize("toy", HIDDEN, VOCAB, 7))


@pytest.mark.parametrize("name", ["dflash", "dflash-speculators", "dspark", "dspark-speculators"])
def test_ids_of_target_layers_count_from_0_in_the_original_layout(name: str, tmp_path: Path) -> None:
    assert PublishedCheckpoint.open(CASES[name](tmp_path)).module.needs.layers_of(6) == (2, 4)


def test_captured_layers_that_a_block_drafter_does_not_list_are_spread(tmp_path: Path) -> None:
    checkpoint = PublishedCheckpoint.open(dflash(tmp_path, dflash_config={"mask_token_id": 5}, num_target_layers=36))
    assert checkpoint.module.needs.layers_of(36) == (2, 34)
    with pytest.raises(ModelMismatch, match="needs 36, the target has number of layers 6"):
        checkpoint.check_target(TARGET)


@pytest.mark.parametrize(
    ("make", "values", "reason"),
    [
        (deepseek, {"model_type": "deepseek_v32"}, "model_type 'deepseek_v32'"),
        (deepseek, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (deepseek, {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        (deepseek, {"topk_method": "greedy"}, "topk_method 'greedy'"),
        (deepseek, {"n_group": 3}, "n_group 3"),
        (deepseek, {"attention_bias": True}, "attention_bias"),
        (deepseek, {"num_hidden_layers": 7}, "has no "),
        (qwen, {"model_type": "qwen3_5"}, "model_type 'qwen3_5'"),
        (qwen, {"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        (qwen, {"mlp_only_layers": [0]}, "mlp_only_layers"),
        (qwen, {"num_experts": 9}, r"mlp\.gate\.weight of shape"),
        (partial(qwen, layout="speculators"), {"transformer_layer_config": LLAMA}, "model_type 'llama'"),
    ],
)
def test_modules_of_other_targets_are_refused(make: Maker, values: dict[str, Any], reason: str, tmp_path: Path) -> None:
    config = make(tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | values))
    with pytest.raises(StartupError, match=reason):
        PublishedCheckpoint.open(tmp_path)


def test_a_modules_own_embeddings_and_head_come_before_those_of_its_target(tmp_path: Path) -> None:
    weights = weights_of(deepseek(tmp_path))
    weights["model.layers.6.embed_tokens.weight"] *= 2
    write(tmp_path, json.loads((tmp_path / "config.json").read_text()), weights, "sharded")
    loaded = PublishedCheckpoint.open(tmp_path).load()
    assert torch.equal(loaded.embed_tokens.weight, weights["model.layers.6.embed_tokens.weight"])
    assert torch.equal(loaded.lm_head.weight, weights["model.layers.6.shared_head.head.weight"])
    for name in ("embed_tokens", "shared_head.head"):
        del weights[f"model.layers.6.{name}.weight"]
    write(tmp_path, json.loads((tmp_path / "config.json").read_text()), weights, "sharded")
    loaded = PublishedCheckpoint.open(tmp_path).load()
    assert torch.equal(loaded.embed_tokens.weight, weights["model.embed_tokens.weight"])
    assert torch.equal(loaded.lm_head.weight, weights["lm_head.weight"])


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"speculators_model_type": "independent"}, "speculators_model_type 'independent'"),
        ({"speculators_model_type": "dflash2"}, "has the format dflash2, which is not supported"),
        ({"architectures": ["DFlash2DraftModel"]}, "has the format dflash2, which is not supported"),
        ({"architectures": ["DominoDraftModel"]}, "has the format domino, which is not supported"),
    ],
)
def test_formats_that_are_not_supported_are_named(values: dict[str, Any], reason: str, tmp_path: Path) -> None:
    config = eagle3(tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | values))
    with pytest.raises(StartupError, match=reason):
        PublishedCheckpoint.open(tmp_path)


def test_a_whole_model_is_no_drafter(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", seed=1)
    with pytest.raises(StartupError, match="is no drafter that is known: LlamaForCausalLM"):
        PublishedCheckpoint.open(model)


def test_speculators_norm_the_residual_unless_they_say_otherwise(tmp_path: Path) -> None:
    """The default of the `speculators` layout differs from the original one."""
    layouts = {}
    for layout in ("original", "speculators"):
        checkpoint = PublishedCheckpoint.open(eagle3(tmp_path / layout, layout=layout))
        layouts[layout] = checkpoint.format.config.flag("norm_before_residual", False)
    assert layouts == {"original": False, "speculators": True}
