"""The process of an engine's server: its log, its readiness and its end. No process that it starts outlives it."""

import json
import os
import signal
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from time import monotonic

from dsv4cli.engine.chat.api_client import ApiClient
from dsv4cli.engine.system.ending import end_with_parent
from dsv4cli.errors import ServerError

# lines of the log to show if the server ends
LAST_LINES = 20
# bytes of a line of the log; a longer one is cut into several
LONGEST_LINE = 1 << 14
# seconds to read the rest of the log after the server has ended
DRAIN_SECONDS = 1.0
# path that answers 200 as soon as requests are accepted, in vLLM and SGLang
HEALTH = "/health"
# seconds between two requests to it, and to wait for its answer
POLL_SECONDS, HEALTH_SECONDS = 1.0, 5.0
# seconds between two reports that the server is still loading
REPORT_SECONDS = 30.0


class EngineProcess:
    """A server in a session of its own, so that Ctrl-C reaches this process alone and all its processes can be killed.

    It also ends if this process is killed.
    """

    def __init__(self, words: Sequence[str], variables: Mapping[str, str], log: Callable[[str], None]) -> None:
        """Start the server.

        Args:
            words: the command line.
            variables: environment variables to add.
            log: called with each line of the server's output, in another thread.

        Raises:
            OSError: the program cannot be started.
        """
        prefix = ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []
        self._process = subprocess.Popen(
            [*prefix, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._log = log
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The number of the process, and of its group."""
        return self._process.pid

    def wait(self, seconds: float) -> bool:
        """Return whether the server ends within this time."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            return True
        return False

    def failure(self, title: str) -> ServerError:
        """Return the error for a server that has ended, with the end of its log."""
        self._reader.join(DRAIN_SECONDS)
        code = self._process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return ServerError(
            f"{title} {how}", "read the end of its log above; see also docs/guides/clusters.md", tuple(self.last_lines)
        )

    def end(self, number: int, grace: float) -> None:
        """End the server: send it a signal, and kill all its processes after `grace` seconds.

        A second Ctrl-C kills them at once.
        """
        try:
            if self._process.poll() is None:
                self._process.send_signal(number)
                self.wait(grace)
        finally:
            # those that the server has started are in its group, which exists until the last of them ends
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            self._reader.join(DRAIN_SECONDS)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            while line := stream.readline(LONGEST_LINE):
                text = line.decode(errors="replace").rstrip()
                self.last_lines.append(text)
                self._log(text)


def wait_until_ready(
    process: EngineProcess,
    url: str,
    seconds: float,
    title: str,
    report: Callable[[float], None],
) -> float:
    """Wait until a server accepts requests. Return how many seconds it took.

    Args:
        report: called from time to time with the seconds so far.

    Raises:
        ServerError: the server ends, or is not ready in time.
    """
    start, reported = monotonic(), 0.0
    client = ApiClient(url)
    while not process.wait(POLL_SECONDS):
        passed = monotonic() - start
        if _is_healthy(client):
            return passed
        if passed > seconds:
            raise ServerError(
                f"{title} is not ready after {seconds:g} s",
                "read the end of its log above, or wait longer with --ready-timeout",
                tuple(process.last_lines),
            )
        if passed - reported >= REPORT_SECONDS:
            reported = passed
            report(passed)
    raise process.failure(title)


def _is_healthy(client: ApiClient) -> bool:
    with suppress(ServerError):
        return client.exchange("GET", HEALTH, None, HEALTH_SECONDS).status == 200
    return False


@contextmanager
def key_options(keys: Sequence[str], many: bool) -> Iterator[list[str]]:
    """Yield options that pass API keys to an engine in a private file, so that `ps` does not show them.

    The file is removed at the end of the block.
    """
    if not keys:
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="dsv4-") as folder:
        file = Path(folder, "keys.yaml")
        # JSON is YAML
        file.write_text(json.dumps({"api-key": list(keys) if many else keys[0]}), encoding="utf-8")
        yield ["--config", str(file)]
