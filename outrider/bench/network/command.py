"""`outrider bench network`: gain of a remote drafter over links of every length, by mode."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from rich.console import Console

from outrider.base.config import option
from outrider.base.processes import end_on_signals
from outrider.bench.common.progress import progress_spinner
from outrider.bench.common.remote_pair import ReferenceAnswers, ThrottledTimes, make_pair, remote_setup
from outrider.bench.common.report import Row, check_files, import_on_use, write_json
from outrider.bench.network.cases import few_links, link_cases, modes, parse_drafters, parse_links
from outrider.bench.network.figures import NetworkResults, report_rows, summarise
from outrider.bench.network.measurement import PROMPT, NetworkMeasurement, drift_blur
from outrider.bench.network.prediction import parse_step_times, prediction_cases, simulate
from outrider.bench.network.table import show
from outrider.protocol.errors import InvalidRequest

_LEAST_TOKENS = 16  # an answer has times between its tokens, whatever arrives together


def network(
    quick: Annotated[bool, option("--quick", "Three links, one short answer per mode.")] = False,
    verify: Annotated[
        str, option("--verify-pace", "Time of a verifier's step by its tokens, tokens:ms.")
    ] = "1:40,17:40,33:80",
    drafters: Annotated[
        str,
        option(
            "--drafters",
            "acceptance:ms of each drafter: acceptance of its first guess, and time of its step. The first is measured "
            "over every link, the others over those of 15 and 80 ms. Empty: 0.8:4,0.5:4,0.8:16, with --quick the "
            "first.",
        ),
    ] = "",
    tokens: Annotated[int, option("--tokens", "Length of an answer; 0: 192, with --quick 96.", min=0, max=1000)] = 0,
    rounds: Annotated[int, option("--rounds", "Answers per mode and link; 0: 3, with --quick 1.", min=0)] = 0,
    rtts: Annotated[
        str,
        option(
            "--rtts",
            "Only these round trips in ms, separated by commas; 15~4: with jitter; 15@32: with a limit in KiB/s.",
        ),
    ] = "",
    json_file: Annotated[Path | None, option("--json", "Write the results to this file.")] = None,
    plot_file: Annotated[Path | None, option("--plot", "Draw the results into this .png file.")] = None,
) -> None:
    """Measure a remote drafter in every mode over every link, and compare adaptive control with the best fixed mode.

    The services and sockets are real. The models are toys behind throttled engines, so the timing of a large pair can
    be studied on any machine. A link emulator connects coordinator and drafter.
    """
    check_files(json_file, plot_file)
    if 0 < tokens < _LEAST_TOKENS:
        raise InvalidRequest.of("--tokens", tokens, f"0, or at least {_LEAST_TOKENS}")
    parse_step_times(verify)
    links = parse_links(rtts) if rtts else link_cases(quick=quick)
    to_measure = parse_drafters(drafters or ("0.8:4" if quick else "0.8:4,0.5:4,0.8:16"))
    tokens = tokens or (96 if quick else 192)
    rounds = rounds or (1 if quick else 3)
    end_on_signals()
    console = Console()
    used_modes = modes((4, 6) if quick else (2, 4, 6, 8))
    results = NetworkResults()
    worlds: dict[str, Row] = {}
    with tempfile.TemporaryDirectory(prefix="outrider-pair-") as folder, progress_spinner(console) as notify:
        for number, drafter in enumerate(to_measure):
            notify(f"creating toy models, acceptance {drafter.acceptance:g}")
            pair = make_pair(Path(folder) / str(number), drafter.acceptance, ReferenceAnswers(PROMPT, rounds, tokens))
            times = ThrottledTimes(verify, drafter.draft_ms)
            worlds[drafter.label] = {"acceptance": pair.acceptance, "gain": pair.gain, "draft_ms": times.draft_ms}
            if number == 0:
                first, first_times = pair, times
            with remote_setup(pair, times) as setup:
                measurement = NetworkMeasurement(setup, used_modes, tokens, rounds, results)
                for link in links if number == 0 else few_links(links):
                    labelled = replace(link, drafter=drafter.label if number else "")
                    measurement.measure(labelled, pair, times, notify)
        with remote_setup(first, replace(first_times, blur=drift_blur(tokens))) as setup:
            drift = NetworkMeasurement(setup, used_modes, tokens, rounds, results).measure_drift(notify)
        notify("predicting throughput in virtual time")
        cases = prediction_cases(results)
        replies = zip(cases, simulate(list(cases.values())), strict=True)
        predicted = {case: float(reply["tokens_per_s"]) for case, reply in replies}
    summary = summarise(results.measured, predicted, drift, texts_equal=results.texts_equal)
    show(console, results.measured, predicted, summary, worlds, verify)
    if json_file is not None:
        rows = report_rows(results.measured, predicted)
        write_json(json_file, rows, summary | {"drift": drift}, paced=worlds, verify=verify)
    if plot_file is not None:
        plot = import_on_use("matplotlib", "bench", "outrider.bench.network.plot")
        plot.draw(results.measured, first, first_times, plot_file)
