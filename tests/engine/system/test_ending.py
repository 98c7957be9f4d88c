"""How a process ends: with its parent, and soon after a signal even where Python does not run."""

import signal
import subprocess
import sys

import pytest

from tests.support.program import ROOT
from tests.support.waiting import comes

# a main thread in C, which waits for itself
STUCK = """\
import ctypes, os, signal, sys, threading, time
from dsv4cli.engine.system import ending
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
ending.GRACE_SECONDS = 0.2
mutex = ctypes.create_string_buffer(64)
libc = ctypes.CDLL(None)
libc.pthread_mutex_lock(mutex)
def tell():
    still = 0
    while still < 20:
        state = open(f"/proc/self/task/{os.getpid()}/stat").read().rpartition(")")[2].split()[0]
        still = still + 1 if state == "S" else 0
        time.sleep(0.01)
    print("stuck", flush=True)
with ending.ends_soon(lambda number: print("leaving", number, flush=True)):
    threading.Thread(target=tell, daemon=True).start()
    libc.pthread_mutex_lock(mutex)
"""
ENDS = """\
from dsv4cli.engine.system.ending import ends_soon
import signal, sys, time
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
with ends_soon(lambda number: print("leaving", number, flush=True)):
    print("waiting", flush=True)
    time.sleep(60)
"""
ORPHAN = """\
import os, sys, time
from dsv4cli.engine.system.ending import end_with_parent
end_with_parent(int(sys.argv[1]))
print("alive", flush=True)
time.sleep(60)
"""


def start(script, *arguments):
    return subprocess.Popen([sys.executable, "-c", script, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_process_that_waits_in_c(number):
    with start(STUCK) as program:
        assert program.stdout.readline() == "stuck\n"
        program.send_signal(number)
        assert program.communicate(timeout=20)[0] == f"leaving {int(number)}\n"
    assert program.returncode == 128 + number


def test_a_signal_that_python_handles_ends_as_that_says():
    with start(ENDS) as program:
        assert program.stdout.readline() == "waiting\n"
        program.send_signal(signal.SIGTERM)
        assert program.communicate(timeout=20)[0] == ""
    assert program.returncode == 7


def test_a_process_ends_with_the_one_that_has_started_it():
    parent = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid())], stdout=subprocess.PIPE)\n"
        "print(child.stdout.readline(), child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with start(parent, ORPHAN) as program:
        child = int(program.stdout.readline().split()[-1])
        program.kill()
    assert comes(lambda: not running(child))


def test_a_process_whose_parent_has_ended_already_ends():
    with start(ORPHAN, "1") as program:
        assert program.communicate(timeout=20)[0] == ""
    assert program.returncode == 1


def running(pid):
    """A zombie that nobody waits for has no command line."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return bool(file.read())
    except FileNotFoundError:
        return False
