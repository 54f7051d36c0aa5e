"""Tensor parallelism: one model over several processes (ranks), each with a share of every layer.

Rank 0 is the process that the operator starts, and it alone serves. It starts
the other ranks, unless torchrun has. Its `TensorParallelEngine` broadcasts
every call that changes the cache, and the other ranks repeat the calls in the
same order (`run_follower`). Sessions and blocks therefore agree on all ranks
without being sent. transformers does the communication within layers.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import structlog
import torch
import torch.distributed as dist
from transformers import AutoConfig
from transformers.distributed import DistributedConfig

from outrider.base.config import PREFIX, WorkerSettings
from outrider.base.processes import end_with_parent
from outrider.engine.interface import Engine, SessionTokens, StepResult
from outrider.engine.wrapper import EngineWrapper
from outrider.protocol.errors import OutriderError, Overloaded, PeerLost, StartupError

log = structlog.get_logger(__name__)

_RENDEZVOUS = "RANKS_MEET_AT"  # environment variable of the ranks that rank 0 has started; torchrun's have none
_LOAD_S = 3_600.0  # rank 0 may have to download the model first
_IDLE = timedelta(days=365)  # a verifier may be idle for long; lost ranks are detected otherwise
_STEP_S = 300.0
_WATCH_S = 0.2
_LEAVE_S = 5.0
_FRAME = 4096  # bytes of the first message; most steps fit
_HEADER = 8
_STOP = "stop"

Command = list[Any]  # name of an engine's method, and its arguments


class RankGroup:
    """The ranks of one model, from the view of one of them."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        rendezvous: str,
        started: Sequence[subprocess.Popen[bytes]] = (),
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._rendezvous = rendezvous
        self._started = started
        self._commands: dist.ProcessGroup | None = None
        self._step_ends = math.inf
        self._stopping = threading.Event()
        if self.is_leader:
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    @property
    def is_leader(self) -> bool:
        """Return whether this is rank 0."""
        return self.rank == 0

    @contextlib.contextmanager
    def rank_0_first(self) -> Iterator[None]:
        """Run the block on rank 0 first: it downloads, converts and fails once. Afterwards all ranks are connected."""
        if not self.is_leader:
            self._connect()
        yield
        if self.is_leader:
            self._connect()

    def sharding(self) -> dict[str, Any]:
        """Return from_pretrained's arguments for this rank's share."""
        return {"distributed_config": DistributedConfig(tp_size=self.size, tp_plan="auto")}

    def check_model(self, name: str, source: dict[str, Any]) -> None:
        """Raise StartupError for a model that cannot be split over this many ranks."""
        try:
            config = AutoConfig.from_pretrained(**source).get_text_config()
        except (OSError, ValueError, KeyError):
            return  # loading fails with the reason
        if not config.base_model_tp_plan:
            raise StartupError(
                f"transformers has no plan to split {config.model_type} models: tensor_parallel is {self.size}, "
                "must be 1 for this target",
                field="tensor_parallel",
                value=self.size,
                limit=1,
            )
        for field in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, field, None)
            if isinstance(heads, int) and heads % self.size:
                raise StartupError(
                    f"tensor_parallel is {self.size}, must divide the {heads} {field} of {name}",
                    field="tensor_parallel",
                    value=self.size,
                    limit=f"a divisor of {heads}",
                )

    def broadcast(self, commands: Sequence[Command]) -> None:
        """Send commands from rank 0 to all others."""
        data = json.dumps(commands).encode()
        frame = (len(data).to_bytes(_HEADER, "little") + data[: _FRAME - _HEADER]).ljust(_FRAME, b"\0")
        self._broadcast(bytearray(frame))
        if rest := data[_FRAME - _HEADER :]:
            self._broadcast(bytearray(rest))

    def receive(self) -> list[Command]:
        """Return the next commands of rank 0."""
        try:
            frame = bytearray(_FRAME)
            self._broadcast(frame)
            length = int.from_bytes(frame[:_HEADER], "little")
            rest = bytearray(max(0, length - (_FRAME - _HEADER)))
            if rest:
                self._broadcast(rest)
        except RuntimeError as error:
            raise PeerLost(f"rank 0 of {self.size} went away: {error}") from error
        commands: list[Command] = json.loads((frame[_HEADER:] + rest)[:length])
        return commands

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run a step. An error or a timeout ends the process: ranks that diverge cannot continue."""
        self._step_ends = time.monotonic() + _STEP_S
        try:
            yield
        except OutriderError:
            raise  # every rank raises the same
        except Exception as error:
            self._lose(f"a step on {self.size} ranks failed: {error}")
        finally:
            self._step_ends = math.inf

    def leave(self) -> None:
        """Stop all ranks in order."""
        self._stopping.set()
        if self.is_leader and self._commands is not None:
            with contextlib.suppress(RuntimeError):  # a rank has exited
                self.broadcast([[_STOP]])
        for process in self._started:
            try:
                process.wait(_LEAVE_S if self._commands is not None else 0)  # unconnected ranks get no stop
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _connect(self) -> None:
        on_cuda = self.device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            init_method=self._rendezvous,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=_LOAD_S),
            device_id=self.device if on_cuda else None,
        )
        # Commands are bytes in main memory and have a timeout of their own.
        self._commands = dist.new_group(backend="gloo", timeout=_IDLE)

    def _broadcast(self, data: bytearray) -> None:
        dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), src=0, group=self._commands)

    def _watch(self) -> None:
        while not self._stopping.wait(_WATCH_S):
            for rank, process in enumerate(self._started, 1):
                if (status := process.poll()) is not None and not self._stopping.is_set():
                    self._lose(f"rank {rank} of {self.size} ended with status {status}")
            if time.monotonic() > self._step_ends:
                self._lose(f"a step on {self.size} ranks took longer than {_STEP_S:g} s")

    def _lose(self, reason: str) -> NoReturn:
        """Exit without clean-up: a wait in a device's queue cannot be interrupted."""
        log.critical("rank lost, shutting down", reason=reason)
        sys.stderr.flush()
        os._exit(1)


class TensorParallelEngine(EngineWrapper):
    """Rank 0's engine: every call that changes the cache runs on all ranks. A step costs one message."""

    def __init__(self, inner: Engine, rank_group: RankGroup) -> None:
        super().__init__(inner)
        self._rank_group = rank_group
        self._pending: list[Command] = []  # sent with the next step

    def match_prefix(self, session: str, tokens: Sequence[int], salt: str = "") -> int:
        saved = self.inner.match_prefix(session, tokens, salt)
        # The last token is never matched: with one token more than was found, the others find the same.
        self._pending.append(["match_prefix", session, list(tokens[: saved + 1]), salt])
        return saved

    def extend(self, batch: Sequence[SessionTokens]) -> StepResult:
        calls = [[new.session, list(new.tokens), list(new.parents), new.logits_from, new.hidden_from] for new in batch]
        commands, self._pending = [*self._pending, ["extend", calls]], []
        with self._rank_group.step():
            self._rank_group.broadcast(commands)
            result = self.inner.extend(batch)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # a lost rank must show within the step's timeout
        return result

    def truncate(self, session: str, length: int) -> None:
        self.inner.truncate(session, length)
        self._pending.append(["truncate", session, length])

    def compact(self, session: str, base: int, indices: Sequence[int]) -> None:
        self.inner.compact(session, base, indices)
        self._pending.append(["compact", session, base, list(indices)])

    def free(self, session: str) -> None:
        self.inner.free(session)
        self._pending.append(["free", session])


def run_follower(engine: Engine, rank_group: RankGroup) -> None:
    """Repeat the calls of rank 0 until it stops. Signals are ignored: rank 0 may have streams to finish."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    while True:
        for name, *arguments in rank_group.receive():
            if name == _STOP:
                return
            _apply(engine, name, arguments)


def _apply(engine: Engine, name: str, arguments: list[Any]) -> None:
    if name == "extend":
        with contextlib.suppress(Overloaded):  # rank 0 raises it as well
            engine.extend([SessionTokens(*new) for new in arguments[0]])
    else:
        getattr(engine, name)(*arguments)


@contextlib.contextmanager
def join_ranks(size: int, settings: WorkerSettings, command: Sequence[str]) -> Iterator[RankGroup]:
    """Yield this process's rank group of `size`. `command` starts the other ranks, unless torchrun has."""
    with contextlib.ExitStack() as exits:
        if "RANK" in os.environ:
            rank_group = _joined(size, settings)
        else:
            _check(size, settings)
            folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="outrider-ranks-")))
            rank_group = _started(size, settings, command, folder)
        exits.callback(rank_group.leave)
        # Ranks on one machine share its cores.
        torch.set_num_threads(settings.threads or max(1, torch.get_num_threads() // size))
        yield rank_group


def gather_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight in full. All ranks must call it for the same weight."""
    gather = getattr(weight, "full_tensor", None)
    full: torch.Tensor = weight if gather is None else gather()
    return full


def _joined(size: int, settings: WorkerSettings) -> RankGroup:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world != size:
        raise StartupError(
            f"tensor_parallel is {size}, must be {world}: as many as there are ranks",
            field="tensor_parallel",
            value=size,
            limit=world,
        )
    if rank == 0:
        _check(int(os.environ.get("LOCAL_WORLD_SIZE", size)), settings)
    device = _device(settings.device, int(os.environ.get("LOCAL_RANK", rank)))
    return RankGroup(rank, size, device, os.environ.get(_RENDEZVOUS, "env://"))


def _started(size: int, settings: WorkerSettings, command: Sequence[str], folder: Path) -> RankGroup:
    # These ranks are on one machine: they meet at a file and communicate over the loopback.
    rendezvous = (folder / "meeting").as_uri()
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX) or k == "OUTRIDER_HOME"}
    started = []
    for rank in range(1, size):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), _RENDEZVOUS: rendezvous}
        started.append(
            subprocess.Popen(
                command,
                env=inherited | place,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches rank 0 alone
                # Ranks ignore SIGTERM. Where there is no such signal, the connection breaks later.
                preexec_fn=partial(end_with_parent, signal.SIGKILL),
            )
        )
    return RankGroup(0, size, _device(settings.device, 0), rendezvous, started)


def _device(device: str, local_rank: int) -> torch.device:
    if device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def _check(size: int, settings: WorkerSettings) -> None:
    """Raise StartupError for settings that exclude each other, before anything starts. `size` is the number of ranks on
    this machine."""
    devices = torch.cuda.device_count()
    refused: list[tuple[bool, str, object, str]] = [
        (settings.device not in ("auto", "cpu", "cuda"), "device", settings.device, "auto, cpu or cuda"),
        (settings.device == "cuda" and not devices, "device", "cuda", "auto or cpu here"),
        (settings.device == "cpu" and devices > 0, "device", "cpu", "auto or cuda where CUDA devices are visible"),
        (settings.quantization != "none", "quantization", settings.quantization, "none"),
        (settings.compile == "on", "compile", settings.compile, "auto or off"),
        (settings.engine not in ("auto", "transformers"), "engine", settings.engine, "auto or transformers"),
        (0 < devices < size, "tensor_parallel", size, f"at most {devices}, a CUDA device for each rank"),
    ]
    for applies, field, value, limit in refused:
        if applies:
            raise StartupError(
                f"{field} is {value}, must be {limit}, with tensor parallelism", field=field, value=value, limit=limit
            )
