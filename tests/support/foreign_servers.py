"""Servers of other projects, each with nano: transformers' own, and llama.cpp's from the package xllamacpp."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.support.conversions import convert
from tests.support.wide_nano import make_wide_nano

# seconds; a process that imports PyTorch on a busy machine
START = 600
LLAMA = """
import sys, threading, xllamacpp
options = xllamacpp.CommonParams()
options.model.path, options.port, options.hostnames = sys.argv[1], int(sys.argv[2]), ["127.0.0.1"]
options.model_alias, options.n_parallel, options.n_ctx, options.fit_params = {"nano"}, 4, 4 * 8192, False
server = xllamacpp.Server(options)
threading.Event().wait()
"""


def transformers_server(folder: Path) -> AbstractContextManager[str]:
    """`transformers serve`. Skips the test without its packages."""
    for package in ("transformers", "fastapi", "uvicorn", "openai", "accelerate"):
        pytest.importorskip(package)
    model = folder / "nano"
    convert("nano", model, "--to", "transformers", "--verify", "off")
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(model), "--device", "cpu", "--port"]
    return _running(command, folder / "log", "/v1/models")


def llama_server(folder: Path) -> AbstractContextManager[str]:
    """llama.cpp's server. Skips the test without xllamacpp."""
    pytest.importorskip("xllamacpp")
    make_wide_nano(folder / "wide")
    layout = ("--to", "gguf", "--attention", "bf16", "--experts", "bf16", "--verify", "off")
    convert(folder / "wide", folder / "gguf", *layout)
    [file] = (folder / "gguf").glob("*.gguf")
    return _running([sys.executable, "-c", LLAMA, str(file)], folder / "log", "/health")


@contextmanager
def _running(command: Sequence[str], log: Path, path: str) -> Iterator[str]:
    """Start a server with a free port as its last argument; yield its address once the path has status 200."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # waiting threads of OpenMP would take the processor from each other
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (
        log.open("wb") as file,
        subprocess.Popen([*command, str(port)], env=environment, stdout=file, stderr=file) as process,
    ):
        try:
            assert _is_ready(f"http://localhost:{port}{path}", process), log.read_text(errors="replace")[-2000:]
            yield f"http://localhost:{port}"
        finally:
            process.terminate()


def _is_ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    end = time.monotonic() + START
    while process.poll() is None and time.monotonic() < end:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
        else:
            return True
    return False
