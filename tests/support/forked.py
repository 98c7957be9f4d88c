"""Python programs that start at once: forks of a process that has imported torch, which takes 1.5 s, and nothing of
Triton and of dsv4. That process is a fork of the tests' own, from their beginning."""

import atexit
import gc
import os
import pickle
import runpy
import signal
import socket
import sys
import tempfile
import warnings
from contextlib import suppress
from typing import TextIO

# time limit of a program in seconds: its parent process may have exited
SECONDS = 120
# warnings that Python does not show
HIDDEN = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
MOST_BYTES = 1 << 18


class Forked:
    """`python -m …` or `python -c …`; it ends as a program does."""

    def __init__(self, *words: str, to: str | None = None, seconds: int = SECONDS, **environment: str | None) -> None:
        """to: file to redirect stdout to, instead of `out`. seconds: time limit, after which SIGALRM ends the program.
        environment: variables to set, or to unset if None."""
        reading, writing = os.pipe()
        if to is not None:
            os.close(writing)
            writing = os.open(to, os.O_WRONLY)
        self._err = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - until it has ended
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._told = ours.makefile(encoding="utf-8")
            given = pickle.dumps((words, {**os.environ, **environment}, os.getcwd(), seconds))
            socket.send_fds(_nursery, [given], [writing, self._err.fileno(), theirs.fileno()])
        os.close(writing)
        self.out: TextIO = open(reading, encoding="utf-8")  # noqa: SIM115 - until it has ended
        self.pid = int(self._told.readline())

    def send(self, number: int) -> None:
        """A signal."""
        os.kill(self.pid, number)

    def ended(self) -> tuple[int, str, str]:
        """Its exit code, or the signal as a negative number, the rest of its stdout, and its stderr."""
        with self.out, self._err, self._told:
            out, code = self.out.read(), int(self._told.readline())
            self._err.seek(0)
            return code, out, self._err.read()


def output_of(*words: str, seconds: int = SECONDS, **environment: str | None) -> str:
    """What it prints."""
    code, out, err = Forked(*words, seconds=seconds, **environment).ended()
    assert code != -signal.SIGALRM, f"{' '.join(words)} takes more than {seconds} s"
    assert code == 0, err
    return out


def _begin() -> socket.socket:
    ours, theirs = socket.socketpair()
    nursery = _fork()
    if nursery == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        keep = os.dup2(theirs.fileno(), 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        _watch(socket.socket(fileno=keep))
    theirs.close()
    atexit.register(_end, ours, nursery)
    return ours


def _end(tests: socket.socket, nursery: int) -> None:
    tests.shutdown(socket.SHUT_RDWR)  # other forks may have it too
    tests.close()
    with suppress(ChildProcessError):
        os.waitpid(nursery, 0)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the threads that there are sleep
        return os.fork()


def _watch(tests: socket.socket) -> None:
    """Starts what it is told to, until the tests end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        given, streams, _, _ = socket.recv_fds(tests, MOST_BYTES, 3)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not given:
            os._exit(0)
        if os.fork() == 0:
            tests.close()
            _attend(streams.pop(), streams, *pickle.loads(given))
        for stream in streams:
            os.close(stream)


def _attend(
    told: int, streams: list[int], words: tuple[str, ...], environment: dict[str, str], folder: str, seconds: int
) -> None:
    """Tells the program's number, and how it has ended."""
    program = os.fork()
    if program == 0:
        os.close(told)
        _be(words, streams, environment, folder, seconds)
    os.write(told, b"%d\n" % program)
    for stream in streams:
        os.close(stream)
    os.write(told, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]))
    os._exit(0)


def _be(words: tuple[str, ...], streams: list[int], environment: dict[str, str], folder: str, seconds: int) -> None:
    code = 1
    try:
        for number, stream in enumerate(streams, 1):
            os.dup2(stream, number)
            os.close(stream)
        for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - open to the end
        os.chdir(folder)
        os.environ.clear()
        os.environ.update({name: value for name, value in environment.items() if value is not None})
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.alarm(seconds)
        gc.enable()
        warnings.resetwarnings()
        for category in HIDDEN:
            warnings.simplefilter("ignore", category)
        kind, what, *arguments = words
        sys.argv = [what if kind == "-m" else kind, *arguments]
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(what, {"__name__": "__main__"})
        code = 0
    except SystemExit as left:
        code = int(left.code or 0)
    except BaseException:  # noqa: BLE001 - as Python does at the end of a program
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            sys.stdout.flush()
        except OSError:
            code = 120
        sys.stderr.flush()
        os._exit(code)


_nursery = _begin()
