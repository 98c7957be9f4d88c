"""Where weights lie: one decision, for loading and for `inspect --fit`."""

import shlex
from dataclasses import replace
from functools import cache

import pytest
import torch
import typer

from dsv4cli.cli import app
from dsv4cli.commands.offload_report import memory_limits
from dsv4cli.engine.checkpoint.layout import TensorSpec, expected_tensors
from dsv4cli.engine.config.capacity import divides_from
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.presets import FLASH, FLASH_0731, PRO
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.inspection.fit import share as sharing
from dsv4cli.engine.inspection.fit.advice import run_command
from dsv4cli.engine.inspection.fit.machine import Machine, parse_machine
from dsv4cli.engine.inspection.fit.plan import plan_fit
from dsv4cli.engine.parallel.world import World
from dsv4cli.engine.settings import Drafting, parse_drafting
from dsv4cli.engine.weights import load
from dsv4cli.engine.weights.placement import (
    FreeMemory,
    MemoryLimits,
    Placement,
    decide,
    least_in_host,
    least_on_gpu,
    most_rows,
)
from dsv4cli.engine.weights.reserve import CHUNKS, Reserve, Workload
from dsv4cli.engine.weights.sizes import RankSizes, measure
from dsv4cli.errors import NotEnoughMemory

GB, GIB = 10**9, 2**30
PRESETS = {"flash": FLASH, "pro": PRO, "flash-0731": FLASH_0731}
# free on a GPU once CUDA is there: 24 GB, H100, H200
SMALL, H100, H200 = 24 * GB, 84_500 * 10**6, 149_600 * 10**6


EMBEDDING = 129_280 * 4096 * 2
# beside weights
SEVEN = (Reserve(4096, 0, 7 * GB),)


@cache
def tensors(config: ModelConfig, formats: Formats) -> dict[str, TensorSpec]:
    return expected_tensors(config, formats)


@cache
def table(name: str) -> list[TensorSpec]:
    return list(tensors(parse_config(PRESETS[name], name), Formats()).values())


@cache
def sizes_of(name: str, ranks: int) -> RankSizes:
    return measure(table(name), 6, ranks)


@pytest.mark.slow
def test_the_drafter_is_what_a_model_without_it_lacks():
    config = parse_config(FLASH, "flash").without_drafter()
    assert sizes_of("flash", 1).main == measure(tensors(config, Formats()).values(), 6, 1).total


def test_all_of_flash_on_an_h100_with_134_gb():
    """84 GB must lie in host memory, with the embedding; all experts, which slots for each would put there, are 147."""
    placement = decide(sizes_of("flash", 1), FreeMemory(H100, 134 * GB), SEVEN)
    division = placement.division
    assert division is not None
    assert (division.rows, division.slots, division.offloaded) == (118, 64, 202)
    assert placement.host == 43 * 202 * 13_369_344 + EMBEDDING <= 134 * GB * 7 // 8
    assert placement.device <= H100 - 7 * GB
    # enough memory: as many slots as rows
    assert decide(sizes_of("flash", 1), FreeMemory(H100, 400 * GB), SEVEN).host == 43 * 256 * 13_369_344 + EMBEDDING
    least = least_in_host(sizes_of("flash", 1), 118)
    assert round(least / GB) == 84
    assert decide(sizes_of("flash", 1), FreeMemory(H100, 0, limits=MemoryLimits(host=least)), SEVEN).division.slots == 6
    with pytest.raises(NotEnoughMemory, match=r"need at least 83\.84 GB of host memory, but only 83\.84 GB"):
        decide(sizes_of("flash", 1), FreeMemory(H100, 0, limits=MemoryLimits(host=least - 1)), SEVEN)


# one rank's part of Pro, by their number
PRO_SIZES = {
    2: RankSizes(
        435_122_710_072, 7_042_790_860, 61, 384, 17_547_264, 6, 1_853_358_080, 3_229_005_289_528, 52_320_116_172
    ),
    4: RankSizes(
        220_331_668_760, 3_585_892_444, 61, 384, 8_773_632, 6, 1_853_358_080, 1_621_248_796_440, 26_403_506_268
    ),
}


def test_the_ranks_of_a_machine_share_its_memory():
    """Pro in two ranks: 411 GB each was held against the 512 GB of both."""
    with pytest.raises(NotEnoughMemory, match="of host memory for 2 ranks, but only 448 GB"):
        decide(PRO_SIZES[2], FreeMemory(H200, 512 * GB, 2), SEVEN)
    alone = decide(PRO_SIZES[2], FreeMemory(H200, 512 * GB, 1), SEVEN)
    assert alone.host > 512 * GB // 2
    four = decide(PRO_SIZES[4], FreeMemory(H200, 512 * GIB, 4), SEVEN)
    assert four.division is not None
    assert (four.division.rows, four.division.slots) == (246, 83)
    assert 4 * four.host <= 512 * GIB * 7 // 8


def test_a_host_that_does_not_tell_is_tried():
    assert decide(sizes_of("flash", 1), FreeMemory(SMALL, None), SEVEN).division.offloaded == 256
    assert decide(sizes_of("flash", 1), FreeMemory(None, None), SEVEN).drafter


def test_on_a_cpu_the_ranks_need_it_together():
    sizes = sizes_of("flash", 2)
    roomy = 2 * (sizes.total + 7 * GB)
    assert decide(sizes, FreeMemory(None, roomy, 2), SEVEN).drafter
    # a cache and a step need room beside it
    assert not decide(sizes, FreeMemory(None, roomy - 2, 2), SEVEN).drafter
    assert not decide(sizes, FreeMemory(None, 2 * sizes.main, 2), SEVEN).drafter
    assert decide(sizes, FreeMemory(None, 2 * sizes.total, 2), SEVEN, Drafting(3)).drafter
    with pytest.raises(NotEnoughMemory, match=r"of 2 ranks take 158\.39 GB and cpu has 100\.00 GB free"):
        decide(sizes, FreeMemory(None, 100 * GB, 2), SEVEN)
    assert decide(sizes, FreeMemory(None, 100 * GB, 2, MemoryLimits(host=200 * GB)), SEVEN).drafter
    limit = r"of 2 ranks take 158\.39 GB of host memory, and --host-memory allows 9\.00 GB"
    with pytest.raises(NotEnoughMemory, match=limit) as caught:
        decide(sizes, FreeMemory(None, 200 * GB, 2, MemoryLimits(host=9 * GB)), SEVEN)
    assert caught.value.remedy.startswith("raise --host-memory; ")


FLASH_TOTAL, FLASH_MAIN = 159_609_485_896, 159_609_485_896 - 3_593_787_756
ROOMY, TIGHT = FLASH_TOTAL + 7 * GB, FLASH_TOTAL + 7 * GB - 1


@pytest.mark.parametrize(
    ("gpu", "most", "drafter"),
    [(ROOMY, None, True), (ROOMY, 3, True), (ROOMY, 0, False), (TIGHT, None, False), (TIGHT, 0, False)],
)
def test_the_drafter_is_loaded_where_it_is_used_and_fits(gpu, most, drafter):
    placement = decide(sizes_of("flash", 1), FreeMemory(gpu, 400 * GB), SEVEN, Drafting(most))
    assert placement == Placement(drafter, None, FLASH_TOTAL if drafter else FLASH_MAIN)


def test_a_drafter_that_is_asked_for_and_finds_no_room():
    with pytest.raises(NotEnoughMemory, match=r"^the drafter takes 3\.594 GB and does not fit") as error:
        decide(sizes_of("flash", 1), FreeMemory(TIGHT, 400 * GB), SEVEN, Drafting(3))
    assert "--draft off" in error.value.remedy
    with pytest.raises(NotEnoughMemory, match=r"^the drafter takes"):
        decide(sizes_of("flash", 1), FreeMemory(None, FLASH_TOTAL - 1), SEVEN, Drafting(3))
    with pytest.raises(NotEnoughMemory, match=r"^the weights take 156\.02 GB"):  # it is not the drafter's fault
        decide(sizes_of("flash", 1), FreeMemory(None, 100 * GB), SEVEN, Drafting(3))


def test_beside_experts_in_host_memory_it_is_loaded_only_if_asked_for():
    sizes, room = sizes_of("flash", 1), FreeMemory(H100, 400 * GB)
    without = decide(sizes, room, SEVEN)
    assert (without.drafter, without.division.rows) == (False, 118)
    assert decide(sizes, room, SEVEN, Drafting(0)) == without
    beside = decide(sizes, room, SEVEN, Drafting(3))
    assert (beside.drafter, beside.division.rows) == (True, 111)
    assert beside.device <= H100 - 7 * GB
    # room for what lies there in any case, for six experts of each layer, and for nothing else
    least = least_on_gpu(sizes)
    assert decide(sizes, FreeMemory(None, None, limits=MemoryLimits(gpu=least)), SEVEN).division.rows == 6
    with pytest.raises(NotEnoughMemory, match=r"^the drafter takes"):
        decide(sizes, FreeMemory(None, None, limits=MemoryLimits(gpu=least)), SEVEN, Drafting(1))


@pytest.mark.parametrize("most", [None, 0])
def test_a_model_without_a_drafter_has_none_to_load(most):
    sizes = replace(sizes_of("flash", 1), total=FLASH_MAIN, drafter=0)
    assert decide(sizes, FreeMemory(ROOMY, 400 * GB), SEVEN, Drafting(most)) == Placement(False, None, FLASH_MAIN)


def test_a_limit_above_the_gpu_is_refused():
    with pytest.raises(NotEnoughMemory, match=r"but only 84\.5 GB are free"):
        decide(sizes_of("flash", 1), FreeMemory(H100, 400 * GB, limits=MemoryLimits(gpu=200 * GB)), SEVEN)


def test_more_memory_never_takes_rows():
    sizes = sizes_of("flash", 1)
    rows = [most_rows(sizes, most * GB) for most in range(10, 160)]
    assert rows == sorted(rows)
    assert rows[-1] == 255


ROOM = (Reserve(8192, 0, 20 * GB), Reserve(4096, 0, 10 * GB), Reserve(1024, 0, 5 * GB), Reserve(64, 0, GB))


@pytest.mark.parametrize(
    ("gpu", "drafter", "chunk"),
    [
        (FLASH_TOTAL + 20 * GB, True, 8192),
        (FLASH_TOTAL + 20 * GB - 1, True, 4096),
        (FLASH_TOTAL + 5 * GB, True, 1024),
        # a drafter is not worth chunks of 64, weights that lie on the GPU are
        (FLASH_TOTAL + 5 * GB - 1, False, 1024),
        (FLASH_MAIN + GB, False, 64),
    ],
)
def test_chunks_are_as_large_as_there_is_room_beside_all_weights(gpu, drafter, chunk):
    found = decide(sizes_of("flash", 1), FreeMemory(gpu, 400 * GB), ROOM)
    assert (found.division, found.drafter, found.chunk) == (None, drafter, chunk)


def test_chunks_beside_experts_in_host_memory_are_not_the_largest():
    sizes = sizes_of("flash", 1)
    found = decide(sizes, FreeMemory(H100, 400 * GB), ROOM)
    assert (found.division.rows, found.chunk) == (most_rows(sizes, H100 - 10 * GB), 4096)
    least = least_on_gpu(sizes)
    assert decide(sizes, FreeMemory(least + 10 * GB, 400 * GB), ROOM).chunk == 4096
    assert decide(sizes, FreeMemory(least + 10 * GB - 1, 400 * GB), ROOM).chunk == 1024
    with pytest.raises(NotEnoughMemory, match="not enough for the weights"):
        decide(sizes, FreeMemory(least + GB - 1, 400 * GB), ROOM)
    # whoever says how many bytes of weights there may be gets them, with the chunk that has room beside them
    limits = MemoryLimits(gpu=70 * GB)
    assert decide(sizes, FreeMemory(80 * GB, 400 * GB, limits=limits), ROOM).chunk == 4096
    assert decide(sizes, FreeMemory(75 * GB, 400 * GB, limits=limits), ROOM).chunk == 1024


def test_a_chunk_that_is_asked_for_is_kept():
    for gpu in (FLASH_TOTAL + 20 * GB, H100, None):
        assert decide(sizes_of("flash", 1), FreeMemory(gpu, 400 * GB), ROOM[:1]).chunk == 8192


@pytest.mark.parametrize("drafting", ["auto", "off", "3"])
def test_a_cpu_reads_prompts_in_small_chunks(drafting):
    beside = tuple(Reserve(chunk, 0, GB) for chunk in CHUNKS)
    found = decide(sizes_of("flash", 1), FreeMemory(None, 400 * GB), beside, parse_drafting(drafting))
    assert (found.chunk, found.drafter) == (512, drafting != "off")


def test_loading_asks_with_what_it_finds(monkeypatch):
    found = {"cuda": H100, "cpu": 134 * GB}
    monkeypatch.setattr(load, "free_memory", lambda device: found[device.type])
    limits = MemoryLimits(host=100 * GB)
    target = load._Target(torch.device("cuda:3"), load.SINGLE, limits, None)
    assert target.least_free_memory() == FreeMemory(H100, 134 * GB, 1, limits)
    target = load._Target(torch.device("cpu"), load.SINGLE, limits, None)
    assert target.least_free_memory() == FreeMemory(None, 134 * GB, 1, limits)


# GPUs and RAM; the best way to run all of Flash there, and all of Pro: ranks, + with experts in host memory
MACHINES = [
    ("24GB", "192GB", "1+", ""),
    ("H100", "141GB", "1+", ""),
    ("H200", "32GB", "1+", ""),
    ("2xH100", None, "2", ""),
    ("24GB,48GB", "192GB", "2+", ""),
    ("8xH100", "2000GB", "2", "8+"),
    ("4xH200", "512GB", "2", "4+"),
    ("2xH200", "512GB", "2", ""),
    (None, "1000GB", "cpu", "cpu"),
]


def loaded_on(machine: Machine, config: ModelConfig, devices, limits: MemoryLimits, patch):
    """What loading decides on devices of a machine, None where it refuses."""
    device, ranks = devices[0], len(devices)
    own = machine.host - (0 if devices[0].is_gpu else sharing.CPU_RESERVE)
    free = {"cuda": min(one.free for one in devices) - sharing.CUDA_CONTEXT, "cpu": own}
    patch.setattr(load, "free_memory", lambda device: free[device.type])
    # as GPUs that see each other's memory have it
    world = World(0, ranks, None, ranks, divides_from=divides_from(ranks))
    target = load._Target(torch.device(device.torch_name), world, limits, None, load=Workload(8192))
    try:
        return load._placed(config, Formats(), target)
    except NotEnoughMemory:
        return None


def asked_with(command: str) -> tuple[int, str, MemoryLimits]:
    """Ranks, device and memory that `dsv4 run` reads from a command."""
    words = shlex.split(command)
    words = words[words.index("dsv4") :]
    run = typer.main.get_command(app).commands["run"]
    values = run.make_context("run", words[2:]).params
    assert (
        parse_drafting(values["draft"]) == load._Target(torch.device("cpu"), load.SINGLE, MemoryLimits(), None).drafting
    )
    return values["tp"] or 1, values["device"], memory_limits(values["gpu_memory"], values["host_memory"])


@pytest.mark.parametrize(
    "name", ["flash", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pro", "flash-0731"))]
)
def test_fit_and_loading_decide_the_same(name, monkeypatch):
    assert name != "pro" or {ranks: sizes_of(name, ranks) for ranks in PRO_SIZES} == PRO_SIZES
    sizes = cache(lambda count, chosen, ranks: sizes_of(name, ranks))
    for module in (sharing, load):
        monkeypatch.setattr(module, "loaded_tensors", tensors)
        monkeypatch.setattr(module, "measure", lambda specs, chosen, ranks: sizes(len(specs), chosen, ranks))
    monkeypatch.setattr(World, "least", lambda world, numbers: numbers)
    monkeypatch.setattr(World, "broadcast_object", lambda world, value: value)
    config = parse_config(PRESETS[name], name)
    for gpus, ram, flash, pro in MACHINES:
        machine = parse_machine(gpus, ram) if gpus else Machine((), parse_machine("1GB", ram).cpu)
        fit = plan_fit(config, Formats(), machine, context=8192, batch=1)
        for share in fit.shares:
            found = loaded_on(machine, config, share.devices, MemoryLimits(), monkeypatch)
            assert (found and found[2]) == share.placement, (gpus, ram, share)
        best = "" if fit.best is None else f"{fit.best.ranks}{'+' * (fit.best.host > 0)}" if fit.best.on_gpu else "cpu"
        assert best == (pro if name == "pro" else flash), (gpus, ram)
        for share in filter(None, (fit.best, *fit.others)):
            ranks, device, limits = asked_with(run_command(fit, share, name, 8192, 1))
            assert ranks == share.ranks
            assert device in ("auto", share.devices[0].torch_name)
            found = loaded_on(machine, config, share.devices, limits, monkeypatch)
            assert found is not None
            assert (found[2], found[0].draft_stages > 0) == (share.placement, share.placement.drafter)
