"""What holds for every test: a fixed seed, one thread, and memory that is never zero by luck.

The fixture `dsv4` is the program as a function. And the backends: a test with the fixture `backend` runs in plain
PyTorch and in Triton's interpreter, or on a GPU.

`tests/conftest.py` makes this a plugin of the processes that run tests.
"""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import typer.main
import typer.testing
from _pytest.runner import runtestprotocol

PACKAGE = "dsv4cli"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported, which is when a kernel is first called
# of the workers and programs that are started from here: threads that wait for each other leave the core to others
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# what this process ignores, SIGHUP under nohup, SIGINT and SIGQUIT as a shell's job in the background, programs that it
# starts would ignore too; what a handler ignores they do not inherit, and tests interrupt this process as well
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else lambda *_: None)
# programs of tests begin as this process does here: with torch, without what the tests import
from tests.support import forked as forked  # noqa: E402

# what a test has left, a store of ranks for one, may wait at its end for a thread that a forked process has not
os.register_at_fork(after_in_child=gc.freeze)


def _computing(name: str) -> Iterator[str]:
    from dsv4cli.kernels.dispatch import use

    if name == "interpreter":
        if torch.cuda.is_available() or sys.platform != "linux":
            pytest.skip("kernels are interpreted where there is Triton and no GPU; on a GPU they run with -m gpu")
        from tests.support.interpreter import correct

        correct()
    # under torch.device("cpu") each operation would take its way through Python, and nothing else would change
    device = torch.device("cuda") if "cuda" in name else nullcontext()
    with use("torch" if name.startswith("torch") else "triton"), device:
        yield name


KERNELS = ["interpreter", pytest.param("triton-cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def dsv4(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """`dsv4` as a function, a `Program`. A module whose tests need more overrides it with a fixture that takes it."""
    from tests.support.program import Program

    return Program(monkeypatch, capsys)


@pytest.fixture(params=["torch", pytest.param("torch-cuda", marks=pytest.mark.gpu), *KERNELS])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test with each implementation of the kernel families; tensors that it makes are on the device for it."""
    yield from _computing(request.param)


@pytest.fixture(params=KERNELS)
def triton_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The same with the Triton kernels only: to compare them with a reference, or to see what they refuse."""
    yield from _computing(request.param)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect GPU tests with the parameter `interpreter`: without a GPU they are off, with one the interpreter is."""
    never = {
        item
        for item in items
        if isinstance(item, pytest.Function)
        and item.get_closest_marker("gpu")
        and hasattr(item, "callspec")
        and "interpreter" in item.callspec.params.values()
    }
    if never:
        config.hook.pytest_deselected(items=[*never])
        items[:] = [item for item in items if item not in never]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A worker reports how a test ended, and of its beginnings and ends only those that failed: a message costs 0.2 ms
    in each process."""
    if not hasattr(item.config, "workerinput"):
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Fix torch to one thread: a sum's order must not vary, and threads that wait for a busy core cost minutes."""
    torch.set_num_threads(1)
    # torch lists its constructors at their first use under a device: let it list the real ones, not the poisoned
    with torch.device("cpu"):
        torch.empty(0)


@pytest.fixture(scope="session", autouse=True)
def _memory_is_kept() -> None:
    """Freed memory is kept for the next tensor; the kernel would clear half a million pages anew in a minute."""
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):  # glibc has it
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)


@pytest.fixture(scope="session", autouse=True)
def _files_need_not_outlive_the_machine() -> None:
    """A disk is not waited for: syncing takes most of the time of a small conversion."""
    os.fsync = os.fdatasync = lambda descriptor: None


@pytest.fixture(scope="session", autouse=True)
def _signatures_are_read_once() -> None:
    """Typer would read those of all commands anew for each call: 20 ms."""
    from tests.support.program import command

    typer.main.get_command = typer.testing._get_command = command


@pytest.fixture(scope="session", autouse=True)
def _weights_of_shared_models_are_decoded_once() -> None:
    """They do not change: decoding them anew at each step would give the same values."""
    from tests.support.shared_models import decode_once

    decode_once()


@pytest.fixture(autouse=True)
def _seeded_and_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed torch, and poison the uninitialised memory that the package asks for."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed imports the compiler: 2 s
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(make: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        tensor = make(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if (caller == PACKAGE or caller.startswith(f"{PACKAGE}.")) and not tensor.is_meta:
            tensor.untyped_storage().fill_(_poison_byte(tensor.dtype))
        return tensor

    return call


def _poison_byte(dtype: Any) -> int:
    """0xFF in every byte is NaN in each float format, e8m0 included; integers get a value far out of range."""
    if dtype is torch.bool:
        return 1
    # not -1 for integers, which may stand for "none" or index the last row
    return 0xFF if dtype.is_floating_point or dtype.is_complex or dtype is torch.uint8 else 0x7F
