"""Only regular files are read, and a file that changes while it is read is noticed."""

import os
import signal

import pytest

from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.checkpoint.stored import StoredModel
from dsv4cli.engine.system.regular_files import open_file, read_bytes
from dsv4cli.engine.text.tokenizer import Tokenizer
from dsv4cli.errors import CheckpointError
from tests.support import conversions, damage


@pytest.fixture(autouse=True)
def _an_end():
    """A read that waits for ever fails the test instead."""
    signal.alarm(20)
    yield
    signal.alarm(0)


@pytest.fixture
def net(tmp_path):
    return damage.copy_checkpoint(tmp_path)


def make_pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def make_device(path):
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(("make", "kind"), [(make_pipe, "a named pipe"), (make_device, "a device")])
@pytest.mark.parametrize("name", ["config.json", damage.INDEX, damage.SHARD, "inference/config.json"])
def test_what_is_no_file_is_refused_by_every_command(net, make, kind, name):
    (net / "inference").mkdir(exist_ok=True)
    make(net / name)
    for expected, *command in ((3, "inspect", net), (1, "convert", net, f"{net}-out", "--to", "bf16")):
        code, out, err = conversions.run(*command)
        assert (code, f"{net / name} is {kind}, not a file" in out + err) == (expected, True), out + err


@pytest.mark.parametrize("make", [make_pipe, make_device])
def test_the_files_beside_the_weights(net, make):
    for name in ("tokenizer.json", "generation_config.json"):
        make(net / name)
    with pytest.raises(CheckpointError, match=r"tokenizer.json is a .*, not a file"):
        Tokenizer.from_file(net / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"generation_config.json is a .*, not a file"):
        _ = resolve_model(str(net)).sampling


def test_a_pipe_that_takes_the_name_of_a_file(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text("{}")
    before = os.stat(path)
    make_pipe(path)
    monkeypatch.setattr("dsv4cli.engine.system.regular_files.os.stat", lambda path: before)
    with pytest.raises(CheckpointError, match="a named pipe"):
        open_file(path)


def test_a_folder_is_an_os_error(tmp_path):
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path)


def read_while(net, happens):
    """Reads a tensor, then something happens to its file."""
    with StoredModel(_identity(net)) as model:
        model.read(model.specs["embed.weight"])
        happens(damage.shard_of(net, "embed.weight"))


def write_again(path):
    path.write_bytes(path.read_bytes())


def replace(path):
    status, other = os.stat(path), path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


def fail(path):
    write_again(path)
    raise KeyError


@pytest.mark.parametrize("happens", [write_again, replace])
def test_a_file_that_changes_while_it_is_read(net, happens):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match=r"changed while it was read"):
        read_while(net, happens)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_removed_was_read(net):
    read_while(net, lambda path: path.unlink())


def test_why_reading_ended_is_not_covered(net):
    with pytest.raises(KeyError):
        read_while(net, fail)


def _identity(folder):
    return resolve_model(str(folder)).identity
