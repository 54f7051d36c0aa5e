"""Every causal architecture that transformers can build: right to 1e-5 or refused in words, as docs/targets.md says."""

from __future__ import annotations

import pytest

from tests.architectures import FAMILIES, PAGE, VARIANTS, fates, page

pytestmark = [pytest.mark.prove, pytest.mark.timeout(3600)]


def test_no_architecture_is_served_wrong_and_the_page_says_what_becomes_of_each() -> None:
    found = list(fates([*FAMILIES, *VARIANTS]))
    assert [f"{each.name}: {each.wrong}" for each in found if each.wrong] == []
    assert all(each.engines or each.refusal or each.not_built for each in found)
    assert page(found) == PAGE.read_text(), "python -m tests.architectures writes it anew"
