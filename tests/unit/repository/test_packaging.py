"""What an install brings, and that the lists kept by hand are whole."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import uvicorn
from packaging.requirements import Requirement
from setuptools import find_packages
from uvicorn.protocols.http.h11_impl import H11Protocol

from coordinator.api.http.connections import Connection
from loadtest.__main__ import app as loadtest
from loadtest.options import add_arguments
from outrider.base.config import PREFIX, VARIABLES, Settings
from outrider.cli.app import app
from outrider.settings.coordinator import CoordinatorSettings
from outrider.settings.drafter import DrafterSettings
from outrider.settings.verifier import VerifierSettings
from outrider.v1 import common_pb2, coordinator_pb2, drafter_pb2, multiplex_pb2, verifier_pb2

ROOT = Path(__file__).parents[3]
TOP_LEVEL = {"outrider", "drafter", "verifier", "coordinator", "loadtest"}
SETTINGS = (
    CoordinatorSettings,
    DrafterSettings,
    VerifierSettings,
)


def test_the_wheel_holds_our_packages_and_no_others() -> None:
    """Every folder of ours with Python in it, and neither proto nor tests: `proto` would shadow proto-plus."""
    include = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    found = set(find_packages(str(ROOT), include=include))
    folders = {
        str(path.parent.relative_to(ROOT)).replace("/", ".") for top in TOP_LEVEL for path in (ROOT / top).rglob("*.py")
    }
    assert found == folders
    assert {name.split(".")[0] for name in found} == TOP_LEVEL


def test_a_folder_with_our_name_does_not_hide_an_editable_install(tmp_path: Path) -> None:
    """A clone is called outrider: to a script beside it, the folder is a package, which goes before import hooks."""
    clone, site = tmp_path / "outrider", tmp_path / "site"
    for top in TOP_LEVEL:
        (clone / top).mkdir(parents=True)
        (clone / top / "__init__.py").write_text(f"own = {top!r}")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    build = "from setuptools.build_meta import build_editable; build_editable('wheel')"
    subprocess.run([sys.executable, "-c", build], cwd=clone, capture_output=True, timeout=60, check=True)
    with zipfile.ZipFile(next((clone / "wheel").glob("*.whl"))) as wheel:
        wheel.extractall(site)
    script = tmp_path / "script.py"
    script.write_text("import site, sys; site.addsitedir(sys.argv[1]); from outrider import own; print(own)")
    called = [sys.executable, "-S", "-E", str(script), str(site)]  # without the installation that runs this test
    done = subprocess.run(called, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert done.stdout == "outrider\n", done.stderr


def test_every_variable_that_is_read_is_known() -> None:
    """An unknown OUTRIDER_ variable is refused; one that some command reads must not be."""
    read = {PREFIX + name.upper() for settings in SETTINGS for name in settings.model_fields}
    read |= set(_variables(typer.main.get_command(app)))
    read |= {variable for variable, _ in _locust_arguments().values()}
    assert read | {"OUTRIDER_HOME"} == VARIABLES
    assert all(issubclass(settings, Settings) for settings in SETTINGS)


def test_the_load_test_and_locust_mean_the_same() -> None:
    ours = {
        parameter.opts[0]: (parameter.envvar, parameter.default)
        for parameter in typer.main.get_command(loadtest).params
        if parameter.envvar
    }
    theirs = _locust_arguments()
    for taken, other in (("--tls-cert", "--client-cert"), ("--tls-key", "--client-key")):
        theirs[taken] = theirs.pop(other)  # locust has the first for its own page
    assert set(theirs) - set(ours) == {"--summary"}, "which `python -m loadtest` gives itself"
    assert {flag: (variable, default or None) for flag, (variable, default) in ours.items()} == {
        flag: (variable, default or None) for flag, (variable, default) in theirs.items() if flag != "--summary"
    }


def _locust_arguments() -> dict[str, tuple[str, Any]]:
    """Variable and default of each flag."""
    found: dict[str, tuple[str, Any]] = {}

    class Parser:
        def add_argument(self, flag: str, *, env_var: str, default: Any = None, **_: Any) -> None:
            found[flag] = (env_var, default)

        def set_defaults(self, **_: Any) -> None:
            pass

    add_arguments(Parser())
    return found


def _variables(command: Any) -> Iterator[str]:
    for parameter in command.params:
        named = parameter.envvar or ()
        yield from [named] if isinstance(named, str) else named
    for inner in getattr(command, "commands", {}).values():
        yield from _variables(inner)


def test_the_command_line_starts_without_torch() -> None:
    """It is run beside a coordinator too, where there is none."""
    script = "import sys; sys.modules['torch'] = None; from outrider.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "--help"], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout


@pytest.mark.parametrize(
    ("package", "extra", "script", "arguments"),
    [
        ("torch", "models", "from runpy import run_module; run_module('verifier', run_name='__main__')", ""),
        ("torch", "models", "from runpy import run_module; run_module('drafter', run_name='__main__')", "--kind model"),
        ("torch", "models", "from outrider.cli import main; main()", "train eagle --out trained"),
        ("torch", "models", "from outrider.cli import main; main()", "tune"),
        ("torch", "models", "from outrider.cli import main; main()", "drafters inspect published"),
        ("gguf", "models", "from outrider.cli import main; main()", "models fetch"),
        ("locust", "loadtest", "from runpy import run_module; run_module('loadtest', run_name='__main__')", ""),
    ],
)
def test_without_an_extra_a_command_names_it(
    package: str, extra: str, script: str, arguments: str, tmp_path: Path
) -> None:
    """A plain `pip install` has none of them. A traceback of an import does not tell which one is needed."""
    without = "import sys; sys.modules |= dict.fromkeys(['torch', 'gguf', 'locust', 'urllib3'])"
    done = subprocess.run(
        [sys.executable, "-c", f"{without}; {script}", *arguments.split()],
        env=os.environ | {"OUTRIDER_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert f"{package} is not installed: pip install '.[{extra}]' in a checkout of Outrider" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("package", "unfit"),
    [
        ("gguf", "0.17.0"),  # imports sentencepiece, which 0.10 does not require and Python 3.13 has no wheel of
        ("prometheus-client", "0.22.1"),  # has no name for the content type of Prometheus' text format
        ("rich", "13.0.1"),  # knows no arguments with which structlog shows an exception
        ("typer", "0.18.0"),  # knows no settings of fixed values; before 0.16 fails at --help with today's Click
    ],
)
def test_versions_that_do_not_work_are_not_admitted(package: str, unfit: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = (project["dependencies"], *project["optional-dependencies"].values())
    needed = [made for made in map(Requirement, itertools.chain(*lists)) if made.name == package]
    assert needed
    assert not any(made.specifier.contains(unfit) for made in needed)


@pytest.mark.parametrize("imported", ["typing_extensions", "typer", "pydantic"])
def test_ctrl_c_while_the_command_line_is_imported_leaves_no_traceback(imported: str) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["outrider"].partition(":")
    script = f"from {module} import {name}; {name}()"
    line = [sys.executable, "-X", "importtime", "-c", script, "doctor"]  # reports each module that it has imported
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stderr is not None
        while process.stderr.readline().rpartition("|")[2].strip() != imported:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        said = [line for line in process.stderr if not line.startswith("import time:")]
    assert said == []
    assert process.returncode == -signal.SIGINT, "a shell tells 130"


@pytest.mark.parametrize(
    ("without", "module"), [("torch", "verifier.__main__"), ("transformers", "drafter.service, coordinator.__main__")]
)
def test_services_load_what_takes_long_where_it_is_needed(without: str, module: str) -> None:
    """A verifier's wrong flags are told before torch is there, and a drafter that copies needs no tokenizer."""
    script = f"import sys; sys.modules[{without!r}] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr


def test_uvicorn_stays_within_the_versions_that_its_subclasses_were_tested_with() -> None:
    """They override what uvicorn calls by itself: another version may not call it any more, without an error."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (needed,) = (Requirement(text) for text in project["dependencies"] if text.startswith("uvicorn"))
    assert not needed.specifier.contains("99"), "bounded"
    assert needed.specifier.contains(uvicorn.__version__)
    overridden = [name for name, value in vars(Connection).items() if callable(value) and not name.startswith("_")]
    assert overridden
    assert not [name for name in overridden if not hasattr(H11Protocol, name)]
    assert hasattr(uvicorn.Server, "capture_signals")


def test_the_contract_can_be_compiled_for_go() -> None:
    """`protoc --go_out` refuses a file without this option; with one package for all, no file imports another."""
    contract = [pb.DESCRIPTOR for pb in (common_pb2, coordinator_pb2, drafter_pb2, multiplex_pb2, verifier_pb2)]
    assert len(contract) == len(list((ROOT / "proto/outrider/v1").glob("*.proto")))
    assert {file.GetOptions().go_package for file in contract} == {"outrider/v1;outriderv1"}
