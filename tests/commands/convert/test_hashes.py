"""`dsv4 convert` hashes what it writes while it writes it: what of the output is read again, and the right hashes."""

import errno
import hashlib
import json
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsv4cli.engine.conversion import manifest, plan
from dsv4cli.engine.conversion.hashed_file import CHUNK, ByteBudget, HashedFile
from dsv4cli.engine.conversion.manifest import Stopped, read_manifest
from tests.support import conversions, crashing, synthetic
from tests.support.conversions import convert, files
from tests.support.slow import slow, slow_except

TARGETS = {
    "bf16": ("--to", "bf16"),
    "fp8": ("--to", "fp8"),
    "nvfp4": ("--to", "nvfp4"),
    "official": ("--to", "official", "--max-shard-size", "400kB"),
    "transformers": ("--to", "transformers"),
    "mp": ("--to", "mp", "--ranks", "2"),
}
ALONE = ("--verify", "off", "--workers", "2")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return synthetic.write_checkpoint(tmp_path_factory.mktemp("source") / "small", synthetic.SMALL)


@pytest.fixture
def read(monkeypatch):
    """What is read of files that a conversion writes: name, first byte, number; None for a whole file."""
    found = []
    preadv, open_file = os.preadv, manifest.open_file

    def watched(descriptor, buffers, offset):
        count = preadv(descriptor, buffers, offset)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.parent.name == ".dsv4-convert":
            found.append((path.name, offset, count))
        return count

    def opened(path):
        if path.suffix == ".safetensors":
            found.append((path.name, 0, None))
        return open_file(path)

    monkeypatch.setattr(os, "preadv", watched)
    monkeypatch.setattr(manifest, "open_file", opened)
    return found


def assert_hashes(folder):
    """Of every file but the manifest, by plain code."""
    there = {name: hashlib.sha256(content).hexdigest() for name, content in files(folder).items()}
    del there["SHA256SUMS"]
    assert read_manifest(folder).hashes == there


@pytest.mark.parametrize("target", slow_except(["nvfp4", "official", "mp"], TARGETS))
def test_no_byte_is_read_again_for_its_hash(source, tmp_path, read, target):
    convert(source, tmp_path / "out", *TARGETS[target], *ALONE)
    assert read == []
    assert_hashes(tmp_path / "out")


def test_pieces_without_room_are_read_again_once(source, tmp_path, read, monkeypatch):
    monkeypatch.setattr(ByteBudget, "take", lambda budget, nbytes: False)
    monkeypatch.setattr(ByteBudget, "give", lambda budget, nbytes: None)
    convert(source, tmp_path / "out", *TARGETS["fp8"], *ALONE)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")}
    for name, size in sizes.items():
        assert read_once([piece for piece in read if piece[0] == name]) == [(0, size)]
    assert_hashes(tmp_path / "out")


def read_once(pieces):
    """Where what was read begins and ends, without gaps; no byte was read twice."""
    spans = []
    for _, begin, count in sorted(pieces):
        if spans and spans[-1][1] == begin:
            spans[-1] = spans[-1][0], begin + count
        else:
            assert not spans or spans[-1][1] < begin
            spans.append((begin, begin + count))
    return spans


@pytest.mark.parametrize("target", ["nvfp4", *slow("mp"), *slow("bf16", "fp8")])
def test_a_continued_conversion_reads_what_was_there_once(source, tmp_path, read, monkeypatch, target):
    options, output = (*TARGETS[target], *ALONE), tmp_path / "out"
    calls = tmp_path / "calls"
    assert crashing.ended(crashing.started("", 0, (source, tmp_path / "whole", *options), calls)) == 0
    # in the middle of the last file
    number = len(calls.read_text().split("\n")) * 3 // 4
    assert crashing.ended(crashing.started("kill", number, (source, output, *options))) == -signal.SIGKILL
    journal = (output / ".dsv4-convert" / "journal-1-of-1.jsonl").read_text()
    begun = [json.loads(line)["file"] for line in journal.split("\n") if "batches" in line]
    assert begun
    monkeypatch.setattr(plan, "BATCH", crashing.BATCH)
    convert(source, output, *options)
    # a file that was complete is compared with the hash in the journal
    pieces = [piece for piece in read if piece[2] is not None]
    assert {name for name, *_ in pieces} == {begun[-1]}
    for name in {name for name, *_ in pieces}:
        span, *others = read_once([piece for piece in pieces if piece[0] == name])
        assert span[0] > 0
        # scales of all matrices stand before the first weight
        assert target in ("nvfp4", "mp") or (others == [] and span[1] < (output / name).stat().st_size)
    assert files(output) == files(tmp_path / "whole")
    assert_hashes(output)


def test_work_in_another_order_is_not_continued(source, tmp_path):
    """An unfinished conversion of an earlier version, which has other batches."""
    options = (*TARGETS["bf16"], *ALONE)
    assert crashing.ended(crashing.started("kill", 30, (source, tmp_path / "out", *options))) == -signal.SIGKILL
    path = tmp_path / "out" / ".dsv4-convert" / "plan.json"
    values = json.loads(path.read_bytes())
    del values["order"]
    path.write_text(json.dumps(values))
    code, out, err = conversions.run("convert", source, tmp_path / "out", *options)
    assert (code, out, "with other options" in err) == (2, "", True)


def pieces_of(content, count, seed):
    """Begin and end of pieces that together are all of it, shuffled."""
    chooser = random.Random(seed)
    cuts = sorted(chooser.sample(range(1, len(content)), count - 1))
    pieces = list(zip([0, *cuts], [*cuts, len(content)], strict=True))
    chooser.shuffle(pieces)
    return pieces


@pytest.mark.parametrize("budget", [0, 20_000, 1 << 30])
def test_pieces_in_any_order_from_any_thread(tmp_path, budget):
    content = random.Random(1).randbytes(3 * CHUNK + 17)
    bounded = ByteBudget(budget)
    file = HashedFile(tmp_path / "file", len(content), bounded)
    with ThreadPoolExecutor(4) as pool:
        for begin, end in pieces_of(content, 300, 2):
            pool.submit(file.write, memoryview(content)[begin:end], begin)
    assert file.sha256(threading.Event()) == hashlib.sha256(content).hexdigest()
    file.close()
    assert (tmp_path / "file").read_bytes() == content
    # all that was taken is given back, and never was more taken than there was
    assert bounded.take(budget)
    assert not bounded.take(1)


@pytest.mark.parametrize("known", [(), ((0, 100),), ((0, 100), (300, 400)), ((100, 200),)])
def test_bytes_of_an_earlier_run(tmp_path, known):
    """Whether or not they are named, all that this run does not write is the earlier one's."""
    content = random.Random(3).randbytes(500)
    (tmp_path / "file").write_bytes(content[:400] + bytes(100))
    file = HashedFile(tmp_path / "file", 500, ByteBudget(1000))
    for begin, end in known:
        file.has(begin, end)
    file.write(memoryview(content)[400:], 400)
    file.write(memoryview(content)[200:300], 200)
    assert file.sha256(threading.Event()) == hashlib.sha256(content).hexdigest()
    file.close()


def test_hashing_is_called_off(tmp_path):
    budget = ByteBudget(10)
    file = HashedFile(tmp_path / "file", 20, budget)
    file.write(memoryview(bytes(10)), 10)
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        file.sha256(stop)
    file.close()
    assert budget.take(10)


def test_a_file_that_becomes_shorter_is_no_endless_read(tmp_path):
    file = HashedFile(tmp_path / "file", 20, ByteBudget(0))
    os.truncate(tmp_path / "file", 5)
    with pytest.raises(OSError, match="shorter") as failure:
        file.sha256(threading.Event())
    assert failure.value.errno == errno.EIO
    file.close()
