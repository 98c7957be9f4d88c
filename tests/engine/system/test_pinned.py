"""Host memory that is there before it is used."""

import os
from mmap import PAGESIZE

import pytest

from dsv4cli.engine.system import pinned
from dsv4cli.engine.system.pinned import PageFaulter, host_block


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGESIZE


@pytest.mark.skipif(tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14), reason="Linux has it since 5.14")
def test_pages_are_there_before_their_use_and_hold_what_they_held(monkeypatch):
    monkeypatch.setattr(pinned, "POPULATED_AT_ONCE", 1 << 22)
    block = host_block(1 << 25, "a test", "")
    block[: 1 << 20] = 7
    populating, before = PageFaulter(block), resident()
    populating.want(1 << 24)
    populating._thread.join()
    assert populating.nbytes == 1 << 24
    assert 3 << 22 < resident() - before < 5 << 22
    assert block.sum() == 7 << 20
    populating.want(1 << 30)  # more than there is
    populating._thread.join()
    assert populating.nbytes == 1 << 25
    assert block.sum() == 7 << 20
