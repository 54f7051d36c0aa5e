"""One model over several processes, its ranks: each holds a share of every layer (tensor parallelism).

Rank 0 is the process that was started: it alone serves. It starts the other
ranks, or finds them started by torchrun. Its `TensorParallelEngine` tells them every
call that changes what is cached; they do the same in the same order
(`follow`), so sessions and pages agree everywhere without being sent. What the
layers themselves exchange is transformers' part.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from pathlib import Path
from typing import Any, NoReturn

import structlog
import torch
import torch.distributed as dist
from transformers import AutoConfig
from transformers.distributed import DistributedConfig

from outrider.base.config import PREFIX, WorkerSettings
from outrider.engine.interface import Engine, SessionTokens, StepResult
from outrider.protocol.errors import OutriderError, Overloaded, PeerLost, StartupError
from outrider.protocol.fleet import ModelInfo

log = structlog.get_logger(__name__)

_MEETING = "RANKS_MEET_AT"  # among the variables of a rank that rank 0 has started; torchrun's ranks have none
_LOAD_S = 3_600.0  # rank 0 may have to fetch the model first
_IDLE = timedelta(days=365)  # a verifier may have nothing to do for long; who is lost is found out otherwise
_STEP_S = 300.0
_WATCH_S = 0.2
_LEAVE_S = 5.0
_FRAME = 4096  # bytes of the first message; most steps fit
_HEADER = 8
_STOP = "stop"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None

Command = list[Any]  # name of an engine's method, and its arguments


class RankGroup:
    """The ranks of one model as one of them sees them."""

    def __init__(
        self, rank: int, size: int, device: torch.device, meeting: str, started: Sequence[subprocess.Popen[bytes]] = ()
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._meeting = meeting
        self._started = started
        self._commands: dist.ProcessGroup | None = None
        self._step_ends = math.inf
        self._over = threading.Event()
        if self.leads:
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @contextlib.contextmanager
    def rank_0_first(self) -> Iterator[None]:
        """What is fetched, converted or complained about in this block is so once; then all ranks have met."""
        if not self.leads:
            self._meet()
        yield
        if self.leads:
            self._meet()

    def sharding(self) -> dict[str, Any]:
        """How from_pretrained is told to load this rank's share."""
        return {"distributed_config": DistributedConfig(tp_size=self.size, tp_plan="auto")}

    def check_model(self, name: str, source: dict[str, Any]) -> None:
        """Raises StartupError when the model cannot be split so."""
        try:
            config = AutoConfig.from_pretrained(**source).get_text_config()
        except (OSError, ValueError, KeyError):
            return  # loading will say what is wrong with it
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

    def tell(self, commands: Sequence[Command]) -> None:
        """Rank 0 to all others."""
        data = json.dumps(commands).encode()
        frame = (len(data).to_bytes(_HEADER, "little") + data[: _FRAME - _HEADER]).ljust(_FRAME, b"\0")
        self._broadcast(bytearray(frame))
        if rest := data[_FRAME - _HEADER :]:
            self._broadcast(bytearray(rest))

    def hear(self) -> list[Command]:
        """What rank 0 tells next."""
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
        """Ranks that do not do the same any more cannot go on: whatever fails in here, or takes forever, is the end."""
        self._step_ends = time.monotonic() + _STEP_S
        try:
            yield
        except OutriderError:
            raise  # every rank came to the same
        except Exception as error:
            self._lose(f"a step on {self.size} ranks failed: {error}")
        finally:
            self._step_ends = math.inf

    def leave(self) -> None:
        """The end in order: all ranks are gone afterwards."""
        self._over.set()
        if self.leads and self._commands is not None:
            with contextlib.suppress(RuntimeError):  # gone already
                self.tell([[_STOP]])
        for process in self._started:
            try:
                process.wait(_LEAVE_S if self._commands is not None else 0)  # one that has not met us hears nothing
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _meet(self) -> None:
        on_cuda = self.device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            init_method=self._meeting,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=_LOAD_S),
            device_id=self.device if on_cuda else None,
        )
        # Commands are bytes in main memory, and their wait is another than that of a layer's sums.
        self._commands = dist.new_group(backend="gloo", timeout=_IDLE)

    def _broadcast(self, data: bytearray) -> None:
        dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), src=0, group=self._commands)

    def _watch(self) -> None:
        while not self._over.wait(_WATCH_S):
            for rank, process in enumerate(self._started, 1):
                if (status := process.poll()) is not None and not self._over.is_set():
                    self._lose(f"rank {rank} of {self.size} ended with status {status}")
            if time.monotonic() > self._step_ends:
                self._lose(f"a step on {self.size} ranks took longer than {_STEP_S:g} s")

    def _lose(self, reason: str) -> NoReturn:
        """A rank that waits for a lost one inside a device's queue cannot be called back: no clean-up, just the end."""
        log.critical("leaving, the model is no longer whole", reason=reason)
        sys.stderr.flush()
        os._exit(1)


class TensorParallelEngine:
    """Rank 0's engine: what changes the cache here does so on every rank. A step costs one message."""

    def __init__(self, engine: Engine, team: RankGroup) -> None:
        self._engine = engine
        self._team = team
        self._untold: list[Command] = []  # goes out with the next step: until then nobody can see the difference

    @property
    def info(self) -> ModelInfo:
        return self._engine.info

    @property
    def device(self) -> torch.device:
        return self._engine.device

    @property
    def capacity_tokens(self) -> int:
        return self._engine.capacity_tokens

    @property
    def cached_tokens(self) -> int:
        return self._engine.cached_tokens

    @property
    def evictable_tokens(self) -> int:
        return self._engine.evictable_tokens

    def length(self, session: str) -> int:
        return self._engine.length(session)

    def match_prefix(self, session: str, tokens: Sequence[int], salt: str = "") -> int:
        saved = self._engine.match_prefix(session, tokens, salt)
        # The last token is never adopted: with one more than was found the others find the same.
        self._untold.append(["match_prefix", session, list(tokens[: saved + 1]), salt])
        return saved

    def extend(self, batch: Sequence[SessionTokens]) -> StepResult:
        rows = [
            [part.session, list(part.tokens), list(part.parents), part.logits_from, part.hidden_from] for part in batch
        ]
        told, self._untold = [*self._untold, ["extend", rows]], []
        with self._team.step():
            self._team.tell(told)
            result = self._engine.extend(batch)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # a lost rank must show here, under the step's clock
        return result

    def truncate(self, session: str, length: int) -> None:
        self._engine.truncate(session, length)
        self._untold.append(["truncate", session, length])

    def compact(self, session: str, base: int, rows: Sequence[int]) -> None:
        self._engine.compact(session, base, rows)
        self._untold.append(["compact", session, base, list(rows)])

    def fork(self, session: str, copy: str) -> None:
        self._engine.fork(session, copy)
        self._untold.append(["fork", session, copy])

    def free(self, session: str) -> None:
        self._engine.free(session)
        self._untold.append(["free", session])


def follow(engine: Engine, team: RankGroup) -> None:
    """Do what rank 0 does until it says that it is over. Signals are for rank 0, which may have streams to finish."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    while True:
        for name, *arguments in team.hear():
            if name == _STOP:
                return
            _apply(engine, name, arguments)


def _apply(engine: Engine, name: str, arguments: list[Any]) -> None:
    if name == "extend":
        with contextlib.suppress(Overloaded):  # on rank 0 too, which tells who asked
            engine.extend([SessionTokens(*rows) for rows in arguments[0]])
    else:
        getattr(engine, name)(*arguments)


@contextlib.contextmanager
def ranks(size: int, settings: WorkerSettings, command: Sequence[str]) -> Iterator[RankGroup]:
    """This process's place among `size` ranks. Where nobody has started the others, `command` does."""
    with contextlib.ExitStack() as exits:
        if "RANK" in os.environ:
            team = _joined(size, settings)
        else:
            _check(size, settings)
            folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="outrider-ranks-")))
            team = _started(size, settings, command, folder)
        exits.callback(team.leave)
        # Ranks on one machine share its cores.
        torch.set_num_threads(settings.threads or max(1, torch.get_num_threads() // size))
        yield team


def whole(weight: torch.Tensor) -> torch.Tensor:
    """A weight as if it were not split. All ranks must ask for the same."""
    gather = getattr(weight, "full_tensor", None)
    found: torch.Tensor = weight if gather is None else gather()
    return found


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
    return RankGroup(rank, size, device, os.environ.get(_MEETING, "env://"))


def _started(size: int, settings: WorkerSettings, command: Sequence[str], folder: Path) -> RankGroup:
    # Nobody outside this machine has to do with these ranks: they meet at a file and speak over the loopback.
    meeting = (folder / "meeting").as_uri()
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX) or k == "OUTRIDER_HOME"}
    started = []
    for rank in range(1, size):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), _MEETING: meeting}
        started.append(
            subprocess.Popen(
                command,
                env=inherited | place,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches rank 0 alone
                preexec_fn=_die_with_parent,
            )
        )
    return RankGroup(0, size, _device(settings.device, 0), meeting, started)


def _die_with_parent() -> None:
    """In a new rank: no rank 0, no rank, however it ended. Linux; elsewhere a broken connection says so later."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _device(device: str, local_rank: int) -> torch.device:
    if device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def _check(size: int, settings: WorkerSettings) -> None:
    """What cannot go together, said before anything is started. `size` counts the ranks of this machine."""
    devices = torch.cuda.device_count()
    refused: list[tuple[bool, str, object, str]] = [
        (settings.device not in ("auto", "cpu", "cuda"), "device", settings.device, "auto, cpu or cuda"),
        (settings.device == "cuda" and not devices, "device", "cuda", "auto or cpu here"),
        (settings.device == "cpu" and devices > 0, "device", "cpu", "auto or cuda where CUDA devices are visible"),
        (settings.quantization != "none", "quantization", settings.quantization, "none"),
        (settings.compile == "on", "compile", settings.compile, "auto or off"),
        (0 < devices < size, "tensor_parallel", size, f"at most {devices}, a CUDA device for each rank"),
    ]
    for applies, field, value, limit in refused:
        if applies:
            raise StartupError(
                f"{field} is {value}, must be {limit}, with tensor parallelism", field=field, value=value, limit=limit
            )
