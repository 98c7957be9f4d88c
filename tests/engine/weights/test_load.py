"""From tensors to a filled model: strict both ways, the same at every number of ranks, and in little memory."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import get_ident
from zlib import crc32

import pytest
import torch

from dsv4cli.engine.checkpoint.layout import TensorSpec, expected_tensors
from dsv4cli.engine.checkpoint.sharding import part_shape
from dsv4cli.engine.checkpoint.source import FolderSource, RandomSource, resolve_model
from dsv4cli.engine.config.presets import FLASH, PRESETS, TINY, shortened
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.model.linear import RMSNorm
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.parallel.world import SINGLE, World
from dsv4cli.engine.runtime.batch_builder import make_batch
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.settings import Drafting
from dsv4cli.engine.weights.fill import allocate, fill, local_slice, made
from dsv4cli.engine.weights.load import build_random, load_model
from dsv4cli.engine.weights.random_weights import PATTERN, random_tensors
from dsv4cli.errors import CheckpointError, UsageError
from dsv4cli.kernels.block_scale import dequantise
from tests.support.golden_data import FOLDER
from tests.support.synthetic import write_holes

ROOT = Path(__file__).parents[3]
SMALL = parse_config(shortened(TINY, 3, 2) | {"vocab_size": 64}, "test")
# every dimension that ranks cut is a multiple of four blocks of 128
WIDE = parse_config(shortened(TINY, 3, 2) | {"vocab_size": 64, "o_groups": 4, "moe_intermediate_size": 512}, "test")
THIN_FLASH = {"vocab_size": 256, "hidden_size": 128, "num_attention_heads": 4, "head_dim": 128, "q_lora_rank": 128}
THIN_FLASH |= {"o_lora_rank": 64, "o_groups": 2, "n_routed_experts": 8, "moe_intermediate_size": 128}
THIN_FLASH |= {"index_n_heads": 4, "index_topk": 16}
SCALE = "layers.1.attn.wq_b.scale"
TABLE = "layers.0.ffn.gate.tid2eid"


@pytest.mark.parametrize("preset", ["tiny", "flash-0731"])
def test_every_norm_has_the_epsilon_of_norms(preset):
    """Those of the drafters too; hyper-connections have one of their own."""
    values = shortened(PRESETS[preset], 3, 6) | {"rms_norm_eps": 0.01, "hc_eps": 0.03}
    norms = {
        name: one
        for name, one in Transformer(parse_config(values, "test"), Numerics.plain()).named_modules()
        if isinstance(one, RMSNorm)
    }
    assert {one.eps for one in norms.values()} == {0.01}
    assert any(name.startswith("mtp.") for name in norms)


Pairs = list[tuple[TensorSpec, torch.Tensor]]


@cache
def drawn() -> tuple[tuple[TensorSpec, torch.Tensor], ...]:
    return tuple(random_tensors(expected_tensors(SMALL, Formats()).values(), 0, SMALL.n_routed_experts))


def pairs() -> Pairs:
    """All tensors; nobody writes into them."""
    return list(drawn())


def filled(tensors: Pairs, specs: dict[str, TensorSpec] | None = None) -> Transformer:
    model = Transformer(SMALL, Numerics.reference())
    fill(model, specs or expected_tensors(SMALL, Formats()), made(tensors), device="cpu", world=SINGLE)
    return model


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Pairs:
    return [(spec, change(tensor) if spec.name == name else tensor) for spec, tensor in pairs()]


def with_nan_byte(scale: torch.Tensor) -> torch.Tensor:
    scale = scale.clone()
    scale.view(torch.uint8)[-1, -1] = 255
    return scale


def last_row_too_large(table: torch.Tensor) -> torch.Tensor:
    table = table.clone()
    table[-1, -1] = SMALL.n_routed_experts
    return table


# what comes -> words of the error
DAMAGED = {
    "missing": (lambda: [pair for pair in pairs() if pair[0].name != "norm.weight"], "norm.weight"),
    "one expert missing": (
        lambda: [pair for pair in pairs() if pair[0].name != "layers.2.ffn.experts.1.w2.weight"],
        r"1 tensors are missing.*layers\.2\.ffn\.experts\.1\.w2\.weight",
    ),
    "scale missing": (lambda: [pair for pair in pairs() if pair[0].name != SCALE], SCALE),
    "extra": (lambda: [*pairs(), (replace(pairs()[0][0], name="ghost"), torch.zeros(1))], "ghost is not a tensor"),
    "twice": (lambda: [*pairs(), pairs()[3]], "was loaded twice"),
    "transposed": (lambda: changed("layers.0.hc_attn_fn", lambda tensor: tensor.T), r"hc_attn_fn is .*\[1024, 24\]"),
    "flat": (lambda: changed("norm.weight", lambda tensor: tensor[:1]), r"norm.weight is .*\[1\], expected .*\[256\]"),
    "wider type": (lambda: changed("norm.weight", torch.Tensor.float), "norm.weight is torch.float32"),
    "bytes for e8m0": (
        lambda: changed(SCALE, lambda tensor: tensor.view(torch.uint8)),
        "expected torch.float8_e8m0fnu",
    ),
    "expert -1": (lambda: changed(TABLE, lambda tensor: tensor.index_fill(1, torch.tensor([1]), -1)), "row 0, .*, -1"),
    "an expert too many": (
        lambda: changed(TABLE, last_row_too_large),
        r"row 63, \[0, 2\], names an expert that does not exist",
    ),
    "scale byte 255": (lambda: changed(SCALE, with_nan_byte), f"{SCALE} holds the scale byte 255"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_fill_refuses(damage):
    make, words = DAMAGED[damage]
    with pytest.raises(CheckpointError, match=words):
        filled(make())


def test_fill_takes_what_is_complete():
    by_name = dict(filled(pairs()).named_parameters())
    for spec, tensor in pairs():
        stored = by_name[spec.parameter] if spec.expert is None else by_name[spec.parameter][spec.expert]
        assert torch.equal(stored.view(torch.uint8), tensor.view(torch.uint8)), spec.name


def test_memory_that_loading_to_a_gpu_needed_is_returned(monkeypatch):
    order = list[str]()

    def supply(destinations):
        yield from made(pairs())(destinations)
        order.append("loaded")

    def on_a_cpu(model, specs, device, world):
        return allocate(model, specs, torch.device("cpu"), world)

    monkeypatch.setattr("dsv4cli.engine.weights.fill.allocate", on_a_cpu)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("returned"))
    for device in ("cpu", "cuda"):
        model = Transformer(SMALL, Numerics.reference())
        fill(model, expected_tensors(SMALL, Formats()), supply, device=device, world=SINGLE)
    assert order == ["loaded", "loaded", "returned"]


def test_fill_refuses_a_table_of_another_model():
    specs = expected_tensors(SMALL, Formats())
    lacking = {name: spec for name, spec in specs.items() if name != "layers.2.ffn.gate.bias"}
    with pytest.raises(CheckpointError, match=r"fills the parameter layers\.2\.ffn\.gate\.bias"):
        filled([], lacking)
    ghost = replace(specs["norm.weight"], name="norm.bias", parameter="norm.bias")
    with pytest.raises(CheckpointError, match=r"no parameter norm\.bias"):
        filled([], specs | {"norm.bias": ghost})


@pytest.mark.parametrize("preset", PRESETS)
def test_table_and_model_name_the_same_parameters(preset):
    # every layer and a few experts, which are parts of one parameter
    config = parse_config(shortened(PRESETS[preset], None, 8), preset)
    named = {spec.parameter for spec in expected_tensors(config, Formats()).values()}
    modules = Transformer(config, Numerics.reference()).named_modules()
    parameters = {
        f"{path}.{key}".lstrip("."): value for path, module in modules for key, value in module._parameters.items()
    }
    assert named <= set(parameters)
    # a scale may stay None: some matrices are stored without
    assert {name for name, value in parameters.items() if value is not None} <= named


def test_random_tensors_follow_name_and_seed():
    # every seventh: some of each kind
    specs = dict(list(expected_tensors(SMALL, Formats()).items())[::7])
    first = {spec.name: tensor for spec, tensor in random_tensors(specs.values(), 5, 2)}
    backwards = {spec.name: tensor for spec, tensor in random_tensors(reversed(specs.values()), 5, 2)}
    other = {spec.name: tensor for spec, tensor in random_tensors(specs.values(), 6, 2)}
    for name, tensor in first.items():
        assert torch.equal(tensor.view(torch.uint8), backwards[name].view(torch.uint8)), name
        assert (tensor.dtype, tensor.shape) == (backwards[name].dtype, specs[name].shape)
    # a scale of one block has only three values to choose from
    large = [name for name, tensor in first.items() if tensor.numel() > 16]
    assert not any(torch.equal(first[name].view(torch.uint8), other[name].view(torch.uint8)) for name in large)


def test_random_tensors_are_one_pattern_from_places_that_their_names_give():
    count = PATTERN
    wanted = (("one", count + 7), ("other", count), ("one", 100), ("other", 100))
    specs = [TensorSpec(name, "F32", (size,), "", size) for name, size in wanted]
    one, other, *beginnings = (tensor for _, tensor in random_tensors(specs, 5, 2))
    assert torch.equal(one[count:], one[:7])
    assert not torch.equal(one[:count], other)
    assert torch.equal(one[:count].roll(crc32(b"one") % count - crc32(b"other") % count), other)
    assert all(torch.equal(small, large[:100]) for small, large in zip(beginnings, (one, other), strict=True))


@pytest.mark.parametrize(
    "values",
    [
        TINY,
        pytest.param(FLASH | THIN_FLASH, marks=pytest.mark.slow),
        pytest.param(PRESETS["flash-0731"] | THIN_FLASH | {"dspark_noise_token_id": 255}, marks=pytest.mark.slow),
    ],
    ids=["random:tiny", "43 thin layers", "43 thin layers of 0731"],
)
def test_random_models_are_well_scaled(values):
    config = parse_config(values, "test")
    model = load_model(RandomSource("test", config, 1), Numerics.reference())
    cache = Cache(config, model.numerics)
    batch = make_batch(cache, [(cache.allocate(), torch.randint(config.vocab_size, (140,)).tolist())])
    streams = model.embed(batch.ids)[:, None].expand(-1, config.hc_mult, -1)
    for number, layer in enumerate(model.layers):
        streams = layer(streams, batch, cache.layers[number]).connect_post()
        assert 1e-2 < streams.float().square().mean().sqrt() < 1e2, f"block {number}"
    logits = model.logits(streams)
    assert logits.isfinite().all()
    # distinct rows, and no token certain
    assert logits.std(0).mean() > 1e-2
    assert logits.softmax(-1).amax(-1).mean() < 0.9


@pytest.mark.parametrize(("most", "drafter"), [(None, "mtp"), (3, "mtp"), (0, "none")])
@pytest.mark.parametrize("name", ["nano", "random:tiny,layers=1"])
def test_the_drafter_is_loaded_unless_drafts_are_off(name, most, drafter):
    model = load_model(resolve_model(name), Numerics.reference(), drafting=Drafting(most))
    assert model.config.drafter == drafter
    assert (dict(model.named_parameters()).keys() >= {"mtp.0.norm.weight"}) is (drafter == "mtp")


def test_drafts_that_are_asked_of_a_model_without_a_drafter_are_refused():
    bare = RandomSource("bare", parse_config(shortened(TINY, 1, 8), "bare").without_drafter(), 1)
    with pytest.raises(UsageError, match=r"^bare has no drafter, and --draft 3 needs one$") as error:
        load_model(bare, Numerics.reference(), drafting=Drafting(3))
    assert "leave out --draft" in error.value.remedy
    assert load_model(bare, Numerics.reference(), drafting=Drafting(None)).config.drafter == "none"


@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_the_ranks_are_the_whole(size):
    stored = dict(random_tensors(expected_tensors(WIDE, Formats()).values(), 0, WIDE.n_routed_experts))
    by_name = {spec.name: (spec, tensor) for spec, tensor in stored.items()}

    def parts(name: str) -> list[torch.Tensor]:
        spec, tensor = by_name[name]
        cut = [tensor[local_slice(spec, World(rank, size))] for rank in range(size)]
        assert {part.shape for part in cut} == {part_shape(spec, size)}
        return cut

    for name, (spec, tensor) in by_name.items():
        if spec.is_scale:
            continue
        scale = name.removesuffix("weight") + "scale"
        cut, whole = parts(name), tensor
        if scale in by_name:  # a part must be right together with its part of the scale
            cut = [dequantise(part, factor) for part, factor in zip(cut, parts(scale), strict=True)]
            whole = dequantise(tensor, by_name[scale][1])
        if spec.shard is None:
            assert all(torch.equal(part, whole) for part in cut), name
        else:
            assert torch.equal(torch.cat(cut, spec.shard), whole), name


def test_a_rank_loads_its_part_of_a_folder(monkeypatch):
    monkeypatch.setattr(World, "least", lambda world, numbers: numbers)  # there is no other rank
    monkeypatch.setattr(World, "broadcast_object", lambda world, value: value)
    source, numerics = resolve_model("nano"), Numerics.reference()
    whole = dict(load_model(source, numerics).named_parameters())
    cut = {"attn.wq_b": 0, "attn.wo_b": 1, "ffn.experts.w2": 2, "ffn.shared_experts.w1": 0, "ffn.shared_experts.w2": 1}
    for rank in range(2):
        part = dict(load_model(source, numerics, world=World(rank, 2)).named_parameters())
        for name, dimension in cut.items():
            key = f"layers.2.{name}.weight"
            half = whole[key].view(torch.uint8).chunk(2, dimension)[rank]
            assert torch.equal(part[key].view(torch.uint8), half), key


def test_progress_grows_from_nothing_to_all():
    seen = []
    source = FolderSource("tiny-flash", FOLDER / "tiny-flash")
    model = load_model(source, Numerics.reference(), progress=lambda *now: seen.append((*now, get_ident())))
    size = model.stored_bytes
    assert size == source.identity.checkpoint.nbytes
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == ((0, size, get_ident()), (size, size, get_ident()))
    assert {who for _, _, who in seen} == {get_ident()}


def test_indivisible_is_refused():
    with pytest.raises(UsageError, match=r"num_attention_heads = 4 is not divisible by 3 ranks"):
        Transformer(SMALL, Numerics.reference(), World(0, 3))
    spec = expected_tensors(SMALL, Formats())["layers.1.attn.wq_b.scale"]
    with pytest.raises(CheckpointError, match=r"wq_b\.scale .* cannot be split across 8 ranks"):
        part_shape(spec, 8)
    # 192 rows are two scale blocks: two ranks would share the first
    uneven = replace(expected_tensors(SMALL, Formats())["layers.1.attn.wo_a.weight"], shape=(192, 128))
    with pytest.raises(CheckpointError, match=r"wo_a\.weight .* cannot be split across 2 ranks"):
        part_shape(uneven, 2)


LOAD = """
import sys
from pathlib import Path
from dsv4cli.engine.weights import placement
from dsv4cli.engine.weights.load import load_model
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.checkpoint.source import FolderSource

# no machine has the memory to dequantize at load
placement.DEQUANTIZED_PART = 2**60

def memory(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))

before, seen = memory("VmRSS:"), []
source = FolderSource("test", Path(sys.argv[1]))
model = load_model(source, Numerics.reference(), progress=lambda done, total: seen.append((done, total)))
print(memory("VmHWM:") - before, *seen[-1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_loading_needs_little_beyond_the_weights(tmp_path):
    # a few real matrices, enough that an interpreter's noise does not count
    values = shortened(FLASH, 2, 3) | {"vocab_size": 1024, "num_experts_per_tok": 2, "num_nextn_predict_layers": 0}
    weights, shard = write_holes(tmp_path, values | {"compress_ratios": [0, 4]}, 8)
    assert weights > 3e8
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    answer = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    peak, done, total = map(int, answer.split())
    assert done == total == weights
    # read directly; what is beyond is the interpreter's
    assert weights < peak <= weights + shard / 4


def test_build_random_in_other_formats():
    model = build_random(SMALL, Numerics.plain(), formats=Formats("f32", "f32", "f32"))
    tensors = {name: tensor.dtype for name, tensor in model.named_parameters() if tensor.is_floating_point()}
    assert set(tensors.values()) == {torch.float32}
    assert not any(name.endswith(".scale") for name in tensors)
