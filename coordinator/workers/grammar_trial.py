"""Trial of a new grammar in a process that may fail: a small one can take gigabytes, minutes, or crash the compiler.

Run as a module, it is the server that tries: it loads the tokenizer once and forks for each grammar.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from outrider.protocol.errors import InvalidRequest, Unavailable
from outrider.protocol.sampling_params import Grammar
from outrider.speculation.grammar import GrammarCompiler

_SECONDS = 2  # of processor time
_MEMORY = 1 << 30  # bytes of addresses beyond the server's; half of them are the compiler's stack


class GrammarTrial:
    """The coordinator's side: it starts the server with the first grammar, and asks about one at a time."""

    def __init__(self, tokenizer: Callable[[], str], ends: Sequence[int]) -> None:
        self._tokenizer, self._ends = tokenizer, ends
        self._server: Connection | None = None
        self._refused = deque[Grammar](maxlen=64)
        self._lock = threading.Lock()

    def __call__(self, grammar: Grammar) -> None:
        """Raise InvalidRequest if the compilation of a grammar fails in another way than by an error."""
        with self._lock:
            if grammar not in self._refused:
                if (answer := self._ask(grammar) or self._ask(grammar)) == b"1":
                    return
                if not answer:
                    raise Unavailable("the process that tries grammars does not start")
                self._refused.append(grammar)
        raise InvalidRequest.of(grammar.field, grammar.text, f"compiled within {_SECONDS} s and {_MEMORY >> 30} GiB")

    def _ask(self, grammar: Grammar) -> bytes:
        """Return the server's answer; empty: it has ended, perhaps before it was asked."""
        try:
            self._server = self._server or self._start()
            self._server.send(grammar)
            return self._server.recv_bytes(1)
        except (EOFError, OSError):
            self._server = None
            return b""

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        null, own = subprocess.DEVNULL, {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno())]
            server = subprocess.Popen(
                command, stdin=null, stdout=null, stderr=null, pass_fds=[theirs.fileno()], env=os.environ | own
            )
        weakref.finalize(ours, _end, server)
        ours.send((self._tokenizer(), self._ends))
        return ours


def _end(server: subprocess.Popen[bytes]) -> None:
    server.kill()
    server.wait()


def _serve(coordinator: Connection) -> None:
    tokenizer, ends = coordinator.recv()
    compiler = GrammarCompiler(lambda: tokenizer, ends)
    with suppress(InvalidRequest):
        compiler.start(Grammar(json_object=True))  # loads the tokenizer
    known = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    most = _MEMORY + known * resource.getpagesize()
    while True:
        grammar = coordinator.recv()
        if (child := os.fork()) == 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
            if resource.getrlimit(resource.RLIMIT_AS)[1] == resource.RLIM_INFINITY:
                resource.setrlimit(resource.RLIMIT_AS, (most, most))
            with suppress(InvalidRequest):  # the coordinator finds the same
                compiler.start(grammar)
            os._exit(0)
        coordinator.send_bytes(b"%d" % (os.waitpid(child, 0)[1] == 0))


if __name__ == "__main__":
    with suppress(EOFError):  # the coordinator has ended
        _serve(Connection(int(sys.argv[1])))
