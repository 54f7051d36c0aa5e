"""What becomes of a request, how requests add up, and what the report says of them."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import pytest

from loadtest.__main__ import table
from loadtest.attempt import TEXT_DIFFERS, Attempt
from loadtest.load_clients import ReplyPiece, Speculation
from loadtest.report.page import ms, page
from loadtest.report.record import Histogram, Recorder, RequestGroup, RequestTally, merge_all
from loadtest.report.summary import NO_REQUESTS, LoadRun, Summary, summarise
from loadtest.shapes import ShapePart, ShapeSpan
from loadtest.workload import Output, cases
from outrider.protocol.errors import Expired, OutriderError, Overloaded, PeerLost, Unavailable

CHAT, CODE = cases("chat", 8)[0], cases("code", 8)[0]
EXPECTED = Output("one two three", (1, 2, 3), 3)
GUESSES = Speculation(steps=2, guesses=5, accepted=1)
OVER_GRPC = [
    ReplyPiece("one ", (1,)),
    ReplyPiece("two ", (2,)),
    ReplyPiece("three", (3,)),
    ReplyPiece("", (), 3, GUESSES),
]
OVER_HTTP = [ReplyPiece("one ", None), ReplyPiece("two three", None), ReplyPiece("", None, 3, GUESSES)]


# One request.


def ended(
    pieces: list[ReplyPiece], error: OutriderError | None = None, protocol: str = "grpc", case: Any = CHAT
) -> Attempt:
    def streamed() -> Any:
        yield from pieces
        if error is not None:
            raise error

    attempt = Attempt(protocol, case)
    attempt.run(streamed(), EXPECTED)
    return attempt


@pytest.mark.parametrize("pieces", [OVER_GRPC, OVER_HTTP], ids=["grpc", "http"])
def test_a_right_text_is_right_over_both_protocols(pieces: list[ReplyPiece]) -> None:
    attempt = ended(pieces)
    assert (attempt.error, attempt.shed, attempt.compared, attempt.tokens) == ("", False, True, 3)
    assert attempt.pause_s == 0
    assert attempt.speculation == GUESSES
    assert attempt.first_token_ms is not None
    assert attempt.first_token_ms <= attempt.total_ms


@pytest.mark.parametrize(
    "pieces",
    [
        [ReplyPiece("one ", (1,)), ReplyPiece("too", (9,)), ReplyPiece("", (), 2)],
        [ReplyPiece("one two three", (1, 2, 4)), ReplyPiece("", (), 3)],
        [ReplyPiece("one two thre", None), ReplyPiece("", None, 3)],
        [ReplyPiece("one two three", None), ReplyPiece("", None, 4)],
    ],
)
def test_a_wrong_text_is_a_failure(pieces: list[ReplyPiece]) -> None:
    attempt = ended(pieces)
    assert (attempt.error, attempt.shed, attempt.compared) == (TEXT_DIFFERS, False, True)
    assert attempt.detail


@pytest.mark.parametrize(("kind", "pause"), [(Overloaded, 2.0), (Unavailable, 2.0)])
def test_want_of_room_before_anything_came_is_shed(kind: type[OutriderError], pause: float) -> None:
    attempt = ended([], kind("full", retry_after_ms=2000))
    assert (attempt.error, attempt.shed, attempt.compared) == ("", True, False)
    assert pause <= attempt.pause_s <= 1.5 * pause, "not all come back at once"
    assert 1.0 <= ended([], kind("full")).pause_s <= 1.5


@pytest.mark.parametrize(
    ("pieces", "error", "called"),
    [
        (OVER_GRPC[:1], Overloaded("full"), "overloaded"),
        (OVER_HTTP[:1], Unavailable("leaving"), "unavailable"),
        ([], PeerLost("gone"), "peer_lost"),
        (OVER_GRPC[:2], Expired("late"), "expired"),
    ],
)
def test_everything_else_is_a_failure(pieces: list[ReplyPiece], error: OutriderError, called: str) -> None:
    attempt = ended(pieces, error)
    assert (attempt.error, attempt.shed, attempt.compared) == (called, False, False)
    assert attempt.pause_s >= 1.0


def timed(*marks: tuple[float, ReplyPiece]) -> Attempt:
    """An attempt whose pieces came then."""
    attempt = Attempt("http", CHAT)
    attempt._pieces = list(marks)
    attempt.tokens = next((piece.output_tokens for _, piece in marks if piece.output_tokens is not None), 0)
    attempt.total_ms = marks[-1][0]
    return attempt


def test_tokens_that_came_together_share_their_gap() -> None:
    attempt = timed(
        (100, ReplyPiece("a", (1,))),
        (150, ReplyPiece("", (2,))),
        (190, ReplyPiece("bcd", (3, 4))),
        (191, ReplyPiece("", (), 4)),
    )
    assert [(arrival.at_ms, arrival.tokens) for arrival in attempt.arrivals] == [(100, 1), (150, 1), (190, 2)]
    assert [(arrival.tokens, gap) for arrival, gap in attempt.gaps] == [(1, 50), (2, 20)]
    assert attempt.inter_token_ms == pytest.approx((190 - 100) / 3)
    assert attempt.first_token_ms == 100


def test_tokens_that_are_not_told_are_shared_out_by_characters() -> None:
    attempt = timed(
        (100, ReplyPiece("ab", None)),
        (150, ReplyPiece("c", None)),
        (190, ReplyPiece("defgh", None)),
        (195, ReplyPiece("", None, 4)),
    )
    assert [arrival.tokens for arrival in attempt.arrivals] == [1, 1, 2]
    many = timed(*((i, ReplyPiece("x" * (1 + i % 7), None)) for i in range(100)), (100, ReplyPiece("", None, 37)))
    assert sum(arrival.tokens for arrival in many.arrivals) == 37
    assert sum(arrival.tokens * gap for arrival, gap in many.gaps) <= 99


def test_an_answer_without_text_has_no_first_token() -> None:
    attempt = timed((50, ReplyPiece("", None, 1)))
    assert (attempt.arrivals, attempt.first_token_ms, attempt.inter_token_ms) == ([], None, None)
    Recorder().add(attempt)


# Many.


def test_percentiles_are_exact_to_a_hundredth() -> None:
    rng = random.Random(5)
    times = sorted(rng.lognormvariate(4, 2) for _ in range(5001))
    spread, halves = Histogram(), (Histogram(), Histogram())
    for i, value in enumerate(times):
        spread.add(value)
        halves[i % 2].add(value)
    merged = Histogram(msgpack.loads(msgpack.dumps(halves[0].packed()), strict_map_key=False))
    merged.merge(halves[1])
    for share in (0.01, 0.5, 0.95, 0.99, 1.0):
        exact = times[max(0, -int(-share * len(times) // 1) - 1)]
        assert spread.percentile(share) == pytest.approx(exact, rel=0.0101)
        assert merged.percentile(share) == spread.percentile(share)
    assert Histogram().percentile(0.5) is None
    spread.add(0.0)  # no logarithm of nothing


START = 1_000_000


def at(second: float, protocol: str, case: Any, *, ms: float = 500, **changed: Any) -> Attempt:
    """A request that began then and brought its three tokens in thirds of its time."""
    attempt = Attempt(protocol, case, begun_at=START + second)
    attempt._pieces = [(ms * (i + 1) / 3, piece) for i, piece in enumerate(OVER_GRPC[:3])]
    attempt.tokens = 3
    attempt.total_ms = ms
    for name, value in changed.items():
        setattr(attempt, name, value)
    return attempt


def attempts() -> list[Attempt]:
    """Ten seconds: three requests a second, then one with many refusals, then three again."""
    found = []
    for second in range(12):
        calm = second < 4 or second >= 8
        found += [at(second + 0.1 * i, ("grpc", "http")[i % 2], (CHAT, CODE)[i % 2]) for i in range(3 if calm else 1)]
        if not calm:
            found += [at(second, "http", CHAT, shed=True, ms=1)] * 5
    return found


SPANS = [
    ShapeSpan(ShapePart("before", 3, 4), START, START + 4),
    ShapeSpan(ShapePart("peak", 9, 3), START + 4.5, START + 7.5),
    ShapeSpan(ShapePart("after", 3, 4), START + 8.0, START + 12.0),
]


def load(**changed: Any) -> dict[str, Any]:
    return {"shape": "overload", "users": 3, "gamma": None, "kinds": ""} | changed


def summary(recorder: Recorder | None = None, spans: list[ShapeSpan] = SPANS, **more: Any) -> Summary:
    if recorder is None:
        recorder = recorded(attempts())
    run = LoadRun(float(START), **({"target": "tiny", "endpoints": ["127.0.0.1:1"], "load": load()} | more))
    return summarise(recorder, spans, run)


def recorded(those: list[Attempt]) -> Recorder:
    recorder = Recorder()
    for attempt in those:
        recorder.add(attempt)
    for span in SPANS:
        for second in range(int(span.began), int(span.ended)):
            recorder.record_users(second, span.part.users)
    return recorder


def test_parts_and_recovery_come_from_the_record() -> None:
    found = summary()
    assert [(part.name, part.users, part.shed) for part in found.parts] == [
        ("before", 3, 0),
        ("peak", 9, 15),
        ("after", 3, 0),
    ]
    before, peak, after = (part.tokens_per_s for part in found.parts)
    assert (before, peak) == (pytest.approx(9), pytest.approx(3))
    assert after == pytest.approx(9)
    assert found.recovery == pytest.approx(after / before)
    assert found.seconds == pytest.approx(11)
    assert found.tokens_per_s == pytest.approx((9 * 4 + 3 * 3 + 9 * 4) / 11), "a long part counts for more"
    assert (found.all.requests, found.all.compared, found.all.shed, found.all.tokens) == (28, 28, 20, 84)
    assert found.verdict == ""
    sorts = {(sort.protocol, sort.kind): sort for sort in found.sorts}
    assert set(sorts) == {("grpc", "chat"), ("grpc", ""), ("http", "chat"), ("http", "code"), ("http", "")}
    assert (sorts["http", "code"].requests, sorts["http", ""].shed) == (8, 20)
    assert sorts["http", "chat"].requests == 0
    assert sorts["grpc", "chat"].total_ms.p50 == pytest.approx(500, rel=0.01)
    assert sorts["grpc", "chat"].first_token_ms.p99 == pytest.approx(500 / 3, rel=0.01)
    assert sorts["grpc", "chat"].inter_token_ms.p50 == pytest.approx(500 / 3, rel=0.01)
    assert sorts["http", "chat"].total_ms.p50 is None


def test_a_gap_counts_once_for_each_token_that_came_after_it() -> None:
    attempt = timed(
        (100, ReplyPiece("a", (1,))),
        (200, ReplyPiece("b", (2,))),
        (300, ReplyPiece("c", (3,))),
        (390, ReplyPiece("defghijkl", tuple(range(9)))),
        (391, ReplyPiece("", (), 12)),
    )
    attempt.begun_at = START
    (sort, _) = summary(recorded([attempt])).sorts
    assert sort.inter_token_ms.p50 == pytest.approx(10, rel=0.01)


def test_workers_records_add_up_to_the_same_summary() -> None:
    """Sent in pieces, out of order, as locust sends it."""
    leader = recorded([])
    workers = [Recorder(), Recorder()]
    reports = []
    for i, attempt in enumerate(attempts()):
        workers[i % 2].add(attempt)
        if i % 5 == 0:
            reports.append(workers[i % 2].drain())
    reports += [worker.drain() for worker in workers]
    random.Random(1).shuffle(reports)
    for report in reports:
        leader.merge(msgpack.loads(msgpack.dumps(report), strict_map_key=False))
    assert summary(leader) == summary()
    assert workers[0].drain() == []


def test_a_tally_survives_the_way() -> None:
    tally = merge_all(tally for *_, tally in recorded(attempts()).tallies)
    tally.errors["expired"] += 2
    assert (
        RequestTally.unpacked(msgpack.loads(msgpack.dumps(tally.packed()), strict_map_key=False)).packed()
        == tally.packed()
    )
    assert tally.failures == 2


def test_guesses_of_complete_outputs_are_counted() -> None:
    whole = [ended(OVER_GRPC), ended(OVER_HTTP, protocol="http")]
    for attempt in [*whole, cut_off := ended(OVER_GRPC[:2], PeerLost("gone"))]:
        attempt.begun_at = START
    found = summary(recorded([*whole, cut_off]))
    assert (found.all.checked_steps, found.all.guesses, found.all.accepted) == (4, 10, 2)
    assert found.all.acceptance_length == 1.5
    assert "2 guesses accepted" in page(found)
    assert summary(recorded([])).all.acceptance_length is None


def test_what_failed_brings_no_tokens_and_fails_the_run() -> None:
    found = summary(
        recorded([at(0, "grpc", CHAT), at(1, "grpc", CHAT, error="expired"), at(2, "grpc", CHAT, error=TEXT_DIFFERS)])
    )
    assert (found.all.requests, found.all.compared, found.all.tokens, found.all.failures) == (3, 2, 3, 2)
    assert (found.different_texts, found.verdict) == (1, "1 × expired, 1 × text differs")


def test_a_run_in_which_nothing_completed_fails() -> None:
    for recorder in (recorded([]), recorded([at(1, "http", CHAT, shed=True)])):
        found = summary(recorder)
        assert (found.verdict, found.tokens_per_s, found.recovery) == (NO_REQUESTS, 0.0, None)
    assert summary(Recorder(), spans=[]).verdict == NO_REQUESTS


def test_a_fleet_that_does_not_come_back_fails() -> None:
    slow = [attempt for attempt in attempts() if attempt.begun_at < START + 8 or attempt.begun_at % 1 == 0]
    found = summary(recorded(slow))
    assert found.recovery == pytest.approx(1 / 3, rel=0.1)
    assert found.verdict == "throughput recovered to 33% only"


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_a_run_that_is_interrupted_in_its_last_part_is_not_judged_by_it(seconds: float) -> None:
    """Outputs on their way do not count yet: of a second of them there were none, which failed the run."""
    early = [attempt for attempt in attempts() if attempt.begun_at < START + 8]
    part = SPANS[-1].part
    found = summary(recorded(early), [*SPANS[:-1], ShapeSpan(part, START + 8.0, START + 8.0 + seconds)])
    assert (found.verdict, found.recovery) == ("", None)


def test_a_slice_counts_for_a_part_as_far_as_it_lies_in_it() -> None:
    """Its tokens do; a refusal on the edge of a part is of no part."""
    recorder = Recorder(0.25)
    recorder.add(at(0, "grpc", CHAT, ms=900))  # tokens after 0.3, 0.6 and 0.9 seconds
    for second in (0.55, 0.8, 1.05):
        recorder.add(at(second, "grpc", CHAT, shed=True, ms=1))
    found = summary(recorder, [ShapeSpan(ShapePart("steady", 1, 0.45), START + 0.625, START + 1.125)])
    assert found.tokens_per_s == pytest.approx(1.5 / 0.5)
    assert found.parts[0].shed == 1
    assert found.all.shed == 3


@pytest.mark.parametrize("seconds", [8, 60, 3600, 24 * 3600])
def test_a_long_run_takes_no_more_room_than_another(seconds: int) -> None:
    recorder = Recorder.of(seconds)
    for number in range(2000):
        recorder.add(at(seconds * number / 2000, "grpc", CHAT))
        recorder.record_users(START + seconds * number / 2000, 5)
    assert len(list(recorder.tallies)) < 1010
    series = summary(recorder, spans=[]).series
    assert len(series.at_s) <= 150
    assert series.step_s >= 1
    assert {round(later - earlier, 6) for earlier, later in pairwise(series.at_s)} == {round(series.step_s, 6)}
    assert sum(series.tokens_per_s) * series.step_s == pytest.approx(3 * 2000)
    assert set(series.users) == {5}


def test_figures_survive_their_file(tmp_path: Path) -> None:
    summary().save(tmp_path / "summary.json")
    assert Summary.load_from(tmp_path / "summary.json") == summary()
    assert json.loads((tmp_path / "summary.json").read_text())["recovery"] == pytest.approx(1.0)
    assert table(summary()).row_count == 13


# The page.


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("recorder", [None, Recorder(), recorded([at(0, "grpc", CHAT, error="expired")])])
def test_the_page_is_whole_and_needs_nothing_else(recorder: Recorder | None) -> None:
    html = page(summary(recorder, endpoints=["<script>alert(1)</script>"], target="a & b"))
    elements = Elements()
    elements.feed(html)
    elements.close()
    assert elements.open == []
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert "a &amp; b" in html
    for tag, attributes in elements.found:
        assert tag not in ("link", "script", "img", "iframe", "object")
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#"), attributes
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html)
    assert "default-src &#x27;none&#x27;" in html
    assert not re.search(r"#(0\d)\1\1", html), "a colour that the page does not know"


def test_the_page_shows_what_the_summary_says() -> None:
    html = page(summary())
    assert html.count("<svg") == 5
    for part in ("✓ Passed.", "before", "peak", "after", "Recovery", "100%", ">both<", "Shed and failed"):
        assert part in html
    assert page(summary()) == html, "the same run, the same page"
    failed = page(summary(recorded([at(0, "grpc", CHAT, error="expired")])))
    assert "✗ Failed." in failed
    assert "1 × expired" in failed


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (0.5, "0.5 ms"), (9.96, "10.0 ms"), (12.3, "12 ms"), (1234, "1.23 s"), (12_345, "12.3 s")],
)
def test_times_are_shown_with_a_fitting_unit(value: float | None, shown: str) -> None:
    assert ms(value) == shown


def test_sorts_are_told_apart() -> None:
    assert {sort for _, sort, _ in recorded(attempts()).tallies} == {
        RequestGroup("grpc", "chat"),
        RequestGroup("http", "code"),
        RequestGroup("http", "chat"),
    }


@pytest.mark.parametrize("given", [b"", b"\xff", b"{}"])
def test_the_report_of_a_file_that_is_no_summary_is_refused_in_a_sentence(given: bytes) -> None:
    command = [sys.executable, "-m", "loadtest.report.page"]
    done = subprocess.run(command, input=given, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    (told,) = done.stderr.decode().splitlines()
    assert told.startswith("standard input is not the summary.json of a run: ")
