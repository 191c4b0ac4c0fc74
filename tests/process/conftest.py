"""Programs of swarms are forked from a process that has imported already."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.process.forkserver import ForkServer
from tests.process.swarm_processes import Processes


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


TRACING = ("torch._dynamo", "torch.export._trace", "transformers.models.gpt2.modeling_gpt2")
"""Most of what a program needs to know its part of a custom model is these imports."""


@pytest.fixture(scope="session")
def tracing_server() -> Iterator[ForkServer]:
    """Its programs can trace already."""
    server = ForkServer(TRACING)
    yield server
    server.close()


@pytest.fixture(scope="package", autouse=True)
def forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Programs of swarms are forked; nothing is imported for that if no test that was chosen starts one."""
    if any(test.get_closest_marker("process") for test in request.session.items):
        Processes.fork_server = request.getfixturevalue("fork_server")
    yield
    Processes.fork_server = None


@pytest.fixture
def executed() -> Iterator[None]:
    """Programs are new Pythons, as users start them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Processes, "fork_server", None)
        yield
