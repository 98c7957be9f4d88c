"""What cannot be right about values: each rule at its bound, on arrays that are nowhere stored."""

import math

import numpy as np
import pytest

from dsv4cli.engine.checkpoint.identify import recognise
from dsv4cli.engine.checkpoint.layout import TensorSpec, expected_tensors, matrices
from dsv4cli.engine.checkpoint.matrix import MatrixReader
from dsv4cli.engine.checkpoint.values import e4m3_values
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.inspection.checks.findings import GAIN, SPREAD, ZEROS, MeasuredMatrix, compare, judge, kind_of
from dsv4cli.engine.inspection.checks.measure import ENOUGH, Measurement
from dsv4cli.engine.inspection.checks.statistics import Statistics
from tests.support import damage

EXPERTS = 6
NVFP4 = Formats("fp8", "nvfp4")
BF16 = Formats("bf16", "bf16")
WQ_A, W1 = "layers.3.attn.wq_a", "layers.3.ffn.experts.0.w1"
BIAS, TABLE = "layers.3.ffn.gate.bias", "layers.0.ffn.gate.tid2eid"


def random() -> np.random.Generator:
    return np.random.default_rng(0)


class Rows:
    """A matrix that is nowhere stored: its rows are given to a measurement by hand."""

    def __init__(self, name: str, formats: Formats | None = None) -> None:
        config = recognise(damage.GOLDEN / "tiny-flash").config
        table = matrices(expected_tensors(config, formats or Formats()).values())
        self.parts = table[name]
        self.matrix = MatrixReader(None, self.parts)

    def raw(self) -> dict[str, np.ndarray]:
        """Sound arrays, the codes drawn at random."""
        return {role: self._draw(role, spec) for role, spec in self.parts.items()}

    def _draw(self, role: str, spec: TensorSpec) -> np.ndarray:
        normal = (random().standard_normal(spec.shape) * 0.05).astype(np.float32)
        if spec.dtype == "BF16":
            return (normal.view(np.uint32) >> 16).astype(np.uint16)
        if spec.dtype == "F32":
            return normal if spec.shape else np.float32(0.25)
        if spec.dtype == "I64":
            return np.tile(np.arange(spec.shape[1]), (spec.shape[0], 1))
        if role == "weight":
            return random().choice(np.array([*range(0x70), *range(0x80, 0xF0)], np.uint8), spec.shape)
        return np.full(spec.shape, 0x30 if spec.dtype == "F8_E4M3" else 116, np.uint8)

    def judged(self, raw: dict[str, np.ndarray]) -> MeasuredMatrix:
        measurement = Measurement(self.matrix, EXPERTS)
        measurement.take(slice(0, self.matrix.shape[0]), {role: np.array(array) for role, array in raw.items()})
        return judge(measurement)

    def findings(self, raw: dict[str, np.ndarray]) -> list[tuple[str, str]]:
        return [(finding.severity, finding.check) for finding in self.judged(raw).findings]


def put(role: str, place, value):
    """Raw arrays with a value at a place of one of them."""

    def change(raw):
        raw[role] = np.array(raw[role])
        raw[role][place] = value

    return change


CASES = {
    "sound fp8": (WQ_A, None, lambda raw: None, []),
    "sound fp4": (W1, None, lambda raw: None, []),
    "sound nvfp4": (W1, NVFP4, lambda raw: None, []),
    "sound bf16": (WQ_A, BF16, lambda raw: None, []),
    "sound vector": ("layers.3.attn.attn_sink", None, lambda raw: None, []),
    "sound table": (TABLE, None, lambda raw: None, []),
    "NaN in bf16": (WQ_A, BF16, put("weight", (3, 5), 0x7FC0), [("wrong", "nan")]),
    "infinity in f32": (BIAS, None, put("weight", 2, np.inf), [("wrong", "nan")]),
    "NaN code": (WQ_A, None, put("weight", (3, 5), 0x7F), [("wrong", "nan")]),
    "negative NaN code": (WQ_A, None, put("weight", (3, 5), 0xFF), [("wrong", "nan")]),
    "scale NaN": (WQ_A, None, put("scale", (0, 1), 255), [("wrong", "scale")]),
    "scale NaN fp4": (W1, None, put("scale", (7, 1), 255), [("wrong", "scale")]),
    "scale NaN nvfp4": (W1, NVFP4, put("weight_scale", (7, 1), 0x7F), [("wrong", "scale")]),
    "scale 0": (WQ_A, None, put("scale", (0, 1), 0), [("wrong", "scale")]),
    "scale 0 fp4": (W1, None, put("scale", (7, 1), 0), [("wrong", "scale")]),
    "scale 0 nvfp4": (W1, NVFP4, put("weight_scale", (7, 1), 0), [("wrong", "scale")]),
    "scale 0 over zeros": (
        W1,
        None,
        lambda raw: (put("scale", (7, 1), 0)(raw), put("weight", (7, slice(16, 32)), 0x80)(raw)),
        [],
    ),
    "negative nvfp4 scale": (W1, NVFP4, put("weight_scale", (7, 1), 0xB0), [("wrong", "scale")]),
    "second scale 0": (W1, NVFP4, put("weight_scale_2", (), 0), [("wrong", "zeros"), ("wrong", "scale")]),
    "second scale NaN": (W1, NVFP4, put("weight_scale_2", (), np.nan), [("wrong", "nan"), ("wrong", "scale")]),
    "input scale infinite": (W1, NVFP4, put("input_scale", (), np.inf), [("wrong", "scale")]),
    "scales 1": (WQ_A, None, put("scale", slice(None), 127), [("wrong", "scale"), ("wrong", "magnitude")]),
    "scales 1 fp4": (W1, None, put("scale", slice(None), 127), [("wrong", "scale")]),
    "scales 1 nvfp4": (W1, NVFP4, put("weight_scale", slice(None), 0x38), [("wrong", "scale")]),
    "byte 120 as a number": (WQ_A, None, put("scale", slice(None), 134), [("wrong", "magnitude")]),
    "matrix of zeros": (WQ_A, None, put("weight", slice(None), 0), [("wrong", "zeros")]),
    "matrix of zeros fp4": (W1, None, put("weight", slice(None), 0), [("wrong", "zeros")]),
    "constant matrix": (WQ_A, BF16, put("weight", slice(None), 0x3C00), [("wrong", "constant")]),
    "vector of zeros": (BIAS, None, put("weight", slice(None), 0), [("suspicious", "zeros")]),
    "norm of ones": ("norm", None, put("weight", slice(None), 0x3F80), [("suspicious", "constant")]),
    "huge bias": (BIAS, None, put("weight", 1, -2e4), [("suspicious", "magnitude")]),
    "absurd bias": (BIAS, None, put("weight", 1, 1e30), [("wrong", "magnitude")]),
    "expert that is none": (TABLE, None, put("weight", (5, 1), EXPERTS), [("wrong", "range")]),
    "negative expert": (TABLE, None, put("weight", (5, 1), -1), [("wrong", "range")]),
    "expert twice": (TABLE, None, put("weight", (5, 1), 0), [("wrong", "twice")]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_what_the_bytes_of_one_tensor_tell(case):
    name, formats, change, expected = case
    rows = Rows(name, formats) if name != "norm" else Rows("norm.weight", formats)
    raw = rows.raw()
    change(raw)
    assert rows.findings(raw) == expected
    for finding in rows.judged(raw).findings:
        assert finding.tensor in finding.message
        assert finding.tensor in {spec.name for spec in rows.parts.values()}


def test_a_tensor_that_was_bf16_once():
    rows = Rows("layers.0.hc_attn_fn")
    raw = rows.raw()
    assert rows.findings(raw) == []
    narrow = {"weight": (raw["weight"].view(np.uint32) & 0xFFFF0000).view(np.float32)}
    assert rows.findings(narrow) == [("suspicious", "narrow")]
    # one value with more digits is enough to clear it
    put("weight", (3, 7), 1 / 3)(narrow)
    assert rows.findings(narrow) == []


def test_few_round_numbers_do_not_cry_wolf():
    rows = Rows("layers.0.hc_attn_base")
    values = np.zeros(rows.parts["weight"].shape, np.float32)
    values[: ENOUGH - 1] = np.arange(1, ENOUGH)
    assert rows.findings({"weight": values}) == []
    values[: ENOUGH + 1] = np.arange(ENOUGH + 1)
    assert rows.findings({"weight": values}) == [("suspicious", "narrow")]


def test_a_matrix_in_f32_may_hold_bf16_values():
    rows = Rows(WQ_A, Formats("f32", "f32", "f32"))
    narrow = {"weight": (rows.raw()["weight"].view(np.uint32) & 0xFFFF0000).view(np.float32)}
    assert rows.findings(narrow) == []


@pytest.mark.parametrize(
    ("plus", "minus", "smallest", "expected"),
    [
        (ZEROS, 0, ZEROS, [("suspicious", "fnuz")]),
        (ZEROS - 1, 0, ZEROS, []),  # may be chance
        (ZEROS, 1, ZEROS, []),  # FNUZ has no -0
        (1000, 0, 100, []),  # rows of zeros, not rounding
    ],
)
def test_codes_of_the_fnuz_variant(plus, minus, smallest, expected):
    rows = Rows(WQ_A)
    raw = rows.raw()
    codes = np.random.default_rng(1).integers(0x30, 0x70, raw["weight"].shape, np.uint8)
    codes |= (np.arange(codes.size, dtype=np.uint8).reshape(codes.shape) & 1) << np.uint8(7)
    flat = codes.reshape(-1)
    flat[:plus], flat[plus : plus + minus] = 0, 0x80
    flat[-smallest:] = 1
    raw["weight"] = codes
    assert rows.findings(raw) == expected


def test_codes_without_their_scale_make_an_absurd_matrix():
    """What a converter does that casts FP8 codes to BF16: the scale of the trap in Pro is 2^-11.4."""
    rows = Rows("layers.3.attn.wo_a", BF16)
    codes = e4m3_values()[random().integers(0, 0x70, rows.parts["weight"].shape)]
    raw = {"weight": (codes.view(np.uint32) >> 16).astype(np.uint16)}
    assert rows.findings(raw) == [("wrong", "magnitude")]
    assert "codes without their scales" in rows.judged(raw).findings[0].message


def test_looking_up_multiplies_nothing():
    rows = Rows("embed.weight")
    values = random().standard_normal(rows.parts["weight"].shape).astype(np.float32) * 100
    assert rows.findings({"weight": (values.view(np.uint32) >> 16).astype(np.uint16)}) == []


def layers(rms: list[float], zeros: list[int] | None = None) -> list[MeasuredMatrix]:
    """The same matrix in several layers, 1000 values each."""
    zeros = zeros or [0] * len(rms)
    return [
        MeasuredMatrix(
            f"layers.{number}.attn.wkv.weight", "attn.wkv", "attention", 512,
            Statistics(1000, 0, hole, 0.0, 1000 * value * value, -value, value), None, (),
        )
        for number, (value, hole) in enumerate(zip(rms, zeros, strict=True))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rms", "expected"),
    [
        ([0.02, 0.02, 0.02], []),
        ([0.02, 0.02, 0.02 * SPREAD["suspicious"] * 0.99], []),
        ([0.02, 0.02, 0.02 * SPREAD["suspicious"] * 1.01], [(2, "suspicious")]),
        ([0.02, 0.02 * SPREAD["wrong"] * 1.01, 0.02], [(1, "wrong")]),
        ([0.02, 0.02 / 33, 0.02, 0.02], [(1, "suspicious")]),
        ([0.02, 0.0, 0.02, 0.02], []),  # said elsewhere
        ([0.02, 60.0], []),  # which of the two?
        ([0.001, 0.003, 0.01, 0.02, 0.03], []),  # as far apart as real layers may be
    ],
)
def test_a_layer_unlike_the_others(rms, expected):
    found = [(int(finding.tensor.split(".")[1]), finding.severity) for finding in compare(layers(rms))]
    assert found == expected


def test_a_hole_shows_in_the_share_of_zeros():
    found = list(compare(layers([1.0] * 4, [120, 125, 130, 240])))
    assert [(finding.tensor, finding.severity, finding.check) for finding in found] == [
        ("layers.3.attn.wkv.weight", "suspicious", "zeros")
    ]


def test_kinds_are_the_same_in_every_layer_and_expert():
    names = (
        "layers.3.ffn.experts.11.w1",
        "mtp.0.ffn.experts.2.w1",
        "layers.0.attn.compressor.wkv.weight",
        "head.weight",
    )
    assert [kind_of(name) for name in names] == ["ffn.experts.w1", "ffn.experts.w1", "attn.compressor.wkv", "head"]
    assert kind_of("layers.3.ffn.shared_experts.w1") == "ffn.shared_experts.w1"


def test_the_bounds_lie_between_trained_weights_and_codes():
    # wo_a of Pro: mean magnitude 0.0214, so RMS 0.027 of normal values, 4096 columns; 2768 times that as codes
    gain = 0.0214 * math.sqrt(math.pi / 2) * math.sqrt(4096)
    assert gain < GAIN["suspicious"] / 10
    assert gain * 2768 > 10 * GAIN["wrong"]
    assert SPREAD["wrong"] < 2768 / 10
