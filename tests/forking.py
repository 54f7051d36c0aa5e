"""Processes forked from one that has their libraries loaded: each start saves seconds of imports.

`Forked` behaves like the `subprocess.Popen` that it replaces. The forked process has its own arguments, environment
and output; only the imported libraries are shared. `python -m tests.forking torch` is the server of the services that
run a model, `python -m tests.forking` that of the others, where importing torch fails as in the services themselves.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from outrider.base.openmp import wait_briefly

_LIBRARIES = ("torch", "numpy", "pydantic", "typer", "structlog", "llguidance", "tokenizers", "transformers")
_LIBRARIES_WITHOUT_TORCH = ("coordinator.api.service", "drafter.service", "outrider.runtime.worker", "transformers")
_CLASSES_WITHOUT_TORCH = ("AutoTokenizer", "PreTrainedTokenizerFast")
_CLASSES = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer", "LlamaForCausalLM", "PreTrainedModel")
_POLL_S = 0.01


class _Server:
    """Process that forks, and the pipe to it. It handles one request at a time."""

    def __init__(self, *libraries: str) -> None:
        self._libraries = libraries
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, **question: Any) -> Any:
        with self._lock:
            if self._process is None:
                self._process = self._start()
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forking", *self._libraries],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"},  # vLLM is here, too
            text=True,
        )
        atexit.register(self._stop, process)
        return process

    @staticmethod
    def _stop(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(10)


_SERVERS = {True: _Server("torch"), False: _Server()}


class Forked:
    """Process that runs `python -m MODULE FLAGS` without the imports."""

    def __init__(
        self, module: str, flags: Sequence[str], log: IO[bytes], cwd: Path, env: Mapping[str, str], *, torch: bool
    ) -> None:
        self.args = [module, *flags]
        self.returncode: int | None = None
        self._server = _SERVERS[torch]
        self.pid = int(self._server.ask(module=module, flags=list(flags), log=log.name, cwd=str(cwd), env=dict(env)))

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask(poll=self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(_POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _load() -> None:
    """Import what the services import, in their order."""
    if sys.argv[1:] == ["torch"]:
        wait_briefly()  # as the services do it before they load torch
        for name in _LIBRARIES:
            importlib.import_module(name)
        for name in _CLASSES:
            getattr(sys.modules["transformers"], name)
        return
    importlib.import_module("outrider.base.no_torch")
    for name in _LIBRARIES_WITHOUT_TORCH:
        importlib.import_module(name)
    for name in _CLASSES_WITHOUT_TORCH:
        getattr(sys.modules["transformers"], name)


def _serve() -> None:
    _load()
    gc.freeze()
    for line in sys.stdin:
        question = json.loads(line)
        answer = _poll(question["poll"]) if "poll" in question else _fork(**question)
        print(json.dumps(answer), flush=True)


def _poll(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def _fork(module: str, flags: list[str], log: str, cwd: str, env: dict[str, str]) -> int:
    pid = os.fork()
    if pid == 0:
        _become(module, flags, log, cwd, env)
    return pid


def _become(module: str, flags: list[str], log: str, cwd: str, env: dict[str, str]) -> NoReturn:
    code = 1
    try:
        for target, path, how in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY | os.O_APPEND)):
            opened = os.open(path, how)
            os.dup2(opened, target)
            os.close(opened)
        os.dup2(1, 2)
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = [module, *flags]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
