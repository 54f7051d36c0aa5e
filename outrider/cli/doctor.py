"""`outrider doctor`: checks of this machine, with advice for each failure."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from outrider.base.config import home, option, redis_url
from outrider.cli import options
from outrider.client.sync import DEFAULT_ENDPOINT
from outrider.models.hub import DEFAULT, default_path, locate
from outrider.protocol.errors import OutriderError, StartupError, Unauthenticated
from outrider.runtime.embedded_redis import check_redis, embedded_redis

_GIB = 1024**3
_NEEDED = 2 * _GIB


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    state: str  # ok, note or bad
    text: str
    advice: str = ""


def doctor(
    context: typer.Context,
    endpoint: options.Endpoint = DEFAULT_ENDPOINT,
    api_key: options.ApiKey = "",
    tls_ca: options.TlsCa = "",
    tls_cert: options.TlsCert = "",
    tls_key: options.TlsKey = "",
    tls_name: options.TlsName = "",
    target: Annotated[str, option("--target", "Target model to look for.")] = DEFAULT,
    port: Annotated[int, option("--port", "Port to check for `outrider up`.", min=0, max=65535)] = 50050,
) -> None:
    """Check Python, torch, device, memory, disk, model files, Redis, ports and running peers."""
    findings = [Finding("outrider", "ok", version("outrider")), Finding("python", "ok", platform.python_version())]
    checks = {"torch": _torch(), "memory": _memory(), "target": _models(target), "redis": _redis(), "port": _port(port)}
    for name, check in (checks | {"coordinator": _peers(context.params, endpoint)}).items():
        try:
            findings += check
        except Exception as error:  # such as a file in a flag or a value in one of a model: the others follow
            findings.append(Finding(name, "bad", str(error)))
    table = Table("", "", Column("", overflow="fold"), Column("what to do", overflow="fold"), box=None)
    marks = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "bad": "[red]bad[/red]"}
    for finding in findings:
        table.add_row(marks[finding.state], escape(finding.name), escape(finding.text), escape(finding.advice))
    Console().print(table)
    if any(finding.state == "bad" for finding in findings):
        sys.exit(1)


def _judged(name: str, good: bool, text: str, advice: str = "", fault: str = "bad") -> Finding:
    return Finding(name, "ok", text) if good else Finding(name, fault, text, advice)


def _torch() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        yield Finding("torch", "note", "not installed", "required by workers: pip install '.[models]' in a checkout")
        return
    torch = importlib.import_module("torch")
    yield Finding("torch", "ok", torch.__version__)
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            text = f"{torch.cuda.get_device_name(i)}, {free / _GIB:.0f} of {total / _GIB:.0f} GiB free"
            yield Finding(f"cuda:{i}", "ok", text)
    elif fault := importlib.import_module("outrider.engine.loading.options").gpu_fault():
        yield Finding("device", "bad", f"torch cannot use the GPU: {fault}", "update its driver, or use --device cpu")
    else:
        text = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
        yield Finding("device", "note", f"CPU only: {text}", "for large targets install a CUDA build of torch")
    yield from _kernels()


def _kernels() -> Iterator[Finding]:
    found = importlib.import_module("outrider.engine.native.build").find_library()
    if isinstance(found, str):
        advice = "" if "kept or loaded" in found else "install one for full speed on a CPU (Debian: gcc and libc6-dev)"
        yield Finding("kernels", "note", found, advice)
    else:
        yield Finding("kernels", "ok", "the native engine can run here")


def _memory() -> Iterator[Finding]:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = 1024 * int(fields["MemAvailable"].split()[0])  # with the page cache, which the kernel gives up
    yield _judged("memory", free >= _NEEDED, f"{free / _GIB:.1f} GiB available", "the default pair needs 2 GiB")
    folder = next(path for path in (home(), *home().parents) if os.path.exists(path))
    disk, writable = shutil.disk_usage(folder).free, os.access(folder, os.W_OK)
    text = f"{disk / _GIB:.1f} GiB free for {home()}{'' if writable else ', which cannot be written'}"
    advice, fault = "free some space, or set OUTRIDER_HOME to another disk", "bad" if writable else "note"
    yield _judged("disk", writable and disk >= _NEEDED, text, advice, fault)


def _models(target: str) -> Iterator[Finding]:
    if target == DEFAULT:
        there = os.path.isfile(default_path() / "config.json")  # False where the folder may not be entered
        yield _judged("target", there, str(default_path()), "run: outrider models fetch", fault="note")
        return
    path = locate(target, lambda _: None)
    importlib.import_module("transformers").AutoConfig.from_pretrained(path, trust_remote_code=False)
    yield Finding("target", "ok", f"{path} is used as a hub id" if isinstance(path, str) else str(path))


def _redis() -> Iterator[Finding]:
    url = redis_url()
    try:
        with embedded_redis() if url is None else nullcontext(url) as address:
            where = check_redis(address)
    except (StartupError, OSError) as error:
        advice = "start it, as a primary of Redis 7, or unset REDIS_URL" if url else "set REDIS_URL to one of your own"
        yield Finding("redis", "bad", str(error), advice)
        return
    yield Finding("redis", "ok", where if url else "embedded (no REDIS_URL): starts and answers")


def _port(port: int) -> Iterator[Finding]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:  # such as a low port, which is for root
            yield Finding("port", "note", f"{port}: {error.strerror}", "Outrider runs, or choose another --port")
            return
    yield Finding("port", "ok", f"{port} is free")


def _peers(flags: Mapping[str, Any], endpoint: str) -> Iterator[Finding]:
    with options.connect(flags) as client:
        try:
            server = client.server()
        except Unauthenticated as error:
            yield Finding("coordinator", "bad", f"{endpoint}: {error.message}", "set --api-key")
            return
        except OutriderError:
            yield Finding("coordinator", "note", f"none at {endpoint}", "run outrider up; with TLS, set --tls-ca")
            return
    durable = "sessions are durable" if server.durable else "its Redis does not answer"
    yield _judged("coordinator", server.durable, f"{endpoint}, {server.sessions} sessions, {durable}")
    for worker in server.workers:
        load = f"{worker.load.sessions}/{worker.capacity} sessions, round trip {worker.round_trip_ms:.1f} ms"
        yield Finding(worker.kind or "worker", "ok", f"{worker.model.name} at {worker.address}, {load}")
