"""What `outrider train dspark` writes has the accept length in vLLM's engine that it has here.

Only vLLM's newer runner has the method.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.trained import toy


@pytest.mark.prove
def test_a_toy_drafter_has_the_accept_length_in_vllm_that_it_has_here(tmp_path: Path) -> None:
    theirs, ours = toy("dspark", tmp_path)
    assert ours.texts == theirs.texts
    assert theirs.accept_length > 2, "nothing to compare"
    assert ours.accept_length == pytest.approx(theirs.accept_length, rel=0.03)
