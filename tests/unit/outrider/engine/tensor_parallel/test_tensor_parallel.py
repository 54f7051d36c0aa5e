"""What rank 0 does, the other ranks do; and what cannot be split is refused before anything is started."""

from __future__ import annotations

import builtins
import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig

from outrider.base.config import WorkerSettings
from outrider.engine import SessionTokens
from outrider.engine.tensor_parallel import RankGroup, TensorParallelEngine, join_ranks, ranks
from outrider.engine.tensor_parallel.engine import _apply
from outrider.engine.transformers.attention import NAME as RAGGED_ATTENTION
from outrider.engine.transformers.engine import TransformersEngine
from outrider.protocol.errors import Overloaded, StartupError
from outrider.protocol.fleet import ModelInfo
from outrider.testing.toy_models import make_model
from tests.cluster import until

VOCAB = 64
KV_TOKENS = 320


class Hearing:
    """In place of a rank_group: what is told is done at once by one other engine."""

    def __init__(self, other: TransformersEngine) -> None:
        self._other = other
        self.messages = 0

    def broadcast(self, commands: Sequence[list[Any]]) -> None:
        self.messages += 1
        for name, *arguments in json.loads(json.dumps(commands)):
            try:
                _apply(self._other, name, arguments)
            except Overloaded:
                pytest.fail("the other rank gave up where rank 0 only refuses")

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        yield


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        attn_implementation=RAGGED_ATTENTION,
    )
    return LlamaForCausalLM(config).eval()


def engine_over(model: LlamaForCausalLM) -> TransformersEngine:
    return TransformersEngine(model, ModelInfo("m", "f"), kv_tokens=KV_TOKENS, evictable_tokens=KV_TOKENS // 4)


class Sessions:
    """What a scheduler does to an engine, at random: sessions come, share beginnings, roll back and go."""

    def __init__(self, engine: TensorParallelEngine, seed: int) -> None:
        self.live: list[str] = []
        self.steps = self.refused = 0
        self._engine = engine
        self._rng = random.Random(seed)

    def turn(self, number: int) -> None:
        if self._rng.random() < 0.3 or not self.live:
            self._begin(f"s{number}")
        else:
            self._guess()
        while len(self.live) > 5:
            self._engine.free(self.live.pop(self._rng.randrange(5)))

    def _begin(self, session: str) -> None:
        prompt = [1] * self._rng.choice([40, 70, 100])
        cached = self._engine.match_prefix(session, prompt, self._rng.choice(["", "salt"]))
        self.live.append(session)
        if self._extends([SessionTokens(session, prompt[cached:], logits_from=len(prompt) - cached)]):
            self._engine.truncate(session, self._rng.choice([30, 64, 100]))

    def _guess(self) -> None:
        chosen = self._rng.sample(self.live, min(len(self.live), 2))
        bases = [self._engine.length(session) for session in chosen]
        if self._extends(
            [SessionTokens(session, self._rng.choices(range(VOCAB), k=3), (-1, 0, -1)) for session in chosen]
        ):
            for session, base in zip(chosen, bases, strict=True):
                self._engine.compact(session, base, self._rng.choice([[0, 1], [2], [0]]))

    def _extends(self, batch: list[SessionTokens]) -> bool:
        self.steps += 1
        try:
            self._engine.extend(batch)
        except Overloaded:
            self.refused += 1
            return False
        return True


@pytest.mark.parametrize("seed", range(5))
def test_all_ranks_hold_the_same(model: LlamaForCausalLM, seed: int) -> None:
    here, there = engine_over(model), engine_over(model)
    rank_group = Hearing(there)
    engine = TensorParallelEngine(here, rank_group)  # type: ignore[arg-type]
    sessions = Sessions(engine, seed)
    for number in range(150):
        sessions.turn(number)
    assert sessions.refused, "the cache was full now and then"
    for session in sessions.live[2:]:
        engine.free(session)
    engine.extend([SessionTokens("last", [1])])  # takes along what was not told yet
    assert rank_group.messages == sessions.steps + 1, "one message a step"
    assert here.blocks.tables == there.blocks.tables
    assert here.blocks.pool._free == there.blocks.pool._free
    assert list(here.blocks.pool._evictable) == list(there.blocks.pool._evictable)
    for session in sessions.live[:2]:
        probe = [SessionTokens(session, [1])]
        assert torch.equal(here.extend(probe).logits[0], there.extend(probe).logits[0])


def refused(size: int, **settings: Any) -> StartupError:
    with pytest.raises(StartupError) as caught, join_ranks(size, WorkerSettings(**settings), ["/bin/false"]):
        pass
    return caught.value


@pytest.fixture
def nobody_started_us(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("nobody_started_us")
@pytest.mark.parametrize(
    ("settings", "devices", "field", "limit"),
    [
        ({"quantization": "int8"}, 0, "quantization", "none"),
        ({"engine": "native"}, 0, "engine", "auto or transformers"),
        ({"engine": "cuda"}, 2, "engine", "auto or transformers"),
        ({"device": "cuda:1"}, 4, "device", "auto, cpu or cuda"),
        ({"device": "cuda"}, 0, "device", "auto or cpu here"),
        ({"device": "cpu"}, 4, "device", "auto or cuda where CUDA devices are visible"),
        ({}, 1, "tensor_parallel", "at most 1, a CUDA device for each rank"),
    ],
)
def test_what_cannot_go_together_is_named(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], devices: int, field: str, limit: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    error = refused(2, **settings)
    assert (error.field, error.limit) == (field, limit)
    assert error.message == f"{field} is {error.value}, must be {limit}, with tensor parallelism"


def test_torchrun_must_start_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    error = refused(2)
    assert (error.field, error.value, error.limit) == ("tensor_parallel", "2", "3")


def test_models_that_cannot_be_split_are_named(tmp_path: Path) -> None:
    rank_group = RankGroup(1, 4, torch.device("cpu"), "")
    heads = make_model(tmp_path / "heads", seed=1)
    with pytest.raises(StartupError, match="tensor_parallel is 4, must divide the 2 num_key_value_heads of heads"):
        rank_group.check_model("heads", heads)
    OPTConfig().save_pretrained(tmp_path / "plan")
    with pytest.raises(StartupError, match="no plan to split opt models: tensor_parallel is 4, must be 1"):
        rank_group.check_model("plan", tmp_path / "plan")
    (tmp_path / "plan" / "config.json").write_text(json.dumps({"model_type": "llama", "num_attention_heads": "x"}))
    rank_group.check_model("plan", tmp_path / "plan")  # loading it fails with the reason


def test_code_in_a_models_folder_is_neither_run_nor_asked_about(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Transformers asks on standard input."""
    monkeypatch.setattr(builtins, "input", lambda _: "y")
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}')
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    RankGroup(1, 2, torch.device("cpu"), "").check_model("own", tmp_path)  # loading it fails with the reason
    assert not (tmp_path / "ran").exists()


def test_a_step_is_not_late_by_a_pause_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `docker pause`, for which all ranks stand still and the clock runs on."""
    lost: list[str] = []
    monkeypatch.setattr(RankGroup, "_lose", lambda _, reason: lost.append(reason))
    monkeypatch.setattr(ranks, "_WATCH_S", 0.01)
    monkeypatch.setattr(ranks, "_STEP_S", 2.0)
    rank_group, now = RankGroup(0, 2, torch.device("cpu"), ""), time.monotonic
    with rank_group.step():
        monkeypatch.setattr(time, "monotonic", lambda: now() + 3600.0)
        time.sleep(0.1)
    monkeypatch.setattr(time, "monotonic", now)
    assert not lost
    monkeypatch.setattr(ranks, "_STEP_S", 0.1)
    time.sleep(0.3)
    assert not lost, "there is no step"
    with rank_group.step():
        until(lambda: bool(lost), 10, "the step to be late")
    rank_group._stopping.set()
    assert "took longer" in lost[0]


@pytest.mark.usefixtures("nobody_started_us")
@pytest.mark.timeout(8)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_an_error_before_they_meet_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # is set where it is not
    waiting = [sys.executable, "-c", "import time; time.sleep(60)"]
    others: list[subprocess.Popen[bytes]] = []

    def fail() -> None:
        with join_ranks(3, WorkerSettings(device="cpu"), waiting) as rank_group:
            others.extend(rank_group._started)
            raise StartupError("no model")

    with pytest.raises(StartupError, match="no model"):
        fail()
    assert [other.poll() for other in others] == [-signal.SIGKILL] * 2
