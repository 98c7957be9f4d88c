"""Where weights lie: one decision, for loading and for `inspect --fit`."""

from functools import cache

import pytest
import torch

from dsv4cli.engine import loading
from dsv4cli.engine.config import parse_config
from dsv4cli.engine.fit.planner import MemoryLimits, Room, Sizes, decide, least_in_host, measure, most_rows
from dsv4cli.engine.layout import Formats, TensorSpec, expected_tensors
from dsv4cli.engine.presets import FLASH, FLASH_0731, PRO
from dsv4cli.errors import NotEnoughMemory

GB, GIB = 10**9, 2**30
PRESETS = {"flash": FLASH, "pro": PRO, "flash-0731": FLASH_0731}
# free on a GPU once CUDA is there: 24 GB, H100, H200
SMALL, H100, H200 = 24 * GB, 84_500 * 10**6, 149_600 * 10**6


@cache
def table(name: str) -> list[TensorSpec]:
    return list(expected_tensors(parse_config(PRESETS[name], name), Formats()).values())


@cache
def sizes_of(name: str, ranks: int) -> Sizes:
    return measure(table(name), 6, ranks)


def test_the_drafter_is_what_a_model_without_it_lacks():
    config = parse_config(FLASH_0731, "").without_drafter()
    assert sizes_of("flash-0731", 1).main == measure(expected_tensors(config, Formats()).values(), 6, 1).total


def test_all_of_flash_on_an_h100_with_134_gb():
    """85 GB must lie in host memory; all experts, which a slot for each would put there, are 147."""
    placement = decide(sizes_of("flash", 1), Room(H100, 134 * GB))
    division = placement.division
    assert division is not None
    assert (division.rows, division.slots, division.waiting) == (116, 63, 203)
    assert placement.host == 43 * 203 * 13_369_344 <= 134 * GB * 7 // 8
    assert placement.device <= H100 - 7 * GB
    # enough memory: as many slots as rows
    assert decide(sizes_of("flash", 1), Room(H100, 400 * GB)).host == 43 * 256 * 13_369_344
    least = least_in_host(sizes_of("flash", 1), 116)
    assert round(least / GB) == 84
    assert decide(sizes_of("flash", 1), Room(H100, 0, limits=MemoryLimits(host=least))).division.slots == 6
    with pytest.raises(NotEnoughMemory, match=r"need at least 83\.93 GB of host memory, and may have 83\.93 GB"):
        decide(sizes_of("flash", 1), Room(H100, 0, limits=MemoryLimits(host=least - 1)))


def test_the_ranks_of_a_machine_share_its_memory():
    """Pro in two ranks: 411 GB each was held against the 512 GB of both."""
    with pytest.raises(NotEnoughMemory, match="of host memory by 2 ranks, and may have 448 GB"):
        decide(sizes_of("pro", 2), Room(H200, 512 * GB, 2))
    alone = decide(sizes_of("pro", 2), Room(H200, 512 * GB, 1))
    assert alone.host > 512 * GB // 2
    four = decide(sizes_of("pro", 4), Room(H200, 512 * GIB, 4))
    assert four.division is not None
    assert (four.division.rows, four.division.slots) == (243, 83)
    assert 4 * four.host <= 512 * GIB * 7 // 8


def test_a_host_that_does_not_tell_is_tried():
    assert decide(sizes_of("flash", 1), Room(SMALL, None)).division.waiting == 256
    assert decide(sizes_of("flash", 1), Room(None, None)).drafter


def test_on_a_cpu_the_ranks_need_it_together():
    sizes = sizes_of("flash", 2)
    assert decide(sizes, Room(None, 2 * sizes.total, 2)).drafter
    assert not decide(sizes, Room(None, 2 * sizes.main, 2)).drafter
    with pytest.raises(NotEnoughMemory, match=r"of 2 ranks take 158\.39 GB and cpu has 100\.00 GB free"):
        decide(sizes, Room(None, 100 * GB, 2))
    assert decide(sizes, Room(None, 100 * GB, 2, MemoryLimits(host=200 * GB))).drafter


def test_a_limit_above_the_gpu_is_refused():
    with pytest.raises(NotEnoughMemory, match=r"and 84\.5 GB of it are free"):
        decide(sizes_of("flash", 1), Room(H100, 400 * GB, limits=MemoryLimits(gpu=200 * GB)))


def test_more_memory_never_takes_rows():
    sizes = sizes_of("flash", 1)
    rows = [most_rows(sizes, most * GB) for most in range(10, 160)]
    assert rows == sorted(rows)
    assert rows[-1] == 255


def test_loading_asks_with_what_it_finds(monkeypatch):
    found = {"cuda": H100, "cpu": 134 * GB}
    monkeypatch.setattr(loading, "free_memory", lambda device: found[device.type])
    limits = MemoryLimits(host=100 * GB)
    target = loading._Target(torch.device("cuda:3"), loading.SINGLE, limits, None)
    assert target.room() == Room(H100, 134 * GB, 1, limits)
    target = loading._Target(torch.device("cpu"), loading.SINGLE, limits, None)
    assert target.room() == Room(None, 134 * GB, 1, limits)
