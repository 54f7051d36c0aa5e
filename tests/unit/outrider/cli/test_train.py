"""`outrider train` and `outrider tune`: what they refuse at once, and the commands that they name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import outrider.train.tune as tuning
from outrider.cli.app import app
from outrider.cli.train import _print_results
from outrider.train.artifacts.card import Card

PATH = "/models/[big]/My Target"


def test_a_seed_from_which_none_can_be_made_for_each_step_is_refused_at_once(tmp_path: Path) -> None:
    """It ended the training after all texts were written."""
    line = ("train", "eagle", "--out", str(tmp_path), "--prompts", "/nowhere.jsonl", "--seed")
    refused = CliRunner().invoke(app, [*line, str(20261129142207)])
    assert refused.exit_code == 2, refused.exception
    assert "--seed" in refused.stderr
    taken = CliRunner().invoke(app, [*line, str(2**42)])
    assert "cannot read /nowhere.jsonl" in str(taken.exception)
    for factor in (1_000_003, 999_983, 7_919):  # of texts, batches and orders
        torch.Generator().manual_seed(2**42 * factor + 10**9)


def test_a_trained_drafter_is_named_as_a_shell_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    card = Card("eagle", "target", "", "", "", {})
    _print_results(Path("my drafter"), card, PATH)
    assert f"outrider up --target '{PATH}' --drafter 'eagle:my drafter'" in capsys.readouterr().out


def test_the_best_early_exit_is_named_as_a_shell_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich took brackets of the path for a style, and a path with a space was two arguments."""
    monkeypatch.setattr(tuning, "tune", lambda *_, **__: [tuning.Exit(3, (0.9, 0.8), 2, 1.3)])
    shown = CliRunner().invoke(app, ["tune", "--target", PATH, "--num-prompts", "1"])
    assert f"best: outrider up --target '{PATH}' --drafter early-exit:3" in shown.stdout
