"""`python -m tests.kernels`: compile the kernels that tests load, for every level of this processor, and with tiles.

Without it, both processes of pytest and the verifiers that they start compile the same kernels at the same time.
"""

from __future__ import annotations

import torch

from outrider.base.config import home
from outrider.engine.native import build
from tests.unit.outrider.engine.native import tiles


def main() -> None:
    capabilities = torch.cpu.get_capabilities()
    for level in ("native", *(level for level, needed in build.levels().items() if capabilities.get(needed))):
        build.compile_for(level, home() / "kernels")
    tiles.library()


if __name__ == "__main__":
    main()
