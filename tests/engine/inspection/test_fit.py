"""What a model takes on a device, held against what the engine allocates; the machines; the answer and its commands."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer

from dsv4cli.cli import app
from dsv4cli.commands.inspect.fit import _notes, show_fit
from dsv4cli.engine.checkpoint.layout import expected_tensors
from dsv4cli.engine.checkpoint.sharding import divides
from dsv4cli.engine.config import capacity
from dsv4cli.engine.config.presets import FLASH, PRO, TINY, shortened
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.inspection.fit import machine as machines
from dsv4cli.engine.inspection.fit.advice import advise
from dsv4cli.engine.inspection.fit.answer import answer_fit, fit_document
from dsv4cli.engine.inspection.fit.machine import CARDS, Device, Machine, parse_machine, this_machine
from dsv4cli.engine.inspection.fit.memory import weigh
from dsv4cli.engine.inspection.fit.plan import plan_fit
from dsv4cli.engine.inspection.fit.share import SharedModel
from dsv4cli.engine.inspection.report import inspect_model
from dsv4cli.engine.inspection.sources import resolve_inspectable
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.parallel.world import World
from dsv4cli.engine.runtime.batch_builder import make_batch
from dsv4cli.engine.runtime.sampling.sampler import Draws, sample
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.settings import Sampling
from dsv4cli.engine.system import host_memory
from dsv4cli.engine.weights import fill
from dsv4cli.engine.weights.load import build_random
from dsv4cli.engine.weights.reference_step import WidestStep
from dsv4cli.engine.weights.reserve import Workload, cache_bytes
from dsv4cli.errors import CheckpointError, UnsupportedHardware, UsageError
from dsv4cli.kernels import alike, card, rows
from dsv4cli.kernels.attention import ref as attention_ref
from dsv4cli.kernels.block_scale import ref as block_scale_ref
from dsv4cli.kernels.block_scale.ref import unpack_e2m1, widen_e4m3
from dsv4cli.kernels.dispatch import use
from dsv4cli.kernels.experts import one_tile
from dsv4cli.kernels.gemm import ref as gemm_ref
from dsv4cli.kernels.indexer import ref as indexer_ref
from dsv4cli.kernels.sampling import penalize
from dsv4cli.output import Colours, Output
from tests.support import damage
from tests.support.damage import GOLDEN
from tests.support.peak import Peak
from tests.support.program import Program
from tests.support.slow import slow_except

CONFIG = parse_config(TINY, "tiny")
SMALL_FLASH = parse_config(shortened(FLASH, 4, 8), "flash")
# 10.1 GB for 8,192 tokens, of which 6.8 are weights
TWELVE_LAYERS = shortened(FLASH, 12, 16)
OFFICIAL = Formats()
GB = 10**9


def gpus(*free: float) -> Machine:
    return Machine(tuple(Device(f"cuda:{n}", "GPU", int(f * GB), int(f * GB)) for n, f in enumerate(free)), None)


def with_ram(machine: Machine, free: float) -> Machine:
    return replace(machine, cpu=Device("cpu", "RAM", int(free * GB), int(free * GB)))


def test_the_constants_are_the_engine_s():
    assert attention_ref.BLOCK == indexer_ref.BLOCK == capacity.LIST_BLOCK
    assert alike.TILE == capacity.PRODUCT_ROWS
    assert rows.ROWS_ALIKE == capacity.TILED_ROWS
    assert gemm_ref.PART == capacity.HEAD_VALUES
    assert machines.OLDEST == card.OLDEST


@pytest.mark.parametrize(
    "formats", [OFFICIAL, Formats("fp8", "fp8"), Formats("bf16", "bf16"), Formats("f32", "f32", "f32")]
)
@pytest.mark.parametrize("config", [CONFIG, SMALL_FLASH], ids=["tiny", "flash"])
def test_weights_are_cut_as_the_loader_cuts_them(config, formats):
    specs = expected_tensors(config, formats)
    for ranks in (1, 2, 3, 4, 5, 8, 16, 32):
        if divides(config, specs.values(), ranks):
            assert weigh(list(specs.values()), ranks).nbytes == fill.total_bytes(specs, World(0, ranks))


def test_the_parts_that_are_whole_on_every_rank():
    specs = list(expected_tensors(SMALL_FLASH, OFFICIAL).values())
    one, two = weigh(specs, 1), weigh(specs, 2)
    assert one.whole == two.whole
    # each tensor is whole or halved
    assert 2 * (two.nbytes - sum(two.whole.values())) == one.nbytes - sum(one.whole.values())
    assert {"norms", "router", "compressor", "indexer", "embedding"} <= one.whole.keys()
    assert not {"head", "shared experts"} & one.whole.keys()


@pytest.mark.parametrize(("batch", "context"), [(1, 1), (1, 128), (1, 129), (3, 500), (2, 4096), (9, 130)])
@pytest.mark.parametrize("config", [CONFIG, SMALL_FLASH], ids=["tiny", "flash"])
def test_the_cache_takes_what_the_engine_s_takes(config, batch, context):
    cache = Cache(config, Numerics.reference(), slots=batch)
    for _ in range(batch):
        cache.reserve(cache.allocate(), context)
    tensors = [ring.data for layer in cache.layers for ring in layer.rings()]
    tensors += [pool.data for layer in cache.layers for pool in layer.pools()]
    assert cache_bytes(config, Workload(context, batch, 2048)) == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize(
    ("load", "tokens"),
    [
        (Workload(9, 1, 2048), 9),
        (Workload(9, 3, 2048), 27),
        (Workload(5000, 2, 64), 128),
        (Workload(5000, 5, 2048), 8192),
    ],
)
def test_the_tokens_of_a_step(load, tokens):
    assert load.tokens(load.chunk) == tokens


ONE_EXPERT = {"num_experts_per_tok": 1, "n_routed_experts": 1}
NO_DRAFTER = {"num_nextn_predict_layers": 0}
# changes to the tiny model, tokens of the step, context, sequences: each makes another part of the model the widest
STEPS = {
    "attention": ({}, 128, 256, 1),
    "sorting the scores": ({}, 32, 65536, 1),
    "decoding": ({}, 1, 4096, 1),
    "many sequences": ({}, 64, 512, 8),
    "rings of many": ({}, 80, 4096, 8),
    "many heads": ({"num_attention_heads": 64}, 128, 256, 1),
    "hyper-connections": ({"hidden_size": 2048}, 64, 128, 1),
    "head": ({"vocab_size": 32768}, 16, 64, 1),
    "sampling": ({"vocab_size": 32768}, 32, 128, 32),
    "indexer": ({"index_n_heads": 64}, 128, 1024, 1),
    "queries": ({"q_lora_rank": 1024}, 64, 256, 1),
    "output": ({"o_lora_rank": 2048}, 16, 256, 1),
    # every expert has every token
    "matrices of experts": (
        {"moe_intermediate_size": 4096, "num_experts_per_tok": 3, "n_routed_experts": 3},
        64,
        64,
        1,
    ),
    "tokens of experts": (
        {"moe_intermediate_size": 8192, "num_experts_per_tok": 1, "n_routed_experts": 1},
        128,
        128,
        1,
    ),
    # few tokens have one matrix at a time too
    "experts of a tile": ({"hidden_size": 1024, "moe_intermediate_size": 1024, "num_experts_per_tok": 4}, 2, 512, 1),
    "one expert of one token": ({"moe_intermediate_size": 4096, "num_experts_per_tok": 1}, 1, 4096, 1),
    "queries of tiles": ({"num_attention_heads": 16, "q_lora_rank": 1024}, 24, 129, 8),
    "queries of a filled tile": ({"num_attention_heads": 16, "q_lora_rank": 1024}, 3, 100, 1),
    "a head in parts": ({"vocab_size": 262144}, 2, 256, 2),
    "output of tiles": ({"hidden_size": 128, "num_attention_heads": 16, "o_lora_rank": 512}, 64, 1024, 4),
}


def ready(model: Transformer, device: str, tokens: int, context: int, batch: int):
    """A step that nobody has taken yet: its sequences reach `context` with it, over a cache of zeros."""
    cache, work = Cache(model.config, model.numerics, slots=batch, device=device), []
    for _ in range(batch):
        sequence = cache.allocate()
        cache.reserve(sequence, context)
        sequence.length = context - tokens // batch
        work.append((sequence, [1] * (tokens // batch)))
    draws = Draws.of([Sampling(1.0, top_p=0.9, top_k=40)] * batch, range(batch), device)

    @torch.no_grad()
    def step() -> None:
        stepped = make_batch(cache, work)
        logits = model.logits(model(stepped, cache.layers).streams[stepped.last])
        seen = torch.zeros(logits.shape, dtype=torch.int32, device=device)
        rows, none = torch.arange(batch, device=device), torch.zeros(0, batch, dtype=torch.int64, device=device)
        sample(penalize(logits, seen, rows, none, torch.ones(3, batch, device=device)), draws)

    return step


# with matrices or sampling as the widest part, which take other memory on a GPU
ON_GPU = ("queries", "sampling", "output", "head", "one expert of one token")
CASES = [(case, False) for case in STEPS] + [(case, True) for case in ON_GPU]
FEW = [("attention", False), ("experts of a tile", False), ("sampling", False), ("queries", True)]


@pytest.mark.parametrize(("case", "on_gpu"), slow_except(FEW, CASES))
def test_workspace_bounds_what_a_step_allocates(case, on_gpu, monkeypatch):
    if on_gpu:  # its code, but for the buffers of sorting
        monkeypatch.setattr(block_scale_ref, "widen_e4m3", torch.Tensor.float)
        monkeypatch.setattr(one_tile, "suits", lambda *_: False)
    change, tokens, context, batch = STEPS[case]
    config = parse_config(TINY | {"num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4]} | change | NO_DRAFTER, "")
    step = ready(build_random(config, Numerics.reference()), "cpu", tokens, context, batch)
    # their tables stay, half a megabyte
    widen_e4m3(torch.zeros(2).to(torch.float8_e4m3fn))
    unpack_e2m1(torch.zeros(1, dtype=torch.int8))
    with Peak("cpu") as peak:
        step()
    estimate = WidestStep(config, OFFICIAL, tokens=tokens, batch=batch, context=context, on_gpu=on_gpu).peak()
    # never less than the tensors, and at most a third more: it adds up what is alive at the widest place of each part
    assert peak.most <= estimate <= 1.35 * peak.most


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "context", "batch"),
    [(1, 8192, 1), (2048, 8192, 1), (2048, 262144, 1), (512, 1048576, 1), (8192, 32768, 8), (64, 8192, 64)],
)
def test_workspace_on_a_gpu(tokens, context, batch):
    config = parse_config(shortened(FLASH, 4, 16), "flash")
    step = ready(build_random(config, Numerics.reference(), device="cuda"), "cuda", tokens, context, batch)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with use("torch"):  # the estimate adds up what the reference allocates
        step()
    peak = torch.cuda.max_memory_allocated() - before
    estimate = WidestStep(config, OFFICIAL, tokens=tokens, batch=batch, context=context, on_gpu=True).peak()
    # cuBLAS asks for a workspace of its own, which is part of the reserve
    assert peak <= estimate + 2**26
    assert estimate <= 1.35 * peak


GIB = 2**30


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("2x141GB", [141 * GIB] * 2),
        ("8x80GiB", [80 * GIB] * 8),
        ("24GB", [24 * GIB]),
        (" 1X22.5gb ", [22.5 * GIB]),
        ("0.4 GB", [int(0.4 * GIB)]),
        ("16×141GB", [141 * GIB] * 16),
        ("24GB,48GB", [24 * GIB, 48 * GIB]),
        ("H100", [81559 * 2**20]),
        ("2xh200, RTX 4090", [143771 * 2**20] * 2 + [24564 * 2**20]),
    ],
)
def test_named_gpus(text, sizes):
    named = parse_machine(text, None)
    assert [(gpu.torch_name, gpu.total) for gpu in named.gpus] == [(f"cuda:{n}", size) for n, size in enumerate(sizes)]
    assert all(0.97 < gpu.free / gpu.total < 0.99 for gpu in named.gpus)
    assert (named.cpu, named.host, named.is_here) == (None, 0, False)
    # what the advice calls them is the same machine
    called = parse_machine(",".join(gpu.label for gpu in named.gpus), None)
    assert [gpu.total for gpu in called.gpus] == sizes


def test_what_is_free_of_named_cards_is_less_than_an_idle_one_has():
    # nvidia-smi's memory.free of idle ones
    assert parse_machine("H200", None).gpus[0].free < 143156 * 2**20
    assert parse_machine("80GB", None).gpus[0].free < 81004 * 2**20
    assert {"H100", "H200", "4090"} <= CARDS.keys()


@pytest.mark.parametrize(
    "text",
    ["", "2", "2x", "0x80GB", "2x0GB", "x80GB", "2x80", "2x80TB", "2x-8GB", "²x8GB", "24GB,", "H1000", "24GB;48GB"],
)
def test_gpus_that_cannot_be(text):
    with pytest.raises(UsageError, match="--gpus cannot be") as refused:
        parse_machine(text, None)
    assert "24GB,48GB or 2xH100" in refused.value.remedy


def test_named_ram(bare_machine):
    there = parse_machine("24GB", "192GB")
    assert there.cpu == Device("cpu", "RAM", 192 * GIB, 192 * GIB * 95 // 100)
    assert (there.is_here, there.claims_ram) == (False, False)
    here = parse_machine(None, "512GB")
    assert here.cpu is not None
    assert (here.cpu.total, here.is_here, here.claims_ram) == (512 * GIB, True, True)
    assert parse_machine("8xH100", "2TB").cpu == Device("cpu", "RAM", 2048 * GIB, 2048 * GIB * 95 // 100)
    for text in ("", "0GB", "192", "lots"):
        with pytest.raises(UsageError, match="--ram cannot be"):
            parse_machine(None, text)


@pytest.fixture
def bare_machine(tmp_path, monkeypatch) -> Path:
    """A system without nvidia-smi, with 8 GiB of RAM of which 6 are free."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 8388608 kB\nMemAvailable: 6291456 kB\nHugePages_Total: 0\n")
    monkeypatch.setattr(host_memory, "MEMINFO", meminfo)
    monkeypatch.setattr(host_memory, "GROUPS", tmp_path / "groups")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    return tmp_path


def smi(folder: Path, script: str) -> None:
    path = folder / "bin" / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_machine_without_a_gpu(bare_machine):
    assert this_machine() == Machine((), Device("cpu", "RAM", 8 * 2**30, 6 * 2**30))


def test_the_gpus_that_nvidia_smi_tells_of(bare_machine):
    lines = "NVIDIA H200, 143771, 143156, 9.0", "GB10, [N/A], [N/A], 12.1", "A, B, 81559, 1000, [N/A]"
    smi(bare_machine, "; ".join(f'echo "{line}"' for line in lines))
    found = this_machine().gpus
    assert [(gpu.torch_name, gpu.name) for gpu in found] == [("cuda:0", "NVIDIA H200"), ("cuda:2", "A, B")]
    assert [(gpu.total, gpu.free) for gpu in found] == [(143771 * 2**20, 143156 * 2**20), (81559 * 2**20, 1000 * 2**20)]


def test_older_gpus_are_left_out(bare_machine, capsys):
    smi(bare_machine, 'echo "Tesla V100, 32768, 32000, 7.0"; echo "NVIDIA A100, 81920, 81000, 8.0"')
    machine = this_machine()
    assert [gpu.torch_name for gpu in machine.gpus] == ["cuda:1"]
    # CUDA numbers the faster one first
    (step,) = advise(plan_fit(CONFIG, OFFICIAL, machine, context=100, batch=1), "x")
    assert step.command.startswith("CUDA_DEVICE_ORDER=PCI_BUS_ID dsv4 run --model x --max-context 100 --device cuda:1")
    smi(bare_machine, 'echo "Tesla T4, 15360, 15000, 7.5"')
    runs, text = shown(capsys, "nano", None)
    assert runs
    assert text.startswith("nano fits this machine's RAM, but none of its GPUs\n")
    assert "cuda:0 (Tesla T4) is not used: it has compute capability 7.5, and the" in text
    # auto would take the GPU
    assert "--device cpu" in text
    _, text = shown(capsys, "nano", None, ram="16GB", as_json=True)
    assert json.loads(text)["left_out"] == [{"torch_name": "cuda:0", "name": "Tesla T4", "capability": "7.5"}]


@pytest.mark.parametrize(
    "script",
    [
        "exit 9",
        "echo No devices were found",
        "echo 'a, 1, 1, 9.0'; exit 1",
        "/bin/sleep 9; echo 'a, 81559, 1000, 9.0'",  # awaited to its end, it would name a GPU
    ],
)
def test_nvidia_smi_that_fails_or_hangs(bare_machine, monkeypatch, script):
    monkeypatch.setattr(machines, "SMI_SECONDS", 0.2)
    smi(bare_machine, script)
    assert this_machine().gpus == ()


def test_nothing_is_known_of_a_system_without_meminfo(bare_machine, monkeypatch):
    monkeypatch.setattr(host_memory, "VM_STAT", str(bare_machine / "none"))
    (bare_machine / "meminfo").unlink()
    with pytest.raises(UnsupportedHardware, match="cannot detect how much memory"):
        plan_fit(CONFIG, OFFICIAL, this_machine(), context=100, batch=1)


@pytest.mark.slow  # the plans of four numbers of ranks
def test_flash_on_eight_gpus():
    fit = plan_fit(parse_config(FLASH, "flash"), OFFICIAL, parse_machine("8xH200", None), context=8192, batch=1)
    assert [share.ranks for share in fit.shares] == [1, 2, 4, 8]
    # the published size of the checkpoint, less the drafter
    assert fit.shares[0].weights == 159_609_485_896 - 3_593_787_756
    assert fit.best is fit.shares[1]
    assert fit.best.weights == 81_015_394_376
    assert fit.best.placement.drafter
    assert fit.largest_context == 1048576
    assert fit.missing == 0


@pytest.mark.parametrize(("preset", "count", "offered"), [(FLASH, 16, [1, 2, 4, 8]), (PRO, 17, [1, 2, 4, 8])])
def test_degrees_that_do_not_divide_are_not_offered(preset, count, offered):
    config = parse_config(shortened(preset, 3, 16), "short")
    fit = plan_fit(config, OFFICIAL, parse_machine(f"{count}x1GB", None), context=8192, batch=1)
    assert [share.ranks for share in fit.shares] == offered


def test_the_emptiest_gpu_runs_it_and_the_ram_where_none_does():
    fit = plan_fit(CONFIG, OFFICIAL, with_ram(gpus(1.2, 4, 0.5), 64), context=100, batch=1)
    assert fit.best is not None
    assert fit.best.devices[0].torch_name == "cuda:1"
    fit = plan_fit(CONFIG, OFFICIAL, with_ram(gpus(0.9, 0.5), 64), context=100, batch=1)
    assert fit.best is not None
    assert fit.best.devices[0].torch_name == "cpu"


def test_the_limits_are_the_last_that_fit():
    machine, config = gpus(10), parse_config(TWELVE_LAYERS, "short")
    fit = plan_fit(config, OFFICIAL, machine, context=300_000, batch=2)
    assert 1 < fit.largest_batch < capacity.MAX_SLOTS
    assert 300_000 < fit.largest_context < config.max_position_embeddings

    def runs(context: int, batch: int) -> bool:
        return plan_fit(config, OFFICIAL, machine, context=context, batch=batch).best is not None

    assert runs(fit.largest_context, 2)
    assert not runs(fit.largest_context + 1, 2)
    assert runs(300_000, fit.largest_batch)
    assert not runs(300_000, fit.largest_batch + 1)


def test_a_shorter_chunk_where_the_default_does_not_fit():
    wide = plan_fit(SMALL_FLASH, OFFICIAL, gpus(80), context=1048576, batch=1).shares[0]
    assert wide.chunk == 8192
    machine = gpus((wide.needed - 1) / GB)
    fit = plan_fit(SMALL_FLASH, OFFICIAL, machine, context=1048576, batch=1)
    assert fit.best is not None
    assert fit.best.chunk == 4096
    assert fit.best.workspace < wide.workspace
    # loading finds it by itself
    assert advise(fit, "x")[0].command == "dsv4 run --model x --max-context 1048576 'What is 17 + 25?'"


def test_the_first_layers_that_fit():
    machine = gpus(7)
    config = parse_config(TWELVE_LAYERS, "short")
    layers = plan_fit(config, OFFICIAL, machine, context=8192, batch=1).layers
    assert layers is not None
    assert 1 <= layers < 12
    for count, fits in ((layers, True), (layers + 1, False)):
        shorter = parse_config(shortened(TWELVE_LAYERS, count, None), "shorter")
        assert (plan_fit(shorter, OFFICIAL, machine, context=8192, batch=1).best is not None) is fits


@pytest.mark.parametrize(("context", "batch"), [(0, 1), (1048577, 1), (100, 0), (100, 65)])
def test_a_load_that_the_engine_does_not_take(context, batch):
    with pytest.raises(UsageError, match=r"--max-context|--batch"):
        plan_fit(CONFIG, OFFICIAL, gpus(1), context=context, batch=batch)


def steps_of(machine: Machine, context: int = 8192, batch: int = 1, config: dict[str, object] = TWELVE_LAYERS):
    fit = plan_fit(parse_config(config, "short"), OFFICIAL, machine, context=context, batch=batch)
    return advise(fit, "my model")


RUN = "dsv4 run --model 'my model' --max-context 8192"


def test_advice_where_it_fits():
    (step,) = steps_of(gpus(5, 80), batch=4)
    assert step.command == f"{RUN} --device cuda:1 --prompts questions.jsonl"
    (step,) = steps_of(with_ram(gpus(), 80))
    assert step.command == f"{RUN} 'What is 17 + 25?'"


def test_advice_where_only_several_gpus_hold_it():
    (step,) = steps_of(gpus(7, 7))
    assert step.command == f"{RUN} --tp 2 'What is 17 + 25?'"


def test_advice_where_nothing_holds_it_says_what_would():
    host, more, fewer = steps_of(gpus(6, 6))
    assert host.why == "2 GPUs run it where 3.8 GB of host memory are free, for experts beyond theirs"
    assert host.command == "dsv4 inspect 'my model' --fit --max-context 8192 --ram 4GB"
    assert more.command == "dsv4 inspect 'my model' --fit --max-context 8192 --gpus 4x6GB"
    assert re.fullmatch(r"dsv4 convert 'my model' OUT --to official --layers 0-\d --no-mtp", fewer.command)
    # what it asks for runs it
    assert steps_of(with_ram(gpus(6, 6), 3.8))[0].command.startswith(f"{RUN} --tp 2")
    assert steps_of(gpus(6, 6, 6, 6))[0].command.startswith(f"{RUN} --tp 4")
    ram, _ = steps_of(with_ram(gpus(), 6))
    assert ram.command == "dsv4 inspect 'my model' --fit --max-context 8192 --ram 8GB"
    (last,) = steps_of(with_ram(gpus(), 3.4))[1:]
    assert last.why == "its first layer fits the RAM, for tests"


def test_more_ram_is_never_too_much():
    config = parse_config(TWELVE_LAYERS, "short")

    def runs(ram: float) -> bool:
        return plan_fit(config, OFFICIAL, with_ram(gpus(), ram), context=1048576, batch=16).best is not None

    needed = plan_fit(config, OFFICIAL, with_ram(gpus(), 1), context=1048576, batch=16).shares[-1].needed / GB
    # what the advice asks for, and from there on all
    assert [runs(needed + more / 10) for more in range(-1, 30)] == [False] + [True] * 30


@pytest.mark.parametrize(
    ("gpus", "ram", "context", "batch"),
    [("6GB", "1GB", 8192, 1), ("2x5GB", None, 8192, 16), ("5GB,6GB", "1GB", 8192, 4), ("2GB", "6GB", 1048576, 16)],
)
def test_the_machine_that_is_advised_runs_it(gpus, ram, context, batch):
    config = parse_config(TWELVE_LAYERS, "short")
    asked = advise(plan_fit(config, OFFICIAL, parse_machine(gpus, ram), context=context, batch=batch), "x")
    commands = [shlex.split(step.command) for step in asked if " inspect " in step.command]
    assert commands
    for words in commands:
        given = dict(zip(words[4::2], words[5::2], strict=True))
        machine = parse_machine(given.get("--gpus", "1GB"), given.get("--ram"))
        load = {"context": int(given["--max-context"]), "batch": int(given.get("--batch", 1))}
        assert load == {"context": context, "batch": batch}
        assert plan_fit(config, OFFICIAL, machine, **load).best is not None, words


def test_no_way_that_is_not_needed_is_advised():
    host, more, _ = steps_of(with_ram(gpus(6, 6), 1))
    assert host.why.startswith("2 GPUs run it where")
    assert more.why == "4x6GB hold it"
    host, *_ = steps_of(parse_machine("5GB,6GB", "1GB"))
    assert "--gpus 5GB,6GB --ram" in host.command
    several, one, ram = steps_of(with_ram(gpus(15, 15, 15, 15), 80), config=shortened(FLASH, 12, 64))
    assert "--tp 2" in several.command
    assert one.why.startswith("one GPU runs it")
    assert ram.why == "the RAM holds it, for the CPU"


def test_what_is_lacking_is_enough():
    config = parse_config(TWELVE_LAYERS, "short")

    def share(free: int):
        return plan_fit(config, OFFICIAL, gpus(free / GB), context=8192, batch=1).shares[0]

    needed = share(GB).needed
    assert not share(needed - 1).fits
    assert share(needed).fits


def test_the_first_layers_are_a_model_of_as_many():
    shorter = parse_config(shortened(TWELVE_LAYERS, 5, None), "shorter")
    first = SharedModel(parse_config(TWELVE_LAYERS, "short"), OFFICIAL, None).first(5)
    assert first.sizes(1) == SharedModel(shorter, OFFICIAL, None).sizes(1)


def test_advice_where_several_gpus_hold_it_with_a_smaller_load():
    shorter, _ = steps_of(gpus(7.5, 7.5), 500_000, 16)
    limit = re.fullmatch(r"with at most ([\d,]+) tokens it fits", shorter.why)
    assert limit is not None
    assert f"--max-context {limit[1].replace(',', '')} --tp 2" in shorter.command


def test_a_smaller_load_is_what_all_gpus_have_room_for():
    # two of them hold the weights, and four much longer prompts beside them
    config = parse_config(TWELVE_LAYERS, "short")
    four, two = (plan_fit(config, OFFICIAL, gpus(*[7.5] * count), context=1_000_000, batch=16) for count in (4, 2))
    assert four.best is two.best is None
    assert four.shorter is not None
    assert two.shorter is not None
    assert (four.shorter.ranks, two.shorter.ranks) == (4, 2)
    assert four.largest_context == 2 * two.largest_context
    assert four.largest_batch > two.largest_batch


def test_advice_where_host_memory_helps_a_gpu():
    config = shortened(FLASH, 12, 64)

    def steps(*free, ram):
        return steps_of(with_ram(gpus(*free), ram), config=config)

    several, one, ram = steps(15, 15, ram=80)
    assert several.command == f"{RUN} --tp 2 'What is 17 + 25?'"
    assert "stay in host memory" in one.why
    assert one.command == f"{RUN} 'What is 17 + 25?'"
    assert ram.command == f"{RUN} --device cpu 'What is 17 + 25?'"
    assert any("7.3 GB of host memory" in step.why for step in steps(12, ram=5))
    assert steps(12, ram=7.3)[0].command == f"{RUN} 'What is 17 + 25?'"
    # what is no expert has to fit: the CPU runs it
    cpu, more = steps(6, ram=80)
    assert "--device cpu" in cpu.command
    assert "--gpus 8x6GB" in more.command


def test_unlike_gpus_keep_their_numbers():
    unlike = Machine(tuple(replace(gpu, name=f"GPU {n}") for n, gpu in enumerate(gpus(5, 7, 7).gpus)), None)
    (step,) = steps_of(unlike)
    assert step.command.startswith("CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1,2 dsv4 run ")
    (step,) = steps_of(gpus(5, 7, 7))
    assert step.command.startswith("CUDA_VISIBLE_DEVICES=1,2 dsv4 run ")


def test_ram_that_the_system_does_not_tell_of_is_named_to_run_too():
    machine = replace(with_ram(gpus(15), 40), claims_ram=True)
    gpu, cpu = steps_of(machine, config=shortened(FLASH, 12, 64))
    limit = re.search(r"--host-memory (\d+)MB", gpu.command)
    fit = plan_fit(parse_config(shortened(FLASH, 12, 64), ""), OFFICIAL, machine, context=8192, batch=1)
    assert fit.best is not None
    assert limit is not None
    assert int(limit[1]) == -(-fit.best.host // 10**6)
    assert "--host-memory" in cpu.command


def test_advice_where_the_load_is_too_large():
    shorter, fewer = steps_of(gpus(14), 1048576, 8)
    assert re.search(r"--max-context \d+ (--prefill-chunk \d+ )?--prompts", shorter.command)
    assert "--max-context 1048576" in fewer.command


def test_advice_for_random_weights():
    fit = plan_fit(parse_config(TWELVE_LAYERS, "short"), OFFICIAL, gpus(6, 6), context=8192, batch=1)
    step = advise(fit, "random:flash,experts=16", is_random=True)[-1]
    assert re.fullmatch(r"dsv4 run --model random:flash,experts=16,layers=\d 'What is 17 \+ 25\?'", step.command)
    step = advise(fit, "random:flash,layers=12,seed=3", is_random=True)[-1]
    assert re.fullmatch(r"dsv4 run --model random:flash,seed=3,layers=\d .*", step.command)


def test_every_option_in_a_command_exists():
    known = {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in typer.main.get_command(app).commands.items()
    }
    seen = set()
    for machine in (gpus(5, 80), gpus(6, 6), gpus(14), with_ram(gpus(3), 9)):
        for step in steps_of(machine, 1048576, 8) + steps_of(machine):
            program, command, *words = step.command.split()
            if program == "dsv4":
                seen.add(command)
                assert {word for word in words if word.startswith("--")} <= known[command]
    assert seen == {"run", "convert", "inspect"}


SHORT = "random:flash,layers=3,experts=8"
TINY_FLASH = str(GOLDEN / "tiny-flash")


def shown(capsys, model: str, gpus: str | None, *, ram: str | None = None, batch: int = 1, as_json: bool = False):
    result = inspect_model(resolve_inspectable(model))
    answer = show_fit(Output(Colours(), as_json), result, gpus=gpus, ram=ram, context=8192, batch=batch)
    return answer, capsys.readouterr().out


@pytest.mark.parametrize("gpus", ["8x1GB", "2x192GB", "1x4GB", None])
@pytest.mark.parametrize("model", [SHORT, TINY_FLASH])
def test_the_table_fits_a_terminal(capsys, gpus, model):
    _, text = shown(capsys, model, gpus, batch=3)
    assert "needed" in text
    assert max(len(line) for line in text.splitlines() if "→" not in line and model not in line) <= 80


def test_the_answer_of_the_command(capsys):
    answer, text = shown(capsys, SHORT, "8x4GB")
    assert answer is True
    assert f"{SHORT} fits 4 GPUs together\nfor 8,192 tokens\n" in text
    assert f"→ dsv4 run --model {SHORT} --max-context 8192 --tp 4 " in text
    assert re.search(r"fits +no +no +yes", text)
    assert "Replicated on every GPU: the KV cache and these weights:" in text
    answer, text = shown(capsys, SHORT, "1x1GB")
    assert answer is False
    assert re.search(rf"{SHORT} does not fit one GPU: cuda:0 lacks \d\.\d\d GB\n", text)
    assert "largest context" not in text
    # a machine of which the RAM is named too
    assert f"{SHORT} does not fit that machine: " in shown(capsys, SHORT, "1x1GB", ram="1GB")[1]
    assert f"{SHORT} fits that machine's RAM, but none of its GPUs\n" in shown(capsys, SHORT, "1x1GB", ram="192GB")[1]
    answer, text = shown(capsys, SHORT, "1x192GB")
    assert answer is True
    assert "\nOn cuda:0 the largest context for one sequence is 1,048,576 tokens" in " ".join(text.split(" "))
    assert f"→ dsv4 run --model {SHORT} --max-context 8192 'What is 17 + 25?'\n" in text


def test_experts_in_host_memory_are_shown(capsys):
    model = "random:flash,layers=12,experts=64"
    answer, text = shown(capsys, model, "12GB", ram="24GB")
    words = " ".join(text.split())
    assert answer is True
    assert f"{model} fits cuda:0 (GPU of 12GB) with experts in host memory\n" in text
    assert re.search(r"in host memory +\d+\.\d\d GB +0 B\n", text)
    assert re.search(
        r"On cuda:0 \d\d of each layer's 64 experts fit; \d\d stay in host memory, .* with the embedding\.", words
    )
    assert "On cuda:0 drafts are off: they do not pay with experts in host memory." in words
    document = json.loads(shown(capsys, model, "12GB", ram="24GB", as_json=True)[1])
    best = document["shares"][document["best"]]
    assert best["host"] == best["placement"]["host"] > 0
    assert best["placement"]["division"]["experts"] == 64


def test_whether_drafts_are_on_is_said():
    def words(free):
        machine = Machine((Device("cuda:0", "GPU", free, free),), None, is_here=False)
        fit = plan_fit(config, OFFICIAL, machine, context=8192, batch=1)
        assert fit.best is fit.shares[0]
        assert sum(fit.whole.values()) == fit.best.whole
        return " ".join(" ".join(_notes(fit, list(fit.shares))).split())

    config = parse_config(shortened(FLASH, 3, 16), "short")
    assert "On cuda:0 drafts are on; the weights include the drafter." in words(20 * 10**9)
    # 3.2 GB of weights and 0.4 GB of the drafter
    assert "On cuda:0 drafts are off: the drafter does not fit next to the other weights." in words(52 * 10**8)
    config = config.without_drafter()
    assert "The model has no drafter, so drafts are off." in words(20 * 10**9)


def test_the_document(capsys):
    answer, text = shown(capsys, TINY_FLASH, "8x141GB", as_json=True)
    document = json.loads(text)
    assert answer is True
    assert document["schema"] == "dsv4.fit/3"
    assert document["runs"] is True
    assert document["missing"] == 0
    assert document["best"] == 0
    first = document["shares"][0]
    assert first["devices"][0]["torch_name"] == "cuda:0"
    assert first["placement"] == {
        "drafter": True,
        "division": None,
        "device": first["weights"],
        "host": 0,
        "chunk": 8192,
        "dequantized": False,
    }
    assert first["needed"] == first["weights"] + first["cache"] + first["workspace"] + first["reserve"]
    assert first["fits"] is True
    command = f"dsv4 run --model {TINY_FLASH} --max-context 8192 'What is 17 + 25?'"
    assert document["next"] == [{"why": "", "command": command}]


@pytest.mark.parametrize(
    ("option", "value"), [("--gpus", "24 GB"), ("--ram", "24 GB"), ("--max-context", "100"), ("--batch", "2")]
)
def test_what_is_asked_without_fit_is_an_error(monkeypatch, capsys, option, value):
    done = Program(monkeypatch, capsys)("inspect", TINY_FLASH, option, value)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: {option} needs --fit\n→ add it: --fit {option} {shlex.quote(value)}\n"
    assert Program(monkeypatch, capsys)("inspect", TINY_FLASH, "--fit", option, value).code == 0


def test_what_fits_and_does_not_load_does_not_run(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    damage.tensor_missing(folder)
    result = inspect_model(resolve_inspectable(str(folder)))
    answer = answer_fit(result, gpus(40), context=100, batch=1)
    assert answer.fit.best is not None
    assert answer.runs is False
    (step,) = answer.steps
    assert "dsv4 would not load it" in step.why
    assert "q_norm.weight is missing" in step.why
    assert fit_document(answer)["runs"] is False


def test_a_folder_that_does_not_tell_its_dimensions(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    damage.config_missing(folder)
    result = inspect_model(resolve_inspectable(str(folder)))
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        answer_fit(result, gpus(40), context=100, batch=1)


def test_a_single_file_is_no_model():
    result = inspect_model(resolve_inspectable(f"{TINY_FLASH}/model-00001-of-00003.safetensors"))
    with pytest.raises(UsageError, match="a part of a model"):
        answer_fit(result, gpus(40), context=100, batch=1)


def test_nothing_of_it_loads_torch():
    code = "import sys; from dsv4cli.engine.inspection.consumers import examine; "
    code += (
        "from dsv4cli.engine.inspection.fit import answer; sys.exit(bool({'torch', 'transformers'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0
