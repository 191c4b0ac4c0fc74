"""The line that a bootstrap prints to join with."""

from __future__ import annotations

import pytest

from peers.programs.roles import address_for_others

HERE, HERE_6 = "/ip4/127.0.0.1/tcp/31337/p2p/x", "/ip6/::1/tcp/31337/p2p/x"
THERE, NAMED = "/ip4/192.0.2.2/tcp/31337/p2p/x", "/dns4/bootstrap/tcp/31337/p2p/x"


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [((HERE, THERE), THERE), ((HERE_6, HERE, NAMED), NAMED), ((THERE, NAMED), THERE), ((HERE, HERE_6), HERE)],
)
def test_an_address_is_handed_out_that_other_machines_can_dial(
    addresses: tuple[str, ...], expected: str
) -> None:
    assert address_for_others(addresses) == expected
