"""Every way out of `dsv4 run --tp N` and `dsv4 chat --tp N`: exit code, seconds to the end, and what is left running.

python -m tests.benchmarks.ways_out --tp 2 --model nano
Each case has a terminal and a program of its own; as many run at once as --jobs says. Exits with 1 where one is wrong.
"""

import argparse
import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# the longest wait for words, which compilers delay, and for the end
SECONDS, END_SECONDS = 240, 60
STARTING, SHARED, PROMPT, READY = "starting", "sums go through", "\n>", "the text means nothing"
QUESTION = "What is 17 + 25?"
# what the case waits for that is not a word: an answer under way
ANSWER = "ANSWER"
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[=>])|[\r\b]")
CTRL_C, CTRL_D = "\x03", "\x04"
ENDLESS = ("--max-tokens", "100000", "--temperature", "0")


@dataclass
class Case:
    """A way out: what it is called, the moment it begins at, how, and the exit code that it should have."""

    command: str
    moment: str
    way: str
    expected: int
    until: tuple[str, ...]
    act: Callable[["Running"], None]


@dataclass
class Running:
    """A program in the foreground of a terminal."""

    arguments: list[str]
    shown: str = ""
    seen: int = 0
    begin: float = 0.0
    processes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = tempfile.TemporaryDirectory()
        self.master, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "XDG_STATE_HOME": self.state.name, "PROMPT_TOOLKIT_NO_CPR": "1"}
        environment["PYTHONFAULTHANDLER"] = "1"
        self.program = subprocess.Popen(
            [sys.executable, "-m", "dsv4cli", *self.arguments],
            cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(theirs)

    def until(self, word: str) -> None:
        """Waits until the terminal shows this, behind what was waited for before."""
        end = time.monotonic() + SECONDS
        while (at := self.plain.find(word, self.seen)) < 0:
            if time.monotonic() > end or not self.read():
                raise TimeoutError(f"no {word!r} behind {self.plain[self.seen :][-300:]!r}")
        self.seen = at + len(word)

    def more(self, count: int) -> None:
        """Waits until the terminal shows so many characters more."""
        before, end = len(self.plain), time.monotonic() + SECONDS
        while len(self.plain) < before + count:
            if time.monotonic() > end or not self.read():
                raise TimeoutError(f"no words behind {self.plain[-300:]!r}")

    @property
    def plain(self) -> str:
        """What the terminal has shown, without escape codes."""
        return ESCAPES.sub("", self.shown)

    def read(self) -> bool:
        """Takes what has come; whether the terminal is still open."""
        if select.select([self.master], [], [], 0.05)[0]:
            try:
                self.shown += os.read(self.master, 65536).decode(errors="replace")
            except OSError:  # EIO: the other end is closed
                return False
        return True

    def type(self, keys: str) -> None:
        """As a user does."""
        os.write(self.master, keys.encode())

    def others(self) -> list[int]:
        """The other ranks, none where the program has ended."""
        pid = self.program.pid
        try:
            children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            # beside compilers
            return [child for child in children if b"\0follow\0" in Path(f"/proc/{child}/cmdline").read_bytes()]
        except OSError:
            return []

    def end(self) -> tuple[int, float, int]:
        """Waits for the end: the exit code, seconds since `begin`, processes that are left two seconds later."""
        while self.program.poll() is None and time.monotonic() - self.begin < END_SECONDS:
            self.read()
        seconds = time.monotonic() - self.begin
        hangs = self.program.poll() is None
        while not hangs and self.read() and time.monotonic() - self.begin < seconds + 2:
            pass
        left = [pid for pid in self.processes if alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        if hangs:
            self.program.send_signal(signal.SIGABRT)  # tells where it stands
            while self.read() and self.program.poll() is None:
                pass
            self.program.kill()
        self.program.wait()
        return (-999 if hangs else self.program.returncode), seconds, len(left)


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def send(number: int) -> Callable[[Running], None]:
    """A signal to the program that the user has started."""
    return lambda running: os.kill(running.program.pid, number)


def kill_follower(running: Running) -> None:
    """The last of the other ranks."""
    os.kill(running.others()[-1], signal.SIGKILL)


def twice(running: Running) -> None:
    """Ctrl-C, and once more."""
    running.type(CTRL_C)
    time.sleep(0.5)
    running.type(CTRL_C)


def stop_then_leave(running: Running) -> None:
    """Ctrl-C ends the answer, Ctrl-D the conversation."""
    running.type(CTRL_C)
    running.until("stopped")
    running.until(PROMPT)
    time.sleep(2.5)  # not a second Ctrl-C
    running.begin = time.monotonic()
    running.type(CTRL_D)


def keys(text: str) -> Callable[[Running], None]:
    """What is typed."""
    return lambda running: running.type(text)


SIGNALS = [
    ("Ctrl-C", 130, keys(CTRL_C)),
    ("SIGTERM", 143, send(signal.SIGTERM)),
    ("kill -9 of a follower", 1, kill_follower),
    ("kill -9 of the leader", -9, send(signal.SIGKILL)),
]


def cases() -> list[Case]:
    """All of them."""
    found = [
        Case("run", "", "plain end", 0, (), lambda running: None),
        Case("chat", "at the prompt", "Ctrl-D", 0, (PROMPT,), keys(CTRL_D)),
        Case("chat", "at the prompt", "/exit", 0, (PROMPT,), keys("/exit\r")),
        Case("chat", "at the prompt", "Ctrl-C twice", 130, (PROMPT,), twice),
        Case("chat", "after an answer", "Ctrl-D", 0, (PROMPT, "first after", PROMPT), keys(CTRL_D)),
        Case("chat", "within an answer", "Ctrl-C, Ctrl-D", 0, (PROMPT, ANSWER), stop_then_leave),
        Case("chat", "within an answer", "Ctrl-C twice", 130, (PROMPT, ANSWER), twice),
    ]
    for way, code, act in SIGNALS:
        for command in ("run", "chat"):
            found.append(Case(command, "ranks start", way, code, (STARTING,), act))
            found.append(Case(command, "model loads", way, code, (SHARED,), act))
            if command == "run" or way != "Ctrl-C":
                before = READY if command == "run" else PROMPT
                found.append(Case(command, "within an answer", way, code, (before, ANSWER), act))
    return found


def start(case: Case, asked: argparse.Namespace) -> Running:
    """The program of a case, at its start."""
    endless = "within" in case.moment
    shared = [
        "--tp",
        str(asked.tp),
        "--model",
        asked.endless if endless else asked.model,
        *(ENDLESS if endless else ()),
    ]
    if asked.device:
        shared += ["--device", asked.device]
    if asked.dtype:
        shared += ["--dtype", asked.dtype]
    return Running(["run", QUESTION, *shared] if case.command == "run" else ["chat", "--no-markdown", *shared])


def lead_up(case: Case, running: Running, seconds: float) -> None:
    """Waits for the moment of a case. Raises TimeoutError."""
    for number, word in enumerate(case.until):
        if word == ANSWER:
            running.more(200)
        else:
            running.until(word)
        if case.command == "chat" and number == 0 and len(case.until) > 1:
            running.type(f"{QUESTION}\r")
    if case.moment == "ranks start":
        time.sleep(seconds)
    end = time.monotonic() + 30  # they are there a moment later
    while not running.others() and running.program.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    running.processes = running.others()


def carry_out(case: Case, asked: argparse.Namespace) -> tuple[bool, str]:
    """Whether a case ends as it should, and its row of the table."""
    running = start(case, asked)
    try:
        lead_up(case, running, asked.after)
        running.begin = time.monotonic()
        case.act(running)
        if case.way == "plain end":
            running.until("tokens/s")
            running.begin = time.monotonic()
    except (TimeoutError, OSError, IndexError) as error:
        running.begin = running.begin or time.monotonic()
        running.program.kill()
        running.end()
        return False, f"| {case.command} | {case.moment} | {case.way} | NOT REACHED: {error} |"
    code, seconds, left = running.end()
    right = code == case.expected and not left and "Traceback" not in running.shown
    last = running.plain.strip().rpartition("\n")[2][-70:]
    mark = "" if right else f" WRONG, expected {case.expected}: {running.plain[-3000:]!r}"
    return right, f"| {case.command} | {case.moment} | {case.way} | {code} | {seconds:.2f} s | {left} | {last}{mark} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--endless", default="random:tiny,layers=1,seed=6", help="a model whose answers do not end")
    parser.add_argument("--device", default="")
    parser.add_argument("--dtype", default="")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--after", type=float, default=2.0, help="seconds after the start that signals come")
    parser.add_argument("--times", type=int, default=1, help="how often each case is carried out")
    parser.add_argument("--only", default="", help="words of the cases to carry out")
    asked = parser.parse_args()
    chosen = [case for case in cases() if asked.only in f"{case.command} {case.moment} {case.way}"] * asked.times
    print("| command | moment | way | code | seconds | left | last line |\n|---|---|---|---|---|---|---|", flush=True)
    wrong = 0
    with ThreadPoolExecutor(asked.jobs) as pool:
        for right, row in pool.map(lambda case: carry_out(case, asked), chosen):
            wrong += not right
            print(row, flush=True)
    print(f"{len(chosen) - wrong} of {len(chosen)} right", flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
