"""Reading the values of a checkpoint: statistics against plain numpy, which rows are read, what sound models say."""

import math
from dataclasses import replace

import numpy as np
import pytest

from dsv4cli.engine.checkpoint.identify import recognise
from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.checkpoint.matrix import MatrixReader
from dsv4cli.engine.checkpoint.values import decode, e4m3_values, e8m0_values
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.inspection.checks import codes, measure
from dsv4cli.engine.inspection.checks.codes import of_codes
from dsv4cli.engine.inspection.checks.measure import sample_rows, whole_rows
from dsv4cli.engine.inspection.checks.statistics import ROW, Statistics, of_values
from dsv4cli.engine.inspection.checks.survey import check_values
from tests.support import damage, synthetic, variants
from tests.support.slow import slow

GOLDEN = damage.GOLDEN / "tiny-flash"
# sums of fp32 products in blocks of 4096: a relative error of 2^-24 a product, by chance of either sign
CLOSE = 1e-5


def random() -> np.random.Generator:
    return np.random.default_rng(0)


def plain(values: np.ndarray) -> Statistics:
    """The statistics in one line each, in fp64."""
    wide = values.astype(np.float64).reshape(-1)
    kept = wide[np.isfinite(wide)]
    return Statistics(
        count=wide.size,
        not_finite=wide.size - kept.size,
        zeros=int((kept == 0).sum()),
        total=float(np.abs(kept).sum()),
        squares=float((kept * kept).sum()),
        low=float(kept.min(initial=math.inf)),
        high=float(kept.max(initial=-math.inf)),
    )


def agree(found: Statistics, expected: Statistics) -> None:
    exact = ("count", "not_finite", "zeros", "low", "high")
    assert [getattr(found, name) for name in exact] == [getattr(expected, name) for name in exact]
    assert (found.total, found.squares) == pytest.approx((expected.total, expected.squares), rel=CLOSE)


@pytest.mark.parametrize("shape", [(0,), (1,), (7, 13), (ROW + 1,), (3, ROW), (1021, 257)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_values(shape, scale):
    values = (random().standard_normal(shape) * scale).astype(np.float32)
    values.reshape(-1)[::5] = 0
    agree(of_values(values.copy()), plain(values))


def test_values_that_are_no_numbers_are_counted_apart():
    values = random().standard_normal((5, 100)).astype(np.float32)
    values[1, 2], values[3, 4], values[4, 99] = np.nan, np.inf, -np.inf
    agree(of_values(values.copy()), plain(values))
    nothing = of_values(np.full(3, np.nan, np.float32))
    assert (nothing.finite, nothing.rms, nothing.mean_magnitude, nothing.largest) == (0, 0, 0, 0)


def test_parts_add_up():
    values = random().standard_normal(1000).astype(np.float32)
    found = Statistics()
    for part in np.split(values.copy(), (1, 1, 500)):
        found.add(of_values(part))
    agree(found, plain(values))


@pytest.mark.parametrize(("form", "group"), [("fp4", 32), ("nvfp4", 16)])
@pytest.mark.parametrize("shape", [(1, 32), (3, 64), (257, 160)], ids=str)
@pytest.mark.parametrize("spread", [1, 3, 200])
def test_codes_are_counted_as_they_would_be_decoded(monkeypatch, form, group, shape, spread):
    monkeypatch.setattr(codes, "BLOCK", 512)  # several blocks, the last not full
    monkeypatch.setattr(codes, "PIECE", 2)
    rows, columns = shape
    packed = random().integers(0, 256, (rows, columns // 2), np.uint8)
    packed[0, :8] = 0x88
    middle = {"fp4": 120, "nvfp4": 0x38}[form]
    most = {"fp4": 253, "nvfp4": 0x7F}[form]  # beyond are NaN, and 6 times what is no fp32 number
    low, high = max(middle - spread, 0), min(middle + spread, most)
    scale = random().integers(low, high, (rows, columns // group), np.uint8)
    factors = e8m0_values() if form == "fp4" else e4m3_values() * np.float32(0.25)
    raw = {"weight": packed, "scale": scale, "weight_scale": scale, "weight_scale_2": np.float32(0.25)}
    agree(of_codes(packed, scale, factors, np.unique(scale)), plain(decode(form, raw)))


def test_groups_without_a_scale_have_no_values():
    packed, scale = np.full((2, 32), 0x7F, np.uint8), np.array([[127, 255], [255, 126]], np.uint8)
    found = of_codes(packed, scale, e8m0_values(), np.unique(scale))
    assert (found.count, found.not_finite, found.low, found.high) == (128, 64, -6, 6)
    nothing = of_codes(packed, np.full_like(scale, 255), e8m0_values(), np.array([255]))
    assert (nothing.finite, nothing.largest, nothing.is_constant) == (0, 0, False)


@pytest.mark.parametrize(
    "formats",
    [
        *slow(Formats(), Formats("bf16", "bf16"), Formats("fp8", "fp8")),
        Formats("fp8", "nvfp4"),
        *slow(Formats("f32", "f32", "f32")),
    ],
    ids=lambda formats: formats.experts,
)
def test_a_checkpoint_has_the_statistics_of_its_values(tmp_path, formats):
    folder = variants.write_variant(tmp_path, formats)
    report = check_values(recognise(folder), "full", lambda done, total: None)
    assert report.findings == ()
    expected = check_values(recognise(GOLDEN), "full", lambda done, total: None)
    for family, other in zip(report.families, expected.families, strict=True):
        agree(family.statistics, other.statistics)


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 1000, 4096])
def test_rows_are_read_once_and_begin_at_blocks(monkeypatch, rows):
    monkeypatch.setattr(measure, "CHUNK", {})
    monkeypatch.setattr(measure, "DECODED_CHUNK", 300 * 256)
    monkeypatch.setattr(measure, "SAMPLE", 100 * 256)
    weight = TensorSpec("x.weight", "F8_E4M3", (rows, 256), "attention", rows * 256, columns=256, form="fp8")
    matrix = MatrixReader(None, {"weight": weight})
    chunks = list(whole_rows(matrix))
    assert [row for part in chunks for row in range(part.start, part.stop)] == list(range(rows))
    some = list(sample_rows(matrix))
    seen = [row for part in some for row in range(part.start, part.stop)]
    assert all(part.start % 128 == 0 for part in chunks + some)
    assert seen == sorted(set(seen))
    assert {seen[0], seen[-1]} == {0, rows - 1}
    assert len(seen) <= max(3 * 128, min(rows, 3 * 128))


def test_random_weights_are_sound(tmp_path):
    """Sampled as for tests and profiles, with scales far apart, rows of zeros and of -0: nothing to say."""
    for number, values in enumerate((synthetic.SMALL, synthetic.DSPARK)):
        folder = synthetic.write_checkpoint(tmp_path / str(number), values)
        report = check_values(recognise(folder), "full", lambda done, total: None)
        assert report.findings == ()


@pytest.mark.parametrize("name", ["tiny-flash", *slow("tiny-pro")])
def test_the_golden_nets_are_sound(name):
    seen = []
    report = check_values(recognise(GOLDEN.parent / name), "full", lambda done, total: seen.append((done, total)))
    assert (report.findings, report.wrong, report.absent) == ((), 0, 0)
    assert report.nbytes == report.nbytes_all
    assert seen[-1] == (report.nbytes, report.nbytes)
    sample = check_values(recognise(GOLDEN.parent / name), "sample", lambda done, total: None)
    assert sample.tensors == report.tensors
    assert sample.findings == ()


def test_a_sample_reads_less_and_sees_every_tensor(tmp_path):
    folder = synthetic.write_checkpoint(tmp_path / "model", synthetic.SMALL | {"vocab_size": 8192})
    identity = recognise(folder)
    full, sample = (check_values(identity, depth, lambda done, total: None) for depth in ("full", "sample"))
    assert sample.tensors == full.tensors
    assert sample.nbytes < full.nbytes == sample.nbytes_all


def test_a_file_that_ends_too_early_is_a_finding(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    identity = recognise(folder)
    path = folder / damage.SHARD
    last = max((info for info in identity.checkpoint.tensors.values() if info.file == path), key=lambda info: info.end)
    path.write_bytes(path.read_bytes()[:-2])
    report = check_values(identity, "full", lambda done, total: None)
    assert [finding.check for finding in report.findings] == ["unreadable"]
    assert last.name.rpartition(".")[0] in report.findings[0].tensor
    assert path.name in report.findings[0].message


def test_what_is_not_there_is_counted(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    damage.drop_tensor(folder, damage.SCALE)
    report = check_values(recognise(folder), "full", lambda done, total: None)
    assert (report.absent, report.findings) == (1, ())


def test_a_wide_tensor_among_fp8_is_read_as_it_is(tmp_path):
    """wo_a of one layer as BF16, the others FP8: mistyped by the headers, absurd by its values."""
    folder = damage.copy_checkpoint(tmp_path)
    table = e4m3_values()

    def widen(stored: damage.Stored) -> damage.Stored:
        codes = table[np.frombuffer(stored.data, np.uint8)]
        return replace(stored, dtype="BF16", data=(codes.view(np.uint32) >> 16).astype(np.uint16).tobytes())

    damage.edit_tensor(folder, "layers.3.attn.wo_a.weight", widen)
    damage.drop_tensor(folder, "layers.3.attn.wo_a.scale")
    report = check_values(recognise(folder), "full", lambda done, total: None)
    assert {finding.tensor for finding in report.findings} == {"layers.3.attn.wo_a.weight"}
    assert report.wrong == 2  # by its gain, and beside the other layers
