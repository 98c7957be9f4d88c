import pytest

from tests.support.serving import served


@pytest.fixture(scope="session")
def nano():
    """A server that all tests of a worker share."""
    with served() as one:
        yield one
