"""Another user than root, as whom a test may not read or write what root may."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

NOBODY = 65_534


@contextlib.contextmanager
def without_rights_of_root() -> Iterator[None]:
    """Run the block as nobody where the tests run as root: modes of files then hold. All threads change."""
    if os.getuid() != 0:
        yield
        return
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
