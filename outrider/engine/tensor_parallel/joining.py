"""The way from a process to a rank: started by torchrun or by rank 0, with settings that fit."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from outrider.base.config import WorkerSettings, inherited_environment
from outrider.base.processes import ending_with_parent
from outrider.engine.tensor_parallel.ranks import RankGroup
from outrider.protocol.errors import StartupError

_RENDEZVOUS = "RANKS_MEET_AT"  # environment variable of the ranks that rank 0 has started; torchrun's have none


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


def _joined(size: int, settings: WorkerSettings) -> RankGroup:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world != size:
        raise StartupError.of("tensor_parallel", size, world, ": as many as there are ranks")
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
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={loopback}")  # `=`: not a prefix
    started = []
    for rank in range(1, size):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), _RENDEZVOUS: rendezvous}
        started.append(
            subprocess.Popen(
                command,
                env=inherited_environment() | place,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches rank 0 alone
                # Ranks ignore SIGTERM. Where there is no such signal, the connection breaks later.
                preexec_fn=ending_with_parent(signal.SIGKILL),
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
        (settings.engine not in ("auto", "transformers"), "engine", settings.engine, "auto or transformers"),
        (0 < devices < size, "tensor_parallel", size, f"at most {devices}, a CUDA device for each rank"),
    ]
    for applies, field, value, limit in refused:
        if applies:
            raise StartupError.of(field, value, limit, ", with tensor parallelism")
