"""Entry point for locust: users that send requests in sequence and compare every text with its reference.

Locust is based on gevent, so gRPC is initialised for gevent before any channel exists, and both clients are
synchronous. The leading process generates the reference outputs at the start of a run and sends them to its workers,
which send back their measurements.
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

from loadtest.assignment import Assignment, describe_fleet, prepare_assignment
from loadtest.attempt import Attempt
from loadtest.credentials import ClientCredentials
from loadtest.options import add_arguments
from loadtest.report.record import Recorder
from loadtest.report.summary import LoadRun, Summary, summarise
from loadtest.settings import Load, LoadTarget, check_writable
from loadtest.shapes import ShapeSchedule, parts
from loadtest.workload import GRPC, HTTP, Case, cases, pick
from outrider.protocol.errors import OutriderError

grpc.experimental.gevent.init_gevent()

log = logging.getLogger(__name__)

ASSIGNMENT = "outrider_assignment"  # the message from master to workers
SEEN = "outrider_seen"  # key of our part in workers' reports
FIRST_TOKEN, INTER_TOKEN, TOTAL, SHED = "first token", "inter-token", "total", "shed"


@dataclass(slots=True)
class RunState:
    """State of this process, attached to locust's environment as `outrider`."""

    where: LoadTarget
    credentials: ClientCredentials
    summary: Path | None
    recorder: Recorder = field(default_factory=Recorder)
    assignment: Assignment | None = None
    schedule: ShapeSchedule | None = None
    run: LoadRun | None = None

    def summarise(self) -> Summary | None:
        """Return the summary so far; None before the first run."""
        if self.run is None or self.schedule is None:
            return None
        return summarise(self.recorder, self.schedule.spans(), self.run)


class _LoadUser(User):  # type: ignore[misc]
    """User with a connection of its own."""

    abstract = True
    protocol = ""

    def on_start(self) -> None:
        self.state: RunState = self.environment.outrider
        assert self.state.assignment is not None, "users are started by a shape"
        self.assignment = self.state.assignment
        self.cases = cases(self.assignment.load.kinds, self.assignment.load.max_tokens)
        self.again: Case | None = None
        self.pause_s = 0.0
        self.load_client = self.assignment.client(self.protocol, self.state.credentials)

    def on_stop(self) -> None:
        self.load_client.close()

    def wait_time(self) -> float:
        """Return the pause; locust can stop a user during it at once, unlike during a task."""
        return self.pause_s

    def generate(self) -> None:
        case = self.again or pick(self.cases)
        attempt = Attempt(self.protocol, case)
        reference = self.assignment.references[f"{self.protocol} {case.name}"]
        attempt.run(self.load_client.generate(case, self.assignment.load.gamma), reference)
        self.again = case if attempt.shed else None
        self.pause_s = attempt.pause_s
        self.state.recorder.add(attempt)
        self._report_to_locust(attempt)

    def _report_to_locust(self, attempt: Attempt) -> None:
        """Report to locust's own statistics, with the mean inter-token time per request."""
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

    tasks = [generate]  # noqa: RUF012 -- locust's interface


class GrpcUser(_LoadUser):
    abstract = False
    protocol = GRPC


class HttpUser(_LoadUser):
    abstract = False
    protocol = HTTP


class RunShape(LoadTestShape):  # type: ignore[misc]
    """Shape of every run, steady ones included, so that every run has an end and reference outputs of its own."""

    abstract = False
    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        environment = self.runner.environment
        state: RunState = environment.outrider
        if self.runner.shape_last_tick is None:
            try:
                start_run(environment)
            except OutriderError as error:
                log.error("cannot start: %s: %s", error.code, error.message)
                environment.process_exit_code = 1
                return None
        assert state.schedule is not None
        now = time.time()
        state.recorder.record_users(now, self.runner.user_count)
        wanted = state.schedule.tick(now, self.runner.user_count)
        if wanted is None:
            # Otherwise locust would not treat the next run's first tick as the first.
            self.runner.shape_last_tick = None
        return wanted


def start_run(environment: Any) -> None:
    """Start a run with the present options; raise if it cannot start."""
    state: RunState = environment.outrider
    where, load = state.where, Load.of(environment.parsed_options)
    fleet = describe_fleet(where, state.credentials, load)
    made = parts(load.shape, load.users, load.seconds, load.times, fleet.capacity, where.max_users)
    state.assignment = prepare_assignment(where, state.credentials, load, fleet)
    if isinstance(environment.runner, MasterRunner):
        environment.runner.send_message(ASSIGNMENT, state.assignment.packed())
    GrpcUser.weight, HttpUser.weight = load.grpc_share, load.http_share
    endpoints = [*(where.grpc if load.grpc_share else ()), *(where.http if load.http_share else ())]
    state.recorder = Recorder.of(load.seconds)
    state.schedule = ShapeSchedule(made, load.spawn_rate, where.timeout_s)
    state.run = LoadRun(time.time(), fleet.target, endpoints, load.packed())


def set_up(environment: Any, runner: Any, web_ui: Any, **_: Any) -> None:
    """Initialise this process."""
    options = environment.parsed_options
    try:
        where = LoadTarget.of(options)
        Load.of(options)
        summary = Path(options.summary) if options.summary else None
        if summary is not None:
            check_writable(summary)
        credentials = ClientCredentials.load(
            api_key=options.api_key,
            tls_ca=options.tls_ca,
            tls_cert=options.client_cert,
            tls_key=options.client_key,
            tls_name=options.tls_name,
        )
    except OutriderError as error:
        log.error("cannot start: %s: %s", error.code, error.message)
        sys.exit(1)
    options.api_key = ""  # locust sends its options to workers without encryption
    state = environment.outrider = RunState(where, credentials, summary)
    listen = environment.events
    listen.test_start.add_listener(lambda **_: state.recorder.clear())
    if isinstance(runner, WorkerRunner):
        runner.register_message(ASSIGNMENT, _receive_assignment)
        listen.report_to_master.add_listener(lambda client_id, data: data.update({SEEN: state.recorder.drain()}))
        return
    listen.quitting.add_listener(lambda **_: _save_summary(state))
    if isinstance(runner, MasterRunner):
        listen.worker_connect.add_listener(lambda client_id: _send_to_late_worker(state, runner, client_id))
        listen.worker_report.add_listener(lambda client_id, data: state.recorder.merge(data.get(SEEN) or []))
    if web_ui is not None:
        web_ui.app.add_url_rule("/report", view_func=web_ui.auth_required_if_enabled(lambda: _report(state)))


def _receive_assignment(environment: Any, msg: Any, **_: Any) -> None:
    assignment = Assignment.unpacked(msg.data)
    environment.outrider.assignment = assignment
    environment.outrider.recorder = Recorder.of(assignment.load.seconds)


def _send_to_late_worker(state: RunState, runner: Any, client_id: str) -> None:
    if state.assignment is not None:
        runner.send_message(ASSIGNMENT, state.assignment.packed(), client_id=client_id)


def _save_summary(state: RunState) -> None:
    summary = state.summarise()
    if summary is not None and state.summary is not None:
        summary.save(state.summary)


def _report(state: RunState) -> Any:
    """Return the report of the run so far, rendered by a subprocess: rendering here would delay all users."""
    summary = state.summarise()
    if summary is None:
        return "No run yet.", 404
    drawn = subprocess.run(
        [sys.executable, "-m", "loadtest.report.page"],
        input=summary.to_json().encode(),
        capture_output=True,
        check=False,
    )
    if drawn.returncode:
        log.error("report failed: %s", drawn.stderr.decode(errors="replace"))
        return "The report could not be rendered; see the log.", 500
    return drawn.stdout


events.init_command_line_parser.add_listener(add_arguments)
events.init.add_listener(set_up)
