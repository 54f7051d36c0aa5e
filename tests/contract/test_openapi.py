"""Schemathesis against a real server: what the document allows works, what it forbids is refused, as it is written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx2 as httpx
import pytest

from coordinator.api.http.openapi import document
from tests.cluster import ROOT, Cluster, environment

SECONDS = 6


def examine(cluster: Cluster, folder: Path, *options: str, seconds: float) -> tuple[int, bool]:
    """How many requests were sent, and whether to every operation; fails with what Schemathesis says."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{cluster.coordinators[0].web}/openapi.json"]
    command += [
        "--checks",
        "all",
        "--exclude-checks",
        "positive_data_acceptance",
        "--no-color",
        "--request-timeout",
        "30",
    ]
    command += ["--report", "json", "--report-json-path", str(report), *options]
    run = subprocess.run(
        command,
        cwd=folder,
        env=environment(PYTHONPATH=str(ROOT), SCHEMATHESIS_HOOKS="tests.contract.openapi_hooks"),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
    found = json.loads(report.read_text())
    operations = found["operations"]
    assert operations["selected"] > 0
    return int(found["test_cases"]["generated"]), operations["tested"] == operations["selected"]


ALL = ("--phases", "examples,coverage,fuzzing")


def test_what_is_asked_for_is_as_the_document_says(cluster: Cluster, tmp_path: Path) -> None:
    generated, whole = examine(cluster, tmp_path, "--include-method", "GET", *ALL, "-n", "20", seconds=100)
    assert generated > 50
    assert whole


@pytest.mark.timeout(400)
def test_what_is_generated_is_as_the_document_says(cluster: Cluster, tmp_path: Path) -> None:
    """Hundreds of cases on two idle cores. Busy ones need several runs, each with its own seed and twice the time."""
    generated, whole, seconds = 0, False, SECONDS
    while generated <= 100 or not whole:
        options = ("--include-method", "POST", *ALL, "--max-time", str(seconds))
        cases, whole = examine(cluster, tmp_path, *options, seconds=seconds + 60)
        generated += cases
        seconds *= 2


@pytest.mark.prove
@pytest.mark.timeout(3600)
def test_the_server_keeps_its_document_for_long(cluster: Cluster, tmp_path: Path) -> None:
    generated, whole = examine(cluster, tmp_path, *ALL, "-n", "1000", seconds=3500)
    assert generated > 3000
    assert whole


def test_the_document_names_every_route_and_no_other(cluster: Cluster) -> None:
    with httpx.Client(base_url=cluster.coordinators[0].web) as web:
        for path, operations in document()["paths"].items():
            for method in operations:
                reply = web.request(method, path.replace("{model}", "target"))
                assert reply.status_code not in (404, 405), path
