"""What a client does about a broken stream, without any stream."""

from __future__ import annotations

from unittest.mock import Mock

import grpc
import pytest

from outrider.client.aio import AsyncClient
from outrider.client.events import Finished, Started, Tokens, collect, make_request
from outrider.client.resume import RESUME_FOR_S, RETRY_S, EndpointRotation, StreamProgress, outrider_errors
from outrider.client.sync import Client
from outrider.protocol.convert import ERROR_KEY, error_to_proto
from outrider.protocol.errors import Expired, InvalidRequest, Overloaded, PeerLost, Unavailable
from outrider.protocol.sampling_params import SamplingParams
from outrider.v1 import common_pb2 as common
from outrider.v1 import coordinator_pb2 as pb

STARTED = pb.GenerateReply(started=pb.Started(session_id="s", seed=7, prompt_tokens=3, model="m"))


def chunk(position: int, *tokens: int) -> pb.GenerateReply:
    return pb.GenerateReply(
        chunk=pb.Chunk(position=position, text="x" * len(tokens), token_ids=tokens, kinds=[1] * len(tokens))
    )


def complete(tokens: int) -> pb.GenerateReply:
    return pb.GenerateReply(complete=pb.Complete(finish_reason=1, text="!", prompt_tokens=3, output_tokens=tokens))


def late(*trailing: tuple[str, bytes]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing))


def asked(endpoints: int = 1) -> StreamProgress:
    return StreamProgress(make_request("Hello", {"params": SamplingParams(seed=7)}), endpoints)


def test_what_was_never_heard_of_is_sent_again_as_it_was() -> None:
    progress = asked()
    first = progress.request()
    assert progress.may_retry(0.0)
    assert progress.request() == first
    assert first.idempotency_key, "or it would be generated twice"


def test_goes_on_from_the_tokens_at_hand() -> None:
    progress = asked()
    progress.request()
    assert isinstance(progress.take(STARTED), Started)
    assert isinstance(progress.take(chunk(0, 5, 6)), Tokens)
    assert progress.may_retry(0.0)
    assert progress.request() == pb.ResumeRequest(session_id="s", from_position=2, tail=[5, 6])
    assert progress.take(STARTED) is None, "told once"
    assert isinstance(progress.take(chunk(2, 7)), Tokens)
    assert progress.request() == pb.ResumeRequest(session_id="s", from_position=3, tail=[5, 6, 7])
    assert isinstance(progress.take(complete(3)), Finished)


def test_a_resumed_output_is_resumed_as_well() -> None:
    progress = StreamProgress(pb.ResumeRequest(session_id="s", from_position=10, tail=[8, 9]), 1)
    assert progress.request() == pb.ResumeRequest(session_id="s", from_position=10, tail=[8, 9])
    assert isinstance(progress.take(STARTED), Started), "its reader has not seen one"
    progress.take(chunk(10, 1))
    assert progress.request() == pb.ResumeRequest(session_id="s", from_position=11, tail=[8, 9, 1])


def test_errors_in_the_stream_are_raised() -> None:
    error = common.Error(code="overloaded", message="full")
    with pytest.raises(Overloaded, match="full"):
        asked().take(pb.GenerateReply(error=error))


@pytest.mark.parametrize("endpoints", [1, 3])
def test_gives_up_soon_when_nobody_ever_answered(endpoints: int) -> None:
    """Two tries, and one for each endpoint."""
    progress = asked(endpoints)
    tries = 0
    while True:
        progress.request()
        tries += 1
        if not progress.may_retry(0.0):
            break
    assert tries == 2 + endpoints


def test_gives_up_when_nothing_more_comes_for_long() -> None:
    progress = asked()
    progress.request()
    progress.take(STARTED)
    assert progress.may_retry(100.0)
    for now in (100.0, 110.0, 100.0 + RESUME_FOR_S):
        progress.request()
        assert progress.may_retry(now)
    assert not progress.may_retry(100.0 + RESUME_FOR_S + 0.1)


def test_a_stream_that_waited_for_long_without_a_token_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a rolling update of a busy fleet. One that begins and breaks at once buys no time."""
    progress, clock = asked(), 100.0
    monkeypatch.setattr("outrider.client.resume.time.monotonic", lambda: clock)
    for clock in (100.0, 101.0, 141.0, 181.0):  # refused, then three that end after 40 seconds in a queue
        assert progress.may_retry(clock)
        progress.request()
        progress.take(STARTED)
    clock = 181.0 + RESUME_FOR_S + 0.1
    assert progress.may_retry(clock)
    for clock in (220.0, 230.0, 241.0):
        progress.request()
        progress.take(STARTED)
        assert progress.may_retry(clock)
    progress.request()
    assert not progress.may_retry(clock + 2 * RESUME_FOR_S), "it never began"


def test_waiting_in_a_queue_is_not_added_to_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, clock = asked(), 5.0
    monkeypatch.setattr("outrider.client.resume.time.monotonic", lambda: clock)
    progress.take(STARTED)
    for clock in (5.0, 15.0):  # it broke, and was refused once
        assert progress.may_retry(clock)
        progress.request()
    progress.take(STARTED)
    clock = 40.0  # after 25 s in a queue
    assert progress.may_retry(clock)
    progress.request()
    clock = 40.0 + RESUME_FOR_S - 10.0 + 0.1
    assert not progress.may_retry(clock), "10 s of refusals before count"


def test_waits_as_long_as_the_coordinator_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two endpoints each is asked again after that time, the other one at once. A time limit is kept."""
    busy, gone = Unavailable("no verifier", retry_after_ms=5000), PeerLost("gone")
    assert asked().pause_s(busy, 0.0) == 5.0
    two = asked(2)
    assert [two.pause_s(busy, 0.0) for _ in range(4)] == [RETRY_S, 5.0, RETRY_S, 5.0]
    assert asked().pause_s(gone, 0.0) == RETRY_S
    assert asked().pause_s(Unavailable("later", retry_after_ms=10**9), 0.0) == RESUME_FOR_S
    monkeypatch.setattr("outrider.client.resume.time.monotonic", lambda: 100.0)
    progress = asked()
    progress.call(Mock(), timeout_s=10.0)
    assert progress.pause_s(busy, 107.0) == 3.0
    assert progress.pause_s(busy, 111.0) == RETRY_S


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_what_cannot_be_resumed_is_an_invalid_request(kind: type[Client] | type[AsyncClient]) -> None:
    client = kind("127.0.0.1:1")
    for session, position, tail in (("s", -1, ()), ("s", 2**64, ()), ("s", 1, (-1,)), ("\ud800", 0, ())):
        with pytest.raises(InvalidRequest, match=r"range|UTF-8"):
            client.resume(session, position, tail)


def test_a_refusal_before_the_deadline_keeps_its_own_words() -> None:
    """A request that cannot be answered in time, or a reader that is too slow."""
    refused = Expired("it would take 70 s", field="timeout", retry_after_ms=60_000)
    for trailing, message, retry_after_ms in (
        (((ERROR_KEY, error_to_proto(refused).SerializeToString()),), "it would take 70 s", 60_000),
        ((), "the deadline passed before the output was complete", None),
    ):
        with pytest.raises(Expired, match=message) as told, outrider_errors():
            raise late(*trailing)
        assert told.value.retry_after_ms == retry_after_ms


def test_a_call_with_one_reply_that_comes_late_awaits_no_output() -> None:
    with pytest.raises(Expired, match="before there was a reply"), EndpointRotation(1).attempt(last=True):
        raise late()


def test_a_stream_that_was_not_read_for_long_can_be_resumed() -> None:
    unread = Expired("the peer has not read its messages for 30 s", field="write_timeout_s", limit="30 s")
    with pytest.raises(PeerLost, match="has not read"), outrider_errors():
        raise late((ERROR_KEY, error_to_proto(unread).SerializeToString()))


def test_an_endpoint_whose_client_does_not_read_is_not_left() -> None:
    rotation, unread = EndpointRotation(2), Expired("the peer has not read", field="write_timeout_s")
    with pytest.raises(PeerLost) as lost, outrider_errors():
        raise late((ERROR_KEY, error_to_proto(unread).SerializeToString()))
    rotation.leave(0, lost.value)
    assert rotation.present == 0
    rotation.leave(0, PeerLost("gone"))
    assert rotation.present == 1


def test_an_endpoint_that_hangs_is_left() -> None:
    rotation = EndpointRotation(2)
    with rotation.attempt(last=False) as first:
        raise late()
    with rotation.attempt(last=True) as second:
        pass
    assert (first, second) == (0, 1)


def test_every_token_buys_new_time() -> None:
    progress = asked()
    progress.take(STARTED)
    for now in (0.0, 29.0, 58.0, 87.0):
        progress.request()
        progress.take(chunk(0, 1))
        assert progress.may_retry(now)


def test_many_streams_that_break_at_once_leave_together() -> None:
    """Each moving on by itself would bring an even number back to where they broke."""
    turns = EndpointRotation(2)
    for _ in range(4):
        turns.leave(0, PeerLost("gone"))
    assert turns.present == 1
    turns.leave(1, PeerLost("gone"))
    assert turns.present == 0


def test_whole_is_all_of_it() -> None:
    progress = asked()
    replies = [progress.take(reply) for reply in (STARTED, chunk(0, 5, 6), chunk(2, 7), complete(3))]
    made = collect(reply for reply in replies if reply is not None)
    assert (made.text, made.token_ids, made.started.seed) == ("xxx!", (5, 6, 7), 7)
    with pytest.raises(PeerLost):
        collect(reply for reply in replies[:-1] if reply is not None)


def test_all_streams_of_an_output_share_one_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float | None] = []

    class Stub:
        def Generate(self, request: pb.GenerateRequest, timeout: float | None) -> None:
            given.append(timeout)

        Resume = Generate

    now = iter([100.0, 100.0, 104.0, 111.0])
    monkeypatch.setattr("outrider.client.resume.time.monotonic", lambda: next(now))
    progress = StreamProgress(make_request("x", {}), endpoints=1)
    for _ in range(3):
        progress.call(Stub(), 10.0)
    assert given == [10.0, 6.0, 0.0]
    StreamProgress(make_request("x", {}), endpoints=1).call(Stub(), None)
    assert given[-1] is None
