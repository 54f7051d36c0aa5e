"""What locust runs: users who send one request after the other and check every text.

Locust is built on gevent, so gRPC is told before any channel exists and the
client is the synchronous one. The right answers are fetched by the process
that leads the run, before it starts; workers get them from there.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.experimental.gevent
from locust import User, constant, events
from locust.runners import MasterRunner, WorkerRunner

from loadtest.summary import FIRST_TOKEN, REQUEST_TYPE, TEXT_DIFFERS, TOTAL, summarise
from loadtest.workload import Case, Output, ask, cases, difference, fetch
from outrider.client import DEFAULT_ENDPOINT, Client, Finished, Tokens
from outrider.endpoint import allowed
from outrider.errors import OutriderError
from outrider.keys import Keys
from outrider.tls import Tls

grpc.experimental.gevent.init_gevent()

log = logging.getLogger(__name__)

ANSWERS = "outrider_answers"  # the message from master to workers
PAUSE_S = 1.0  # after a failure: a system in trouble is not hammered


class OutriderUser(User):  # type: ignore[misc]
    """One client with a connection of its own."""

    wait_time = constant(0)

    def on_start(self) -> None:
        options = self.environment.parsed_options
        self.client = _client(options)
        self.gamma = options.gamma
        self.cases = cases(options.kinds, options.max_tokens)

    def on_stop(self) -> None:
        self.client.close()

    def generate(self) -> None:
        case = random.choice(self.cases)
        request = _Request(self.environment, case)
        try:
            request.follow(self.client, self.gamma)
        except OutriderError as error:
            request.failed(error.code)
            log.warning("%s: %s: %s", case.name, error.code, error.message)
            time.sleep(max(PAUSE_S, (error.retry_after_ms or 0) / 1000))

    tasks = [generate]  # noqa: RUF012 -- how locust wants it


class _Request:
    """One request under way, and the two events that it fires."""

    def __init__(self, environment: Any, case: Case) -> None:
        self._environment = environment
        self._case = case
        self._begun = time.perf_counter()
        self._text = ""
        self._token_ids: tuple[int, ...] = ()

    def follow(self, client: Client, gamma: int | None) -> None:
        for reply in ask(client, self._case, gamma=gamma):
            if isinstance(reply, Tokens):
                if reply.token_ids and not self._token_ids:
                    self._fire(FIRST_TOKEN, tokens=0)  # they are counted with the total
                self._text += reply.text
                self._token_ids += reply.token_ids
            elif isinstance(reply, Finished):
                self._text += reply.text
        self._check()

    def failed(self, error: str) -> None:
        self._fire(TOTAL, tokens=len(self._token_ids), error=error)

    def _check(self) -> None:
        expected = self._environment.outrider_answers[self._case.name]
        found = difference(expected, Output(self._text, self._token_ids))
        self._fire(TOTAL, tokens=len(self._token_ids), error=TEXT_DIFFERS if found else None)
        if found:
            log.error("%s: %s: %s", self._case.name, TEXT_DIFFERS, found)

    def _fire(self, name: str, *, tokens: int, error: str | None = None) -> None:
        self._environment.events.request.fire(
            request_type=REQUEST_TYPE,
            name=name,
            response_time=1000 * (time.perf_counter() - self._begun),
            response_length=tokens,
            exception=error,
            context={"case": self._case.name},
        )


@dataclass(slots=True)
class _Sharing:
    """Gives a master's workers the answers, those too who come late."""

    environment: Any

    def with_one(self, client_id: str, **_: Any) -> None:
        if answers := self.environment.outrider_answers:
            self.environment.runner.send_message(ANSWERS, _packed(answers), client_id=client_id)

    def with_all(self) -> None:
        self.environment.runner.send_message(ANSWERS, _packed(self.environment.outrider_answers))


def add_arguments(parser: Any) -> None:
    """Ours, and two of locust's that would listen on every interface."""
    hidden = {"include_in_web_ui": False}  # the answers fetched at the start hold for one setting
    parser.add_argument(
        "--endpoint",
        env_var="OUTRIDER_ENDPOINT",
        default=DEFAULT_ENDPOINT,
        help="host:port of the coordinator; several, separated by commas, are one fleet.",
        **hidden,
    )
    for flag, variable, text in (
        ("--api-key", "API_KEY", "Key that the coordinator asks for, or @FILE."),
        ("--tls-ca", "TLS_CA", "PEM file: who must have signed the coordinator's certificate; system: the public's."),
        # --tls-cert and --tls-key are of locust's own web page.
        ("--client-cert", "TLS_CERT", "PEM file: our own certificate, where the coordinator asks for one."),
        ("--client-key", "TLS_KEY", "PEM file: the key to --client-cert."),
    ):
        parser.add_argument(flag, env_var=f"OUTRIDER_{variable}", default="", help=text, **hidden)
    parser.add_argument("--allow-remote", action="store_true", help="Permit endpoints on other machines.", **hidden)
    parser.add_argument("--max-tokens", type=int, default=48, help="Tokens per request.", **hidden)
    parser.add_argument("--kinds", default="", help="Kinds of prompts, separated by commas; empty: all.", **hidden)
    parser.add_argument("--gamma", type=int, default=None, help="Fix γ under load; absent: adaptive.", **hidden)
    parser.add_argument("--timeout-s", type=float, default=120.0, help="Deadline of one request.", **hidden)
    parser.add_argument("--summary", default="", help="Write the run's figures to this file, as JSON.", **hidden)
    parser.set_defaults(web_host="127.0.0.1", master_bind_host="127.0.0.1")


def prepare(environment: Any, runner: Any, **_: Any) -> None:
    """Before anything starts: get the answers, or end the program."""
    environment.outrider_answers = {}
    if isinstance(runner, WorkerRunner):
        runner.register_message(ANSWERS, _take_answers)
        return
    sharing = _Sharing(environment)
    if isinstance(runner, MasterRunner):
        environment.events.worker_connect.add_listener(sharing.with_one)
    try:
        environment.outrider_answers = _fetch_all(environment.parsed_options)
    except OutriderError as error:
        log.error("cannot start: %s: %s", error.code, error.message)
        sys.exit(1)
    if isinstance(runner, MasterRunner):
        sharing.with_all()


def write_summary(environment: Any, **_: Any) -> None:
    if isinstance(environment.runner, WorkerRunner) or not environment.parsed_options.summary:
        return
    stats = environment.stats
    summary = summarise(
        stats.get(FIRST_TOKEN, REQUEST_TYPE),
        stats.get(TOTAL, REQUEST_TYPE),
        stats.errors.values(),
        (stats.last_request_timestamp or stats.start_time) - stats.start_time,
    )
    summary.save(Path(environment.parsed_options.summary))


def _fetch_all(options: Any) -> dict[str, Output]:
    asked = cases(options.kinds, options.max_tokens)
    log.info("asking %d prompts one after the other, without guessing", len(asked))
    with _client(options) as client:
        answers = {case.name: fetch(client, case) for case in asked}
    log.info("%d answers known", len(answers))
    return answers


def _take_answers(environment: Any, msg: Any, **_: Any) -> None:
    environment.outrider_answers = {name: Output(text, tuple(ids)) for name, (text, ids) in msg.data.items()}


def _packed(answers: dict[str, Output]) -> dict[str, tuple[str, list[int]]]:
    return {name: (output.text, list(output.token_ids)) for name, output in answers.items()}


def _client(options: Any) -> Client:
    """The one place that opens connections, so the one that says where to."""
    return Client(
        allowed(options.endpoint, allow_remote=options.allow_remote),
        timeout_s=options.timeout_s,
        api_key=Keys.parse(options.api_key, "api_key").first,
        tls=Tls.load(cert=options.client_cert, key=options.client_key, ca=options.tls_ca),
    )


events.init_command_line_parser.add_listener(add_arguments)
events.init.add_listener(prepare)
events.quitting.add_listener(write_summary)
