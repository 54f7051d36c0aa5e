"""OpenMP threads: only the thread that runs the model has any, as more than cores hardly spin."""

from __future__ import annotations

import subprocess
import sys

_WORKER = """
import os
from concurrent.futures import ThreadPoolExecutor
from outrider.runtime import worker
from outrider.settings.verifier import VerifierSettings

model = ThreadPoolExecutor(1)

def threads() -> int:
    import torch
    before = len(os.listdir("/proc/self/task"))
    torch.ones(1 << 21).half()
    return len(os.listdir("/proc/self/task")) - before

def build(progress):
    import torch
    torch.set_num_threads(3)
    assert threads() == 2  # they would be there as long as the process
    return len(os.listdir("/proc/self/task"))

async def serve(loaded, settings, ready):
    print(loaded - len(os.listdir("/proc/self/task")), threads(), model.submit(threads).result(), threads())

model.submit(int).result()
worker.serve = serve
worker.run_worker("verifier", VerifierSettings(), build)
"""


def test_a_worker_computes_alone_beside_its_models_thread() -> None:
    """The numbers: how many threads ended after loading, and how many began with an operation.

    There were three: in the service's thread, in the model's, and in the service's again.
    """
    ran = subprocess.run([sys.executable, "-c", _WORKER], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["2", "0", "2", "0"]
