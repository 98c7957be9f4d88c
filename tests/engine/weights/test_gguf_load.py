"""GGUF files loaded as stored: exact, sharded at block borders, and in no more memory than the file."""

import sys
import threading
from math import prod

import pytest
import torch

from dsv4cli.engine.checkpoint.gguf.loading import loaded_specs, loaded_table
from dsv4cli.engine.checkpoint.gguf.model import GgufIdentity
from dsv4cli.engine.checkpoint.gguf.naming import gguf_name
from dsv4cli.engine.checkpoint.layout import loaded_tensors
from dsv4cli.engine.checkpoint.source import FolderSource
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.model.linear import MatrixParameters
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.parallel.world import SINGLE, World
from dsv4cli.engine.settings import NO_DRAFTS
from dsv4cli.engine.weights import placement, read, staging
from dsv4cli.engine.weights.block_arranger import BlockArranger
from dsv4cli.engine.weights.fill import TORCH_DTYPES, fill, made
from dsv4cli.engine.weights.gguf import stored_gguf
from dsv4cli.engine.weights.load import load_model
from dsv4cli.engine.weights.offload import offload_of
from dsv4cli.engine.weights.placement import MemoryLimits
from dsv4cli.engine.weights.reserve import Workload, reserves
from dsv4cli.engine.weights.sizes import measure
from dsv4cli.errors import CheckpointError, NotEnoughMemory
from dsv4cli.kernels.dispatch import use
from dsv4cli.kernels.ggml.types import BLOCK_DTYPES, from_tiles, row_bytes, tile_height
from dsv4cli.kernels.stored_matrix import CPU_CHUNK
from tests.engine.inspection.test_fit import ready
from tests.support.gguf_models import DS4, MIXES, write_nano
from tests.support.interpreter import correct
from tests.support.late_buffer import LateBuffer
from tests.support.oracle import logits_in_chunks
from tests.support.peak import Peak
from tests.support.recorded_pass import RecordedPass
from tests.support.slow import slow_except

IDS = [0, *range(100, 116)]


@pytest.fixture
def as_stored(monkeypatch):
    """No machine has the memory to dequantize at load."""
    monkeypatch.setattr(placement, "DEQUANTIZED_PART", 2**60)


def logits(model: Transformer) -> torch.Tensor:
    return logits_in_chunks(model, IDS, [13, 1, 3])


def parameters(identity: GgufIdentity, device: str = "cpu", world: World = SINGLE) -> dict[str, torch.Tensor]:
    """Returns the parameters of a rank, filled from the file."""
    table, model = loaded_table(identity), Transformer(identity.config, Numerics.reference(), world)
    fill(model, table, stored_gguf(identity, table.values(), world), device=device, world=world)
    return {name: parameter.cpu() for name, parameter in model.named_parameters()}


def stage(monkeypatch, piece: int, *, besides: int = 0) -> None:
    """Sends parameters on a CPU through staging buffers, as those on a GPU; copies end as late as they may.

    besides: bytes of a row of the tensors that are not staged, as experts in host memory.
    """
    monkeypatch.setattr(read, "needs_staging", lambda destination: destination.shape[-1] != besides)
    monkeypatch.setattr(read, "PIECE", piece)
    monkeypatch.setattr(staging, "Buffer", LateBuffer)


@pytest.mark.parametrize("mix", slow_except(["ds4"], MIXES))
def test_blocks_give_the_bits_of_their_values(tmp_path, as_stored, mix):
    path, values = write_nano(tmp_path, MIXES[mix], parts=3 if mix == "unsloth" else 1)
    source = FolderSource("test", path)
    model = load_model(source, Numerics.reference())
    matrices = [module for module in model.modules() if isinstance(module, MatrixParameters)]
    assert len({one.block_type for one in matrices}) > 2
    kept = {spec.name: spec for spec in loaded_table(source.identity).values()}
    assert model.stored_bytes == sum(parameter.nbytes for parameter in model.parameters())
    # the same with every matrix in fp32, except FP4 experts, whose inputs are rounded
    config, wide = source.identity.config, Formats("f32", "f32", "f32")
    specs = loaded_tensors(config, wide)
    reference = Transformer(config, Numerics.reference(), SINGLE)
    fill(reference, specs, made((spec, values[name]) for name, spec in specs.items()), device="cpu", world=SINGLE)
    fp4 = any(spec.form == "fp4" for spec in kept.values())
    assert not fp4
    assert torch.equal(logits(model), logits(reference.eval()))


@pytest.mark.parametrize("mix", MIXES)
def test_every_matrix_takes_the_bytes_of_the_file(tmp_path, mix):
    path, _ = write_nano(tmp_path, MIXES[mix], drafter="mtp")
    identity = FolderSource("test", path).identity
    stored = identity.checkpoint.tensors
    names = dict[str, int]()
    for spec in loaded_table(identity).values():
        if len(spec.shape) == 2 and not spec.name.endswith("ape") and "hc_" not in spec.name and spec.dtype != "I64":
            nbytes = prod(spec.shape) * TORCH_DTYPES[spec.dtype].itemsize
            names[gguf_name(spec)] = names.get(gguf_name(spec), 0) + nbytes
    assert names == {name: stored[name].nbytes for name in names}
    kept = {"token_embd.weight", "output.weight", "blk.2.attn_compressor_kv.weight", "blk.0.ffn_gate_inp.weight"}
    assert kept < names.keys()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16"])
def test_a_router_has_values_that_its_kernels_read(tmp_path, as_stored, kind):
    path, values = write_nano(tmp_path, {"gate_inp": kind} | DS4)
    gate = load_model(FolderSource("test", path), Numerics.reference()).get_parameter("layers.1.ffn.gate.weight")
    assert gate.dtype == (torch.float16 if kind == "F16" else torch.float32)
    assert torch.equal(gate.float(), values["layers.1.ffn.gate.weight"])


@pytest.mark.parametrize("mix", slow_except(["llama.cpp", "ds4"], MIXES))
def test_a_cpu_with_enough_memory_dequantizes_them_without_changing_a_bit(tmp_path, monkeypatch, mix):
    path, _ = write_nano(tmp_path, MIXES[mix])
    wide = load_model(FolderSource("test", path), Numerics.reference())
    assert all(one.block_type is None for one in wide.modules() if isinstance(one, MatrixParameters))
    assert {one.dtype for one in wide.parameters()} == {torch.float32, torch.int64}
    monkeypatch.setattr(placement, "DEQUANTIZED_PART", 2**60)
    stored = load_model(FolderSource("test", path), Numerics.reference())
    assert sum(one.nbytes for one in stored.parameters()) < sum(one.nbytes for one in wide.parameters()) / 2
    assert torch.equal(logits(stored), logits(wide))


def test_mxfp4_experts_are_those_of_the_release(tmp_path, as_stored):
    path, _ = write_nano(tmp_path, {r"ffn_.*_exps": "MXFP4"} | DS4)
    table = loaded_table(FolderSource("test", path).identity)
    assert table["layers.1.ffn.experts.3.w2.weight"].form == "fp4"
    assert table["layers.1.ffn.experts.3.w2.scale"].dtype == "F8_E8M0"
    assert logits(load_model(FolderSource("test", path), Numerics.reference())).isfinite().all()


@pytest.mark.parametrize("kind", slow_except(["Q8_0", "F16"], ["Q8_0", "F16", "BF16", "F32"]))
def test_halves_of_the_drafters_matrix_have_its_values(tmp_path, as_stored, kind):
    path, values = write_nano(tmp_path, {"[eh]_proj": kind} | DS4, drafter="nextn")
    model = load_model(FolderSource("test", path), Numerics.reference())
    for name in ("mtp.0.e_proj", "mtp.0.h_proj"):
        matrix = model.get_submodule(name).matrix
        assert matrix.weight.nbytes == len(matrix.weight) * row_bytes(kind, matrix.columns)
        assert matrix.block_type == ("Q8_0" if kind == "Q8_0" else None)
        assert torch.equal(matrix.values(), values[f"{name}.weight"])


def test_blocks_stay_blocks_without_their_drafter(tmp_path, as_stored):
    path, _ = write_nano(tmp_path, DS4, drafter="nextn")
    source = FolderSource("test", path)
    model = load_model(source, Numerics.reference(), drafting=NO_DRAFTS)
    assert model.get_submodule("layers.0.attn.wq_a").matrix.block_type == "Q8_0"
    # those of the same file without a drafter
    bare, _ = write_nano(tmp_path / "bare", DS4)
    assert model.stored_bytes == load_model(FolderSource("test", bare), Numerics.reference()).stored_bytes


def test_a_missing_matrix_is_named(tmp_path):
    path, _ = write_nano(tmp_path, DS4)
    identity = FolderSource("test", path).identity
    types = {name: kind for name, kind in identity.gguf_types.items() if name != "blk.1.ffn_up_exps.weight"}
    with pytest.raises(CheckpointError, match=r"tensor blk\.1\.ffn_up_exps\.weight is missing"):
        loaded_specs(identity.config, types)


def test_pieces_end_where_tiles_end(tmp_path, monkeypatch):
    path, _ = write_nano(tmp_path, DS4)
    identity = FolderSource("test", path).identity
    whole = parameters(identity)
    # a piece of 11 rows of the embedding, whose tiles have 8
    monkeypatch.setattr(read, "PIECE", 11 * whole["embed.weight"].nbytes // len(whole["embed.weight"]))
    assert all(torch.equal(parameter, whole[name]) for name, parameter in parameters(identity).items())


# of nano's matrices, the largest are in several pieces of 40 kB, and pieces of 1 MB hold many experts
@pytest.mark.parametrize("piece", [40_000, 1_000_000])
@pytest.mark.parametrize("mix", MIXES)
def test_blocks_are_arranged_in_tiles_on_a_device(tmp_path, monkeypatch, mix, piece):
    path, _ = write_nano(tmp_path, MIXES[mix])
    identity = FolderSource("test", path).identity
    expected = parameters(identity)
    stage(monkeypatch, piece)
    found = parameters(identity)
    assert [name for name, parameter in found.items() if not torch.equal(parameter, expected[name])] == []


def test_blocks_for_a_device_and_for_host_memory_share_a_buffer(tmp_path, monkeypatch):
    path, _ = write_nano(tmp_path, DS4)
    identity = FolderSource("test", path).identity
    expected = parameters(identity)
    # w2 of the experts
    stage(monkeypatch, 1_000_000, besides=row_bytes("Q2_K", 256))
    found = parameters(identity)
    assert [name for name, parameter in found.items() if not torch.equal(parameter, expected[name])] == []


def test_a_rank_s_columns_of_blocks_are_arranged_on_a_device(tmp_path, monkeypatch):
    path, _ = write_nano(tmp_path, {r"ffn_.*_exps": "Q4_0"} | DS4)
    identity = FolderSource("test", path).identity
    expected = parameters(identity, world=World(1, 2))
    stage(monkeypatch, 40_000)
    found = parameters(identity, world=World(1, 2))
    assert [name for name, parameter in found.items() if not torch.equal(parameter, expected[name])] == []


@pytest.mark.gpu
@pytest.mark.parametrize("piece", [40_000, read.PIECE])
@pytest.mark.parametrize("mix", MIXES)
def test_parameters_on_a_gpu_have_the_bits_of_those_on_a_cpu(tmp_path, monkeypatch, mix, piece):
    path, _ = write_nano(tmp_path, MIXES[mix])
    identity = FolderSource("test", path).identity
    expected = parameters(identity)
    monkeypatch.setattr(read, "PIECE", piece)
    found = parameters(identity, "cuda")
    assert [name for name, parameter in found.items() if not torch.equal(parameter, expected[name])] == []


@pytest.mark.gpu
def test_loading_to_a_gpu_needs_little_memory_and_keeps_none(tmp_path, monkeypatch):
    path, _ = write_nano(tmp_path, DS4)
    identity = FolderSource("test", path).identity
    table, model = loaded_table(identity), Transformer(identity.config, Numerics.reference(), SINGLE)
    monkeypatch.setattr(read, "PIECE", 1_000_000)
    torch.cuda.reset_peak_memory_stats()
    fill(model, table, stored_gguf(identity, table.values(), SINGLE), device="cuda", world=SINGLE)
    # two copies of a piece, and masks of its blocks
    assert torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() <= 2.5 * read.PIECE
    reserved = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == reserved


def in_rows(kind: str, tiles: torch.Tensor) -> torch.Tensor:
    return from_tiles(kind, tiles, tile_height(kind, tiles.shape[-2]))


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_rows_and_columns_cut_at_block_borders(tmp_path, size):
    path, _ = write_nano(tmp_path, {r"ffn_.*_exps": "Q4_0"} | DS4)
    identity = FolderSource("test", path).identity
    whole = parameters(identity)
    parts = [parameters(identity, world=World(rank, size)) for rank in range(size)]
    for spec in loaded_table(identity).values():
        name = spec.parameter
        if spec.shard is None:
            assert all(torch.equal(part[name], whole[name]) for part in parts), name
            continue
        dim, kind = spec.shard + (spec.expert is not None), BLOCK_DTYPES.get(spec.dtype)
        rows = [part[name] if kind is None else in_rows(kind, part[name]) for part in parts]
        expected = whole[name] if kind is None else in_rows(kind, whole[name])
        assert torch.equal(torch.cat(rows, dim), expected), name


def test_a_cut_inside_a_block_is_refused(tmp_path):
    path, _ = write_nano(tmp_path, DS4)
    identity = FolderSource("test", path).identity
    table, world = loaded_table(identity), World(0, 2)
    with pytest.raises(
        CheckpointError, match=r"w2\.weight \[256, 256\] \(Q2_K, blocks of 256\) cannot be split across 2 ranks"
    ):
        fill(
            Transformer(identity.config, Numerics.reference(), world),
            table,
            stored_gguf(identity, table.values(), world),
            device="cpu",
            world=world,
        )


@pytest.fixture(params=["strips", "staged", pytest.param("gpu", marks=pytest.mark.gpu)])
def way(request, monkeypatch):
    """The ways of blocks into a parameter. Its device."""
    if request.param == "staged":
        stage(monkeypatch, 1_000_000)
    return "cuda" if request.param == "gpu" else "cpu"


def test_a_damaged_scale_is_refused_by_name(tmp_path, as_stored, way):
    path, _ = write_nano(tmp_path, DS4)
    identity = FolderSource("test", path).identity
    info = identity.checkpoint.tensors["blk.2.ffn_gate_exps.weight"]
    with path.open("r+b") as file:
        file.seek(info.begin + (5 * 256 + 7) * 66)  # d of a row of expert 5
        file.write(b"\x00\x7c")
    with pytest.raises(
        CheckpointError, match=r"layers\.2\.ffn\.experts\.5\.w1\.weight \(IQ2_XXS\) holds a block whose"
    ):
        load_model(FolderSource("test", path), Numerics.reference(), device=way)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyboardInterrupt()], ids=["memory", "ctrl-c"])
def test_an_error_while_blocks_are_arranged_ends_all_threads(tmp_path, as_stored, monkeypatch, error):
    path, _ = write_nano(tmp_path, DS4)
    stage(monkeypatch, 40_000)
    arrange, calls, before = BlockArranger.arrange, list[object](), threading.active_count()

    def arrange_four(arranger, arrived):
        calls.append(arrived)
        if len(calls) == 5:
            raise error
        arrange(arranger, arrived)

    monkeypatch.setattr(BlockArranger, "arrange", arrange_four)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else NotEnoughMemory
    with pytest.raises(expected):
        load_model(FolderSource("test", path), Numerics.reference())
    assert (threading.active_count(), len(calls)) == (before, 5)


def test_the_triton_kernels_keep_blocks(tmp_path):
    path, _ = write_nano(tmp_path, DS4)
    with use("triton"):
        model = load_model(FolderSource("test", path), Numerics.reference())
    assert sum(one.block_type is not None for one in model.modules() if isinstance(one, MatrixParameters)) > 40


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel_device(request):
    """The device that Triton's kernels run on; on a CPU, its interpreter runs them."""
    if request.param == "cpu":
        if torch.cuda.is_available() or sys.platform != "linux":
            pytest.skip("kernels are interpreted where there is Triton and no GPU")
        correct()
    return request.param


@pytest.mark.parametrize("mix", MIXES)
def test_the_triton_kernels_multiply_blocks(tmp_path, as_stored, kernel_device, mix):
    path, _ = write_nano(tmp_path, MIXES[mix])
    model = load_model(FolderSource("test", path), Numerics.reference(), device=kernel_device)
    recorded = RecordedPass(model)
    with use("torch"), recorded.recording():
        expected = logits(model)
    with use("triton"), recorded.replaying() as outputs:
        found = logits(model)
    results = [*zip(recorded.outputs, outputs, strict=True), ([expected], [found])]
    for theirs, ours in results:
        for one, other in zip(theirs, ours, strict=True):
            # roundings to bf16 in a block, and sums in another order
            assert (one.float() - other.float()).norm() <= 0.02 * one.float().norm()
    # all but nearly equal scores select the same experts
    assert torch.cat(recorded.alike).float().mean() >= 0.9


def test_weights_above_the_limit_of_host_memory_are_refused_in_one_sentence(tmp_path):
    path, _ = write_nano(tmp_path, DS4)
    message = r"the weights take 0\.01 GB of host memory, and --host-memory allows 0\.01 GB"
    with pytest.raises(NotEnoughMemory, match=message):
        load_model(FolderSource("test", path), Numerics.reference(), limits=MemoryLimits(host=8_000_000))


def test_a_step_on_a_cpu_takes_the_memory_that_loading_reserves(tmp_path, as_stored):
    path, _ = write_nano(tmp_path, DS4)
    source = FolderSource("test", path)
    identity, table = source.identity, loaded_table(source.identity)
    step = ready(load_model(source, Numerics.reference()), "cpu", 1, 64, 1)
    with Peak("cpu") as peak:
        step()
    sizes = measure(table.values(), identity.config.num_experts_per_tok, 1)
    (reserved,) = reserves(identity.config, identity.formats, Workload(64, 1, 64), 1, on_gpu=False, gguf=sizes.gguf)
    # the intermediate values of a few rows that are decoded at once
    assert peak.most <= reserved.step + 10 * CPU_CHUNK


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_offloaded_blocks_give_the_same_bits(tmp_path, as_stored, kind):
    path, _ = write_nano(tmp_path, {"token_embd": kind} | DS4)
    source = FolderSource("test", path)
    with use("torch"):
        whole = load_model(source, Numerics.reference())
        least = whole.stored_bytes - 500_000
        divided = load_model(source, Numerics.reference(), limits=MemoryLimits(gpu=least))
        offload = offload_of(divided)
        assert offload is not None
        assert offload.plan.division.offloaded > 0
        experts = {"w1.weight": "IQ2_XXS", "w2.weight": "Q2_K", "w3.weight": "IQ2_XXS"}
        assert offload.plan.block_types == experts | ({"embed.weight": kind} if kind == "Q8_0" else {})
        assert torch.equal(logits(divided), logits(whole))
