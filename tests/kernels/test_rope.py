"""The rope tables against the official numbers, and the rotation against complex numbers in pure Python."""

import cmath
import math

import pytest
import torch

from dsv4cli.engine.config.presets import PRESETS
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.model.rope import correction_range, frequencies
from dsv4cli.kernels.rope import rotate
from dsv4cli.kernels.step_metadata.ref import rotation
from tests.kernels.rounding import FP32, assert_rounded_once
from tests.support.slow import slow_rows

# the table of layers with ratio 4 and 128, computed by the official code
YARN = [
    1, 0.687656, 0.472871, 0.325172, 0.223607, 0.153765, 0.105737, 0.0727108, 0.05, 0.0343828, 0.0236435, 0.0162586,
    0.0111803, 0.00768823, 0.00528686, 0.00363554, 0.00226562, 0.0013968, 0.00084969, 0.000508082, 0.000296978,
    0.00016818, 9.08678e-05, 4.54442e-05, 1.95313e-05, 5.37231e-06, 3.6943e-06, 2.54041e-06, 1.74693e-06, 1.20129e-06,
    8.26071e-07, 5.68053e-07,
]  # fmt: skip
CONFIG = parse_config(PRESETS["flash"], "test")


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("ratio", [4, 128])
def test_table_of_compressed_layers(ratio, preset):
    # printed with six digits
    assert frequencies(parse_config(PRESETS[preset], preset), ratio).tolist() == pytest.approx(YARN, rel=5e-6)


def test_table_of_window_layers():
    table = frequencies(CONFIG, 0)
    assert table[[0, 1, 2, 3, 31]].tolist() == pytest.approx([1, 0.749894, 0.562341, 0.421697, 0.000133352], rel=5e-6)
    assert table.dtype == torch.float32


def test_interpolation_fades_in_between_15_and_25():
    assert correction_range(CONFIG, CONFIG.compress_rope_theta) == (15, 25)
    plain = 160000.0 ** -(torch.arange(32) / 32)
    assert (frequencies(CONFIG, 4) / plain)[[0, 15, 20, 25, 31]].tolist() == pytest.approx(
        [1, 1, 17 / 32, 1 / 16, 1 / 16]
    )


def corrected(pair: int, theta: float, length: int, fast: float, slow: float) -> float:
    """The frequency of a pair of 64 columns, as the official model.py computes it, factor 16."""

    def place(turns: float) -> float:
        return 64 * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(place(fast)), 0), min(math.ceil(place(slow)), 63)
    smooth = 1 - min(max((pair - low) / (high - low), 0), 1)
    plain = theta ** (-2 * pair / 64)
    return plain / 16 * (1 - smooth) + plain * smooth


@pytest.mark.parametrize(
    ("theta", "length", "fast", "slow", "span"),
    [
        (160000, 65536, 32, 1, (15, 25)),
        (10000, 65536, 32, 1, (20, 33)),  # beyond the last pair, which keeps a part of its frequency
        (10000, 4_000_000, 200, 0.01, (28, 63)),  # no further than to the number of columns
        (160000, 100, 32, 1, (0, 8)),
    ],
)
def test_frequencies_are_the_official_ones(theta, length, fast, slow, span):
    scaling = {"original_max_position_embeddings": length, "beta_fast": fast, "beta_slow": slow}
    changes = {"compress_rope_theta": theta, "rope_scaling": PRESETS["flash"]["rope_scaling"] | scaling}
    config = parse_config(PRESETS["flash"] | changes, "test")
    assert correction_range(config, theta) == span
    expected = [corrected(pair, theta, length, fast, slow) for pair in range(32)]
    assert frequencies(config, 4).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("position", [0, 1, 65_535, 1_000_003])
def test_angle_is_rounded_to_fp32(position):
    table = frequencies(CONFIG, 4)
    turns = rotation(torch.tensor([position]), table)[0]
    for turn, frequency in zip(turns.tolist(), table, strict=True):
        angle = (torch.tensor(float(position)) * frequency).item()
        # cosine and sine in fp32; an angle that is not rounded first is off by up to 0.03 at the last position
        assert turn == pytest.approx(cmath.exp(1j * angle), abs=2e-7)


# shape of x, rotated pairs
SHAPES = [((0, 8), 2), ((1, 4), 2), ((5, 3, 10), 3), ((7, 3, 512), 32), ((5, 128), 32), ((3, 2, 64), 32)]


def turned(row: list[float], turns: list[complex]) -> list[float]:
    start = len(row) - 2 * len(turns)
    pairs = [complex(row[start + 2 * i], row[start + 2 * i + 1]) * turn for i, turn in enumerate(turns)]
    return row[:start] + [part for pair in pairs for part in (pair.real, pair.imag)]


def turns_of(positions: torch.Tensor, ratio: int, pairs: int = 32) -> torch.Tensor:
    """The first rotations of Flash at these positions, on their device."""
    return rotation(positions, frequencies(CONFIG, ratio)[:pairs].to(positions.device))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("shape", "pairs", "dtype"),
    [
        *((*case, torch.bfloat16) for case in SHAPES),
        *((*case, torch.float32) for case in SHAPES[2:3]),
        *slow_rows(*((*case, torch.float32) for case in SHAPES[:2] + SHAPES[3:])),
    ],
    ids=str,
)
def test_rotates_the_trailing_pairs(dtype, shape, pairs):
    x = torch.randn(shape).to(dtype)
    turns = turns_of(torch.arange(shape[0]) * 37, 0, pairs)
    y = rotate(x, turns)
    assert (y.dtype, y.shape) == (dtype, x.shape)
    heads = x.view(shape[0], math.prod(shape[1:-1]), shape[-1]).tolist()
    expected = [[turned(row, turns[t].tolist()) for row in rows] for t, rows in enumerate(heads)]
    # two products and a sum of fp32, each no larger than the pair
    error = 4 * FP32 * x.double().unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, -1)
    error[..., : -2 * pairs] = 0
    assert_rounded_once(y, torch.tensor(expected, dtype=torch.float64).view(shape), error)


@pytest.mark.usefixtures("backend")
def test_conjugate_turns_back():
    x, turns = torch.randn(9, 4, 128), turns_of(torch.arange(9) + 1000, 4)
    torch.testing.assert_close(rotate(rotate(x, turns), turns.conj()), x, rtol=0, atol=2e-6)  # two fp32 rotations
    assert torch.equal(rotate(x, torch.ones_like(turns)), x)


@pytest.mark.usefixtures("backend")
def test_what_is_not_rotated_stays_bit_by_bit():
    x = torch.tensor([0.0, -0.0, -0.0, -1.0, math.inf, -math.inf, 1.0, 2.0]).repeat(2, 3, 1)
    y = rotate(x, torch.polar(torch.ones(2, 1), torch.ones(2, 1)))
    assert torch.equal(y[..., :6].view(torch.int32), x[..., :6].view(torch.int32))
    assert not (y[..., 6:] == x[..., 6:]).any()


@pytest.mark.usefixtures("backend")
def test_a_slice_of_wider_rows():
    x, turns = torch.randn(4, 2, 192), turns_of(torch.arange(8), 4)[::2]
    part = x[..., 64:]
    assert torch.equal(rotate(part, turns), rotate(part.contiguous(), turns.clone()))
