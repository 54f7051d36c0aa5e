"""A round of the running services runs no more functions than its ceiling allows."""

from __future__ import annotations

from tests.shape import measures

TRIES = 2  # on a busy machine what happens between rounds, such as writes to Redis, may fall into nearly all of them


def test_a_round_runs_functions_of_all_three_services_and_no_more_than_it_may() -> None:
    for _ in range(TRIES):
        functions, files, shared = measures.of_rounds()
        services = {path.split("/")[0] for path in files.found}
        assert services >= {"coordinator", "verifier", "drafter"}
        assert functions.now > 30, "fewer than a round can do with: they were not seen"
        over = measures.over([functions, files, shared], measures.ceilings())
        if not over:
            break
    assert not over, "\n".join(functions.found)
