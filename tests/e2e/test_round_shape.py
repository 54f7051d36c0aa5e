"""A round of the running services runs no more functions than its ceiling allows."""

from __future__ import annotations

from tests.shape import measures


def test_a_round_runs_functions_of_all_three_services_and_no_more_than_it_may() -> None:
    functions, files, shared = measures.of_rounds()
    services = {path.split("/")[0] for path in files.found}
    assert services >= {"coordinator", "verifier", "drafter"}
    assert functions.now > 30, "fewer than a round can do with: they were not seen"
    assert not measures.over([functions, files, shared], measures.ceilings()), "\n".join(functions.found)
