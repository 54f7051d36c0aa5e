"""vLLM's own scheduler (setting `scheduler_cls`) with guesses of a coordinator's drafters; see docs/attach.md."""

from __future__ import annotations

import threading
import time
from typing import Any

import structlog
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from outrider.engine.vllm.attached.client import AttachmentClient
from outrider.engine.vllm.attached.draws import install
from outrider.engine.vllm.attached.options import AttachOptions
from outrider.engine.vllm.attached.request import AttachedRequest, drawn_alike, guessed_with
from outrider.engine.vllm.compatibility import check_installed
from outrider.engine.vllm.loading import describe_served
from outrider.engine.vllm.scheduler import SilentScheduler, decodes
from outrider.protocol.errors import StartupError
from outrider.protocol.speculation import MAX_DRAFT_WAIT_US, Verdict, VerifyTimings
from outrider.v1 import verifier_pb2 as verify

log = structlog.get_logger(__name__)


class AttachedScheduler(SilentScheduler):
    """vLLM schedules; requests whose guessed positions it draws like others carry guesses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_installed()
        self.verifies = False  # the workers verify guesses by their own draws
        config = self.vllm_config
        options = AttachOptions.of(config.additional_config)
        if not self.num_spec_tokens or self.scheduler_config.async_scheduling:
            raise StartupError(
                "vLLM has no room for guesses, or schedules asynchronously",
                limit="--speculative-config as in docs/attach.md, without --async-scheduling",
            )
        if config.model_config.logits_processors or getattr(config, "watermark_config", None) is not None:
            raise StartupError("guesses are not verified with logits processors of a server or with watermarks")
        self._max_wait_s = options.max_wait_ms / 1000
        model = describe_served(config)
        self._vocab_size = model.vocab_size
        self._attached: dict[str, AttachedRequest] = {}
        self._arrived = threading.Event()
        self._client = AttachmentClient(options, model, self.num_spec_tokens, self._arrived)
        self._unsent: list[tuple[AttachedRequest, int, Verdict | verify.VerifyReply | None]] = []
        self._ended_at = self._started_at = time.monotonic()  # of the last step, and of this one

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        requests = self.requests.values() if self.use_v2_model_runner else ()  # with guesses, it drops listed logprobs
        listed = any(r.sampling_params and r.sampling_params.logprob_token_ids for r in requests)
        self._await_guesses(0.0 if listed else self._max_wait_s)
        for request in self.running:
            attached = self._attached.get(request.request_id)
            request.spec_token_ids = []
            if attached is not None and attached.stream and decodes(request) and not listed:
                request.spec_token_ids = attached.guesses(self.num_spec_tokens)
        self._started_at = time.monotonic()
        scheduled = super().schedule(*args, **kwargs)
        for new in scheduled.scheduled_new_reqs:  # those that wait would take sessions from those that run
            name, request = new.req_id, self.requests[new.req_id]
            if name not in self._attached and drawn_alike(request):
                tokens, params = request.all_token_ids, guessed_with(request)
                attached = AttachedRequest(name, tokens, request.num_prompt_tokens, params, self._vocab_size)
                self._attached[name] = attached
                self._client.open(attached, tokens, request.cache_salt or "")
        return scheduled

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> Any:
        """Send the last step's verdicts, if no guess is awaited: vLLM asks after the forward pass has begun."""
        self._send()
        return super().get_grammar_bitmask(scheduler_output)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        result = super().update_from_output(scheduler_output, model_runner_output)
        if self._attached:
            self._report(scheduler_output, model_runner_output)
        self._ended_at = time.monotonic()
        return result

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if (attached := self._attached.pop(request.request_id, None)) is not None:
            self._unsent.append((attached, attached.stream, None))
            self._send()
        return super()._free_request(request, *args, **kwargs)

    def _await_guesses(self, max_wait_s: float) -> None:
        """Send the verdicts that guesses follow, and wait until those that γ control waits for are there."""
        deadline = self._ended_at + max_wait_s
        attached = [(each, decodes(r)) for r in self.running if (each := self._attached.get(r.request_id)) is not None]
        while True:
            self._arrived.clear()
            for each, _ in attached:
                each.read()
            if any(each.speculates for each, _ in attached):
                self._send()
            now = time.monotonic()
            until = min(deadline, max((each.ready_at(now) for each, awaited in attached if awaited), default=now))
            if until <= now:
                return
            self._arrived.wait(until - now)

    def _report(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Keep the verdicts of a step to be sent. Requests that it ended are no longer attached."""
        drawn = output.sampled_token_ids
        step_tokens = sum(map(len, drawn))
        now = time.monotonic()
        for name, num_tokens in scheduled.num_scheduled_tokens.items():
            attached = self._attached.get(name)
            tokens = drawn[output.req_id_to_index[name]] if drawn else ()
            if attached is None or not tokens:
                continue
            timings = VerifyTimings(
                wait_us=min(MAX_DRAFT_WAIT_US, int(1e6 * (self._started_at - self._ended_at))),  # idle: hours
                step_us=int(1e6 * (now - self._started_at)),
                sessions=len(scheduled.num_scheduled_tokens),
                batch_tokens=scheduled.total_num_scheduled_tokens,
                session_tokens=num_tokens,
                step_tokens=step_tokens,
            )
            num_guesses = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
            self._unsent.append((attached, attached.stream, attached.verdict(tokens, num_guesses, timings)))
            self._unsent += [(attached, attached.stream, refused) for refused in attached.refusals]
            attached.refusals.clear()

    def _send(self) -> None:
        if self._unsent:
            self._client.send(self._unsent)
            self._unsent = []


_add_request = EngineCore.add_request


def _add_verified(core: EngineCore, *args: Any, **kwargs: Any) -> None:
    """Install the verification before the first request: vLLM has no hook between the start of its workers and that."""
    scheduler = core.scheduler
    if isinstance(scheduler, AttachedScheduler) and not scheduler.verifies:
        scheduler.verifies, core.check_for_draft_tokens = True, False
        log.info("attached", runner=core.collective_rpc(install)[0])
    _add_request(core, *args, **kwargs)


EngineCore.add_request = _add_verified
