"""The ranks of one model: their connection, the commands of rank 0, and the end of all when one is lost."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import structlog
import torch
import torch.distributed as dist

from outrider.protocol.errors import OutriderError, PeerLost, StartupError

log = structlog.get_logger(__name__)

_LOAD_S = 3_600.0  # rank 0 may have to download the model first
_IDLE = timedelta(days=365)  # a verifier may be idle for long; lost ranks are detected otherwise
_STEP_S = 300.0
_WATCH_S = 0.2
_LEAVE_S = 5.0
_FRAME = 4096  # bytes of the first message; most steps fit
_HEADER = 8
STOP = "stop"

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
        self._step: object | None = None  # in progress
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
        from transformers.distributed import DistributedConfig  # here: one process alone needs no transformers

        return {"distributed_config": DistributedConfig(tp_size=self.size, tp_plan="auto")}

    def check_model(self, name: str, path: Path | str) -> None:
        """Raise StartupError for a model that cannot be split over this many ranks."""
        from transformers import AutoConfig  # here, too

        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()
        except Exception:  # its files may be anything
            return  # loading fails with the reason
        if not config.base_model_tp_plan:
            problem = f"transformers has no plan to split {config.model_type} models"
            message = f"{problem}: tensor_parallel is {self.size}, must be 1 for this target"
            raise StartupError(message, field="tensor_parallel", value=self.size, limit=1)
        for field in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, field, None)
            if isinstance(heads, int) and heads % self.size:
                message = f"tensor_parallel is {self.size}, must divide the {heads} {field} of {name}"
                raise StartupError(message, field="tensor_parallel", value=self.size, limit=f"a divisor of {heads}")

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
        self._step = object()
        try:
            yield
        except OutriderError:
            raise  # every rank raises the same
        except Exception as error:
            self._lose(f"a step on {self.size} ranks failed: {error}")
        finally:
            self._step = None

    def leave(self) -> None:
        """Stop all ranks in order."""
        self._stopping.set()
        if self.is_leader and self._commands is not None:
            with contextlib.suppress(RuntimeError):  # a rank has exited
                self.broadcast([[STOP]])
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
        watched, watched_s = None, 0.0  # in times of waiting: a pause of this process makes no step late
        while not self._stopping.wait(_WATCH_S):
            for rank, process in enumerate(self._started, 1):
                if (status := process.poll()) is not None and not self._stopping.is_set():
                    self._lose(f"rank {rank} of {self.size} ended with status {status}")
            before, watched = watched, self._step
            watched_s = watched_s + _WATCH_S if watched is before else 0.0
            if watched is not None and watched_s > _STEP_S:
                self._lose(f"a step on {self.size} ranks took longer than {_STEP_S:g} s")

    def _lose(self, reason: str) -> NoReturn:
        """Exit without clean-up: a wait in a device's queue cannot be interrupted."""
        log.critical("rank lost, shutting down", reason=reason)
        sys.stderr.flush()
        os._exit(1)
