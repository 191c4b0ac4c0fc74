"""What all tests share: a cache folder of their own, a profile for hypothesis, and UTC for who asks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# The time of an example says nothing on a shared machine. What fails is printed in a form that repeats it.
settings.register_profile(
    "swarm", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow], max_examples=100
)
settings.register_profile("more", settings.get_profile("swarm"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "swarm"))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tokens that tests cache do not land in the home of whoever runs them."""
    before = os.environ.get("SWARM_CACHE")
    os.environ["SWARM_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["SWARM_CACHE"]
    else:
        os.environ["SWARM_CACHE"] = before


@pytest.fixture(scope="module")
def greenwich() -> Iterator[None]:
    """Local time is UTC, so that pictures are the same everywhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()
