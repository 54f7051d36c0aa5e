"""Arithmetic, requests, flags and output of `outrider bench capacity --fleet`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from rich.console import Console
from typer.testing import CliRunner

from outrider.bench.common.report import Row, write_json
from outrider.bench.fleet import plot
from outrider.bench.fleet.figures import imbalance, limit_of, load_row, summarise, with_scaling
from outrider.bench.fleet.fleets import FleetUnderLoad, check_settings, with_room
from outrider.bench.fleet.load import LoadedAnswer, LoadRecord, _Load, run_cancellable
from outrider.bench.fleet.options import FleetExtent, FleetSize
from outrider.bench.fleet.prompts import PromptMix, read_texts
from outrider.bench.fleet.table import line, show
from outrider.cli.app import app
from outrider.client.events import Finished
from outrider.launch.services import read_assignments
from outrider.launch.stack import LaunchPlan
from outrider.protocol.errors import Expired, InvalidRequest, OutriderError, StartupError
from outrider.protocol.speculation import FinishReason
from outrider.protocol.statistics import GenerationStats

ONE = FleetSize(1, 1, 0)
EXTENT = FleetExtent((ONE, FleetSize(2, 1, 1)), (4, 96), 4.0, 32, 4, None)


def finished(prompt: int, output: int, cached: int, steps: int = 1) -> Finished:
    stats = GenerationStats(steps=steps, cached_tokens=cached, mean_step_ms=10.0 * steps, mean_wait_ms=3.0 * steps)
    return Finished("", FinishReason.LENGTH, "", prompt, output, stats)


def record() -> LoadRecord:
    """Two seconds, from 10 to 12: answers before them, before and in them, within, one that fails, and one later."""
    return LoadRecord(
        sessions=3,
        answers=[
            LoadedAnswer(7.0, [(8.0, 4)], 9.5, finished(1000, 4, 1000, steps=4)),
            LoadedAnswer(8.0, [(9.0, 5), (10.5, 2), (11.0, 3)], 11.0, finished(100, 10, 0, steps=2)),
            LoadedAnswer(10.0, [(10.2, 1), (10.4, 2), (11.4, 4), (12.5, 9)], 12.5, finished(50, 16, 50)),
            LoadedAnswer(10.5, [(11.1, 1)], 11.2, finished(60, 1, 48)),
            LoadedAnswer(11.0, [], 11.1, error="overloaded"),
            LoadedAnswer(11.0, [], 13.0, error="overloaded"),
        ],
        verifier_sessions=[(9.0, {"a": 9, "b": 0}), (10.5, {"a": 3, "b": 0}), (11.5, {"a": 3, "b": 2})],
        began=10.0,
        ended=12.0,
        cpu_s={"client": 0.5, "verifier-1": 1.5},
    )


def test_figures_are_of_the_measured_time() -> None:
    row = load_row(FleetSize(2, 1, 0), record())
    assert (row["verifiers"], row["coordinators"], row["drafters"], row["sessions"]) == (2, 1, 0, 3)
    assert row["tokens_per_s"] == pytest.approx((2 + 3 + 1 + 2 + 4 + 1) / 2)
    assert row["session_tokens_per_s"] == pytest.approx((3 / 0.5 + 6 / 1.2) / 2), "of the answers with two arrivals"
    assert row["between_tokens_p50_ms"] == pytest.approx(500)
    assert row["between_tokens_p99_ms"] == pytest.approx(1000)
    assert row["first_token_p50_ms"] == pytest.approx((200 + 600) / 2), "the first answer's came before"
    assert row["first_token_p99_ms"] == pytest.approx(600)
    assert row["cached_share"] == pytest.approx(48 / 160), "of the two answers that ended within"
    assert row["tokens_per_step"] == pytest.approx(11 / 3)
    assert row["step_ms"] == pytest.approx((20 * 2 + 10) / 3), "each answer by its steps"
    assert row["wait_ms"] == pytest.approx((6 * 2 + 3) / 3)
    assert (row["answers"], row["failures"]) == (2, {"overloaded": 1})
    assert row["cpus"] == {"client": 0.25, "verifier-1": 0.75}


def test_imbalance_is_of_the_sessions_that_verifiers_have_over_time() -> None:
    assert imbalance(record()) == pytest.approx(6 / ((6 + 2) / 2))
    idle = replace(record(), verifier_sessions=[(10.5, {"a": 0, "b": 0})])
    assert imbalance(idle) is None
    left = replace(record(), verifier_sessions=[(10.5, {"a": 1, "b": 1}), (11.0, {"a": 2})])
    assert imbalance(left) == pytest.approx(3 / 2)


def test_a_fleet_that_answers_nothing_has_no_times() -> None:
    row = load_row(ONE, replace(record(), answers=[LoadedAnswer(10.0, [], 11.0, error="unavailable")]))
    assert row["tokens_per_s"] == 0
    assert row["failures"] == {"unavailable": 1}
    for key in ("session_tokens_per_s", "between_tokens_p99_ms", "first_token_p50_ms", "cached_share", "step_ms"):
        assert row[key] is None, key


def rows(*given: tuple[FleetSize, int, float]) -> list[Row]:
    return [
        load_row(size, replace(record(), sessions=sessions)) | {"tokens_per_s": speed}
        for size, sessions, speed in given
    ]


def test_fleets_are_compared_with_one_verifier_under_the_same_sessions() -> None:
    two, drafted = FleetSize(2, 1, 0), FleetSize(2, 1, 1)
    measured = rows((ONE, 8, 50.0), (ONE, 32, 100.0), (two, 8, 60.0), (two, 32, 180.0), (drafted, 8, 90.0))
    assert [row["scaling"] for row in with_scaling(measured)] == [1.0, 1.0, 1.2, 1.8, None]
    peaks = [(each["tokens_per_s"], each["sessions"], each["scaling"]) for each in summarise(measured)["fleets"]]
    assert peaks == [(100.0, 32, 1.0), (180.0, 32, 1.8), (90.0, 8, None)]
    assert summarise(measured)["failures"] == 5


def printed(measured: list[Row]) -> str:
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        show(console, with_scaling(measured), summarise(measured), "toy models")
        return console.export_text()


def test_the_table_fits_a_terminal_and_says_what_to_mind() -> None:
    text = printed(rows((ONE, 8, 50.0), (FleetSize(2, 1, 0), 8, 80.0)))
    (shown,) = [each.split() for each in text.splitlines() if "2+1+0" in each]
    assert shown[:4] == ["2+1+0", "8", "80", "1.60"]
    assert shown[8:11] == ["1.50", "30%", "1"]
    assert "2 verifiers, 1 coordinator, 0 drafters: at most 80 tokens/s, with 8 sessions: 1.60 × one verifier" in text
    assert "80% of ideal" in text
    assert "1 failed: overloaded" in text


def test_a_machine_or_a_client_without_cpu_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    (row,) = rows((ONE, 8, 50.0))
    assert limit_of(row) == ""
    assert limit_of(row | {"cpus": {"client": 0.4, "verifier-1": 1.5}}) == "this machine"
    assert limit_of(row | {"cpus": {"client": 0.85, "verifier-1": 0.2}}) == "the client"
    busy = [row | {"cpus": {"client": 0.85}}]
    assert "8 sessions: the client had no CPU time left" in " ".join(printed(busy).split())


def test_progress_shows_each_measurement() -> None:
    (row,) = rows((ONE, 8, 50.0))
    assert line(row) == "1 verifier, 1 coordinator, 0 drafters, 8 sessions: 50 tokens/s, first token 400 ms, 1 failed"


def test_what_was_measured_is_drawn(tmp_path: Path) -> None:
    drawn = tmp_path / "fleet.png"
    silent = load_row(ONE, replace(record(), answers=[]))
    plot.draw([*rows((ONE, 8, 50.0), (FleetSize(2, 1, 1), 8, 90.0)), silent], "toy models", drawn)
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert drawn.stat().st_size > 20_000


def test_requests_share_system_prompts_and_differ_otherwise() -> None:
    texts = read_texts(None)
    assert len(texts) > 50
    mix = PromptMix(texts, 3, 32)
    requests: list[Any] = [mix.request(number, "salt") for number in range(60)]
    assert len({request["chat"][0] for request in requests}) == 3
    assert len({request["chat"][1] for request in requests}) == 60
    assert len({request["chat"][1][1].partition(": ")[2] for request in requests}) > 30, "prompts of all kinds"
    lengths = [request["params"].max_tokens for request in requests]
    assert (min(lengths), max(lengths)) == (pytest.approx(16, abs=2), pytest.approx(48, abs=2))
    assert sum(lengths) / len(lengths) == pytest.approx(32, abs=2)
    assert requests[7] == mix.request(7, "salt")
    assert all(request["cache_salt"] == "salt" for request in requests)
    bare: Any = replace(mix, system_prompts=0, share=0.25).request(5, "")
    ((role, text),) = bare["chat"]
    whole: Any = replace(mix, system_prompts=0).request(5, "")
    assert role == "user"
    assert len(text) < 0.3 * len(whole["chat"][0][1]) + 5


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--verifiers", "2"), ("--verifiers needs --fleet",)),
        (("--gamma", "0"), ("--gamma 0 needs --fleet",)),
        (("--fleet", "--verifiers", "0"), ("--verifiers", "numbers from 1 to 16")),
        (("--fleet", "--drafters", "0,-1"), ("--drafters", "numbers from 0 to 16")),
        (("--fleet", "--sessions", "8,,32"), ("--sessions", "numbers from 1 to 1024")),
        (("--fleet", "--sessions", "5000"), ("--sessions", "numbers from 1 to 1024")),
        (("--fleet", "--verifiers", "1,2,3,4,5,6", "--sessions", "1,2,3,4,5,6,7,8,9"), ("108", "at most 100")),
        (("--fleet", "--api-key", "x"), ("--api-key needs --endpoint",)),
        (("--fleet", "--drafter", "ngram"), ("--drafter needs --target",)),
        (("--fleet", "--target", "x", "--acceptance", "0.5"), ("--acceptance", "leave it out with --target")),
        (("--fleet", "--endpoint", "127.0.0.1:1", "--verifiers", "2"), ("--verifiers", "leave it out with --endpoint")),
        (("--fleet", "--plot", "fleet.pdf"), ("--plot", ".png")),
        (("--fleet", "--target", "x", "--verify-pace", "4:1,2:3"), ("cannot read a pace",)),
    ],
)
def test_flags_that_cannot_be_are_told(flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    error = CliRunner().invoke(app, ["bench", "capacity", *flags]).exception
    assert isinstance(error, OutriderError)
    assert isinstance(error, InvalidRequest) or "pace" in error.message
    assert all(word in error.message for word in words), error.message


def test_services_have_room_for_all_sessions_unless_set_otherwise() -> None:
    given = read_assignments(["verifier.max-sessions=3", "verifier-2.device=cpu"])
    plan = with_room(LaunchPlan(), EXTENT, given, toys=True)
    assert plan.overrides["verifier"]["max_sessions"].value == "3"
    assert plan.overrides["drafter"]["max_sessions"].value == "96"
    assert int(plan.overrides["verifier"]["kv_tokens"].value) > 96 * 1000
    check_settings(plan, EXTENT)
    for wrong, word in (("verifier-3.device=cpu", "verifier-3"), ("coordinator.max-sessions=none", "max-sessions")):
        with pytest.raises(StartupError, match=word):
            check_settings(with_room(LaunchPlan(), EXTENT, read_assignments([wrong]), toys=True), EXTENT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_measurement_in_order(number: signal.Signals) -> None:
    closed = []

    async def measure() -> None:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), number)
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0)  # calls can still be closed
            closed.append(True)

    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt):
        run_cancellable(measure())
    assert closed
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("given", ["--api-key s3cret", "--api-key=s3cret"])
def test_a_report_holds_no_key(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds its command, and is passed on."""
    monkeypatch.setattr(sys, "argv", ["outrider", "bench", *given.split(), "--tls-key", "k.pem"])
    write_json(tmp_path / "figures.json", [], {})
    command = json.loads((tmp_path / "figures.json").read_text())["command"]
    assert command == f"outrider bench {given.replace('s3cret', '***')} --tls-key k.pem"


def test_a_coordinator_too_busy_to_tell_its_load_ends_no_measurement() -> None:
    load = _Load(FleetUnderLoad(ONE, ("127.0.0.1:1",), dict), PromptMix(["x"], 0, 8), 1, "salt")
    load._clients = [Mock(model=AsyncMock(), server=AsyncMock(side_effect=Expired("after ten seconds")))]

    async def watch() -> None:
        await asyncio.wait_for(load._watch_verifiers(), 0.1)

    with pytest.raises(TimeoutError):
        asyncio.run(watch())


def test_a_session_asks_until_the_measured_time_is_over() -> None:
    """After a thousand short answers it stopped, and the rest of the time counted as time without tokens."""
    load = _Load(FleetUnderLoad(ONE, ("127.0.0.1:1",), dict), PromptMix(["x"], 0, 8), 1, "salt")
    asked: list[Any] = []

    async def generate(**request: Any) -> AsyncIterator[Finished]:
        asked.append(request["params"].seed)
        await asyncio.sleep(0)
        yield finished(3, 2, 0)

    load._clients = [Mock(generate=generate)]

    async def ask() -> None:
        await asyncio.wait_for(load._ask_in_turn(0), 1.0)

    with pytest.raises(TimeoutError):
        asyncio.run(ask())
    assert asked[:3] == [0, 1, 2], "each another request"
