"""Threads of a step meet: none sleeps on, and none keeps another one from its core."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.engine.native import build

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="futexes and the cores of threads are Linux's")
CORES = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


def test_who_sleeps_at_the_next_meeting_already_is_woken(tmp_path: Path) -> None:
    """The last one at a meeting loses its core before it asks who sleeps. In a process: a step that hangs goes on."""
    ran = run_with_meeting(tmp_path, "#define LATE_WAKING", 'ctypes.c_long.in_dll(meeting, "meetings").value')
    assert int(ran) > 59


@pytest.mark.skipif(CORES < 2, reason="moves need another core")
@pytest.mark.parametrize(
    ("core", "then", "least", "most"),
    [("0", "omp_get_thread_num()", 2, 2), ("0", "0", 2, 2 * 2 * 59), ("-1", "-1", 0, 0)],
)
def test_threads_on_one_core_part(tmp_path: Path, core: str, then: str, least: int, most: int) -> None:
    """Each would spin while the other cannot run. One moves, by two calls; if that is in vain, twice a step at most.

    −1: the system does not say where a thread is.
    """
    pretended = f"""
#define _GNU_SOURCE
#include <omp.h>
#include <sched.h>
static __thread int core = {core};
int moved[2];
static int core_here(void) {{ return core; }}
static int allow(pid_t process, size_t size, const cpu_set_t *cores) {{
    (void)process, (void)size, (void)cores;
    core = {then};
    moved[omp_get_thread_num()]++;
    return 0;
}}
#define sched_getcpu core_here
#define sched_setaffinity allow
"""
    ran = run_with_meeting(tmp_path, pretended, '*(ctypes.c_int * 2).in_dll(meeting, "moved")')
    first, second = map(int, ran.split())
    assert first == 0, "both would move to the same core"
    assert least <= second <= most


def run_with_meeting(folder: Path, before: str, shown: str) -> str:
    """Return what a process shows of its meetings after 59 steps, where meeting.c was compiled after other lines."""
    build.library()  # compiled here, if need be: the process has a limit of time
    (folder / "other.c").write_text(f"""{before}
#define meet other_meet
#include "{build._FOLDER / "meeting.c"}"
#undef meet
long meetings;
void meet(const Step *step) {{
    if (!omp_get_thread_num()) meetings++;
    other_meet(step);
}}
""")
    compiled = folder / "other.so"
    subprocess.run(
        ["cc", *build._FLAGS, "-march=native", "-shared", "other.c", "-o", str(compiled)], cwd=folder, check=True
    )
    code = f"""
import ctypes
meeting = ctypes.CDLL({str(compiled)!r}, ctypes.RTLD_GLOBAL)  # before the kernels, which then take its function
from outrider.engine import SessionTokens
from tests.unit.outrider.engine.native.test_native import engine, llama
engine = engine(llama(), threads=2)
for token in range(1, 60):
    engine.extend([SessionTokens("a", [token])])
print({shown})
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=90)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
