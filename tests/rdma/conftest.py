"""One boot of the guest for the whole session, with the cases that the selected tests ask for."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.rdma.kernel import NoGuest
from tests.rdma.virtual_machine import Guest, run_guest

GUEST_SECONDS = 900.0
"""A machine that does nothing else needs about a quarter of it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever waits for the guest may wait as long as it runs."""
    for item in items:
        if "guest" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(GUEST_SECONDS + 180))


def cases_of(items: Iterable[pytest.Item]) -> list[str]:
    """Names of the cases that tests ask for with the marker `guest_case`, each once."""
    return list(dict.fromkeys(n for item in items for m in item.iter_markers("guest_case") for n in m.args))


@pytest.fixture(scope="session")
def guest(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Guest:
    """The guest after its one run."""
    try:
        return run_guest(cases_of(request.session.items), tmp_path_factory.mktemp("guest"), GUEST_SECONDS)
    except NoGuest as missing:
        pytest.skip(str(missing))
