"""Order of the test files on the workers of `pytest -n`: tests of real processes beside tests that compute.

A test file stays on one worker. The first worker begins with the files that start processes and wait for them, the
others with unit tests. So a cluster has a core for itself for most of the run. The last files are short, for the other
workers have nothing to do during the last one.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

_FOLDERS = ("e2e", "contract", "unit")
_ORDER = {folder: rank for rank, folder in enumerate(_FOLDERS)}
_LONG = ("test_tensor_parallel.py", "test_trained_drafters.py")  # the last of a folder, in the order of names


class RealBesideComputing(LoadFileScheduling):
    def _assign_work_unit(self, node: WorkerController) -> None:
        sign = 1 if node.gateway.id == "gw0" else -1
        preferred = min(
            self.workqueue, key=lambda file: (sign * _ORDER.get(file.split("/")[1], 1), not file.endswith(_LONG))
        )
        self.workqueue.move_to_end(preferred, last=False)
        super()._assign_work_unit(node)
