"""What workers are told of addresses, before anything is loaded."""

from __future__ import annotations

import pytest

from outrider.protocol.errors import StartupError
from outrider.runtime.worker_service import addresses, check_address


@pytest.mark.parametrize(
    "address", ["here", "http://coord:50050", "dns:///coord:50050", "coord/:50050", "::1:50050", "coord:²", "coord:0"]
)
def test_what_cannot_be_called_is_no_address(address: str) -> None:
    """gRPC would look for a host named http, and other coordinators would not believe the record of such a worker."""
    with pytest.raises(StartupError) as refused:
        check_address("advertise", address)
    assert refused.value.message == f"advertise is {address!r}, must be host:port, or [address]:port for IPv6"


def test_names_and_addresses_in_brackets_are_taken() -> None:
    assert addresses("coordinators", "coord:50050, [::1]:50051,") == ["coord:50050", "[::1]:50051"]
