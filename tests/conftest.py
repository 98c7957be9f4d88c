"""How a run of all tests is spread over its workers; the fixtures of all tests are in tests/support/every_test.py."""

import gc
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# tests that import an optional package: a GPU machine runs the rest from a checkout, with the packages it has
OPTIONAL = {
    "engine/server": "starlette",
    "commands/serve": "starlette",
    "commands/chat/test_terminal.py": "prompt_toolkit",
}
NOT_COLLECTED = {
    Path(__file__).parent / place: package for place, package in OPTIONAL.items() if find_spec(package) is None
}

gc.disable()  # until all tests are imported: a tenth of their time


def pytest_configure(config: pytest.Config) -> None:
    """The process that only hands out tests imports no torch: it starts its workers two seconds earlier."""
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("tests.support.every_test")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each worker takes tests that stand together, so that what a module makes for its tests is made once."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_collection_finish() -> None:
    """What is there after the imports lives as long as the run: the garbage collector need not look at it again."""
    gc.freeze()
    gc.set_threshold(5000, 20, 100)  # rarely everything: what a test leaves behind is small
    gc.enable()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out tests whose package is missing; the summary names them."""
    return True if collection_path in NOT_COLLECTED else None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the tests that were not collected because a package is missing."""
    for place, package in NOT_COLLECTED.items():
        terminalreporter.write_line(f"not collected: tests/{place.relative_to(Path(__file__).parent)} (no {package})")
