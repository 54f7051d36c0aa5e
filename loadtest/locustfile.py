"""What locust runs: users who send one request after the other and check every text.

Locust is built on gevent, so gRPC is told before any channel exists, and both
clients are synchronous. The process that leads a run asks for the right
answers when it starts and gives them to its workers, which send back what
their users saw.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.experimental.gevent
from locust import LoadTestShape, User, events
from locust.runners import MasterRunner, WorkerRunner

from loadtest.arguments import add_arguments
from loadtest.asking import GRPC, HTTP
from loadtest.assignment import Assignment, assign, look
from loadtest.attempt import Attempt
from loadtest.credentials import ClientCredentials
from loadtest.record import Recorder
from loadtest.settings import Load, LoadTarget
from loadtest.shapes import Course, parts
from loadtest.summary import LoadRun, Summary, summarise
from loadtest.workload import Case, cases, pick
from outrider.protocol.errors import OutriderError

grpc.experimental.gevent.init_gevent()

log = logging.getLogger(__name__)

ASSIGNMENT = "outrider_assignment"  # the message from master to workers
SEEN = "outrider_seen"  # what workers' reports to it have besides locust's
FIRST_TOKEN, INTER_TOKEN, TOTAL, SHED = "first token", "inter-token", "total", "shed"


@dataclass(slots=True)
class RunState:
    """What this process has: hung on locust's environment as `outrider`."""

    where: LoadTarget
    credentials: ClientCredentials
    summary: Path | None
    recorder: Recorder = field(default_factory=Recorder)
    assignment: Assignment | None = None
    course: Course | None = None
    run: LoadRun | None = None

    def summarise(self) -> Summary | None:
        """So far; None before the first run."""
        if self.run is None or self.course is None:
            return None
        return summarise(self.recorder, self.course.spans(), self.run)


class _Asking(User):  # type: ignore[misc]
    """One client with a connection of its own."""

    abstract = True
    protocol = ""

    def on_start(self) -> None:
        self.state: RunState = self.environment.outrider
        assert self.state.assignment is not None, "users are started by a shape"
        self.assignment = self.state.assignment
        self.cases = cases(self.assignment.load.kinds, self.assignment.load.max_tokens)
        self.again: Case | None = None
        self.pause_s = 0.0
        self.asker = self.assignment.asker(self.protocol, self.state.credentials)

    def on_stop(self) -> None:
        self.asker.close()

    def wait_time(self) -> float:
        """Here and not in the task, so that a user who waits can be sent home at once."""
        return self.pause_s

    def generate(self) -> None:
        case = self.again or pick(self.cases)
        attempt = Attempt(self.protocol, case)
        attempt.judge(self.asker.ask(case, self.assignment.load.gamma), self.assignment.answers[case.name])
        self.again = case if attempt.shed else None
        self.pause_s = attempt.pause_s
        self.state.recorder.add(attempt)
        self._tell(attempt)

    def _tell(self, attempt: Attempt) -> None:
        """Locust, for its own page and statistics; inter-token is one figure per request there."""
        if attempt.error:
            log.error("%s %s: %s: %s", attempt.protocol, attempt.case.name, attempt.error, attempt.detail)
        if attempt.shed:
            self._fire(attempt, SHED, attempt.total_ms)
            return
        if attempt.first_token_ms is not None:
            self._fire(attempt, FIRST_TOKEN, attempt.first_token_ms)
        if attempt.inter_token_ms is not None:
            self._fire(attempt, INTER_TOKEN, attempt.inter_token_ms)
        self._fire(attempt, TOTAL, attempt.total_ms, attempt.tokens, attempt.error or None)

    def _fire(self, attempt: Attempt, name: str, ms: float, tokens: int = 0, error: str | None = None) -> None:
        self.environment.events.request.fire(
            request_type=attempt.protocol,
            name=name,
            response_time=ms,
            response_length=tokens,
            exception=error,
            context={"case": attempt.case.name},
        )

    tasks = [generate]  # noqa: RUF012 -- how locust wants it


class GrpcUser(_Asking):
    abstract = False
    protocol = GRPC


class HttpUser(_Asking):
    abstract = False
    protocol = HTTP


class Shaped(LoadTestShape):  # type: ignore[misc]
    """Every run has one, a steady one too: so every run has an end, and answers of its own."""

    abstract = False
    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        environment = self.runner.environment
        state: RunState = environment.outrider
        if self.runner.shape_last_tick is None:
            try:
                begin(environment)
            except OutriderError as error:
                log.error("cannot start: %s: %s", error.code, error.message)
                environment.process_exit_code = 1
                return None
        assert state.course is not None
        now = time.time()
        state.recorder.see(now, self.runner.user_count)
        wanted = state.course.tick(now, self.runner.user_count)
        if wanted is None:
            self.runner.shape_last_tick = None  # locust keeps it, and would take the next run's first for known
        return wanted


def begin(environment: Any) -> None:
    """A run, as the options say now. Raises what keeps it from starting."""
    state: RunState = environment.outrider
    where, load = state.where, Load.of(environment.parsed_options)
    fleet = look(where, state.credentials, load)
    made = parts(load.shape, load.users, load.seconds, load.times, fleet.capacity, where.max_users)
    state.assignment = assign(where, state.credentials, load, fleet)
    if isinstance(environment.runner, MasterRunner):
        environment.runner.send_message(ASSIGNMENT, state.assignment.packed())
    GrpcUser.weight, HttpUser.weight = load.grpc_share, load.http_share
    endpoints = [*(where.grpc if load.grpc_share else ()), *(where.http if load.http_share else ())]
    state.recorder = Recorder.of(load.seconds)
    state.course = Course(made, load.spawn_rate, where.timeout_s)
    state.run = LoadRun(time.time(), fleet.target, endpoints, load.packed())


def set_up(environment: Any, runner: Any, web_ui: Any, **_: Any) -> None:
    """Once per process, before anything starts."""
    options = environment.parsed_options
    try:
        where = LoadTarget.of(options)
        Load.of(options)
        credentials = ClientCredentials.load(
            api_key=options.api_key, tls_ca=options.tls_ca, tls_cert=options.client_cert, tls_key=options.client_key
        )
    except OutriderError as error:
        log.error("cannot start: %s: %s", error.code, error.message)
        sys.exit(1)
    options.api_key = ""  # locust sends its options to workers, unencrypted
    state = environment.outrider = RunState(where, credentials, Path(options.summary) if options.summary else None)
    listen = environment.events
    listen.test_start.add_listener(lambda **_: state.recorder.clear())
    if isinstance(runner, WorkerRunner):
        runner.register_message(ASSIGNMENT, _take_assignment)
        listen.report_to_master.add_listener(lambda client_id, data: data.update({SEEN: state.recorder.take()}))
        return
    listen.quitting.add_listener(lambda **_: _save_summary(state))
    if isinstance(runner, MasterRunner):
        listen.worker_connect.add_listener(lambda client_id: _tell_late_worker(state, runner, client_id))
        listen.worker_report.add_listener(lambda client_id, data: state.recorder.merge(data.get(SEEN) or []))
    if web_ui is not None:
        web_ui.app.add_url_rule("/report", view_func=web_ui.auth_required_if_enabled(lambda: _report(state)))


def _take_assignment(environment: Any, msg: Any, **_: Any) -> None:
    assignment = Assignment.unpacked(msg.data)
    environment.outrider.assignment = assignment
    environment.outrider.recorder = Recorder.of(assignment.load.seconds)


def _tell_late_worker(state: RunState, runner: Any, client_id: str) -> None:
    if state.assignment is not None:
        runner.send_message(ASSIGNMENT, state.assignment.packed(), client_id=client_id)


def _save_summary(state: RunState) -> None:
    summary = state.summarise()
    if summary is not None and state.summary is not None:
        summary.save(state.summary)


def _report(state: RunState) -> Any:
    """Our report of the run so far, drawn by a process of its own: drawing would hold up every user."""
    summary = state.summarise()
    if summary is None:
        return "No run yet.", 404
    drawn = subprocess.run(
        [sys.executable, "-m", "loadtest.page"], input=summary.to_json().encode(), capture_output=True, check=False
    )
    if drawn.returncode:
        log.error("no report: %s", drawn.stderr.decode(errors="replace"))
        return "The report could not be drawn; the log says why.", 500
    return drawn.stdout


events.init_command_line_parser.add_listener(add_arguments)
events.init.add_listener(set_up)
