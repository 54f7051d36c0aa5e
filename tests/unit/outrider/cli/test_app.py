"""Reports of bugs need the version: `outrider --version`, `outrider version` and `outrider doctor` print it."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from outrider.cli import doctor
from outrider.cli.app import app, main


@pytest.mark.parametrize("asked", ["--version", "version"])
def test_the_version_is_printed(
    asked: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["outrider", asked])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().out) == (0, f"{version('outrider')}\n")


def test_the_version_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_torch", "_memory", "_redis"):
        monkeypatch.setattr(doctor, name, lambda: ())
    result = CliRunner().invoke(app, ["doctor", "--endpoint", "127.0.0.1:1"])
    assert ["ok", "outrider", version("outrider")] in [line.split() for line in result.output.splitlines()]
