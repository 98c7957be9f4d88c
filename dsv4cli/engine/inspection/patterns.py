"""Detection of the known mistake that made two versions (A and B) of a matrix differ; numpy, no torch.

These are mistakes of converters and loaders of this model: nibbles in the wrong order, scales lost or misread, values
rounded in between.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from dsv4cli.engine.checkpoint.compare import row_chunks
from dsv4cli.engine.checkpoint.matrix import MatrixReader, MatrixRows
from dsv4cli.engine.checkpoint.values import Values, decode
from dsv4cli.kernels.formats import E8M0_BIAS, FP4_BLOCK, FP8_BLOCK

Fits = Callable[[MatrixRows, MatrixRows], bool]
# e4m3 code of 1
E4M3_ONE = 0x38
# half the smallest step of e4m3: what a value below its normal range may lose
E4M3_HALF_STEP = 2.0**-10
# largest value under a scale byte 0, and what no sound matrix stays below
NEARLY_ZERO, SOUND = 448 * 2.0**-127, 2.0**-100
FEW = 32


@dataclass(frozen=True)
class Pattern:
    """A sentence that describes a mistake, and a function that tests it on the same rows of A and B."""

    words: str
    fits: Fits


# values may be NaN or infinite
@np.errstate(over="ignore", invalid="ignore")
def explain(a: MatrixReader, b: MatrixReader, row: int, twin: MatrixReader | None = None) -> str:
    """Return a sentence on the known mistake that explains every difference of two same-shape matrices; '' for none.

    row: a row in which they differ. twin: a matrix of A that B may have stored under this name by mistake.
    """
    if "i64" in (a.form, b.form):
        return ""
    chunks = list(row_chunks(*a.shape))
    # the rows that differ tell most: they come first
    chunks.sort(key=lambda rows: not rows.start <= row < rows.stop)
    first, second = a.piece(chunks[0]), b.piece(chunks[0])
    live = [pattern for pattern in _candidates(first, second, twin) if pattern.fits(first, second)]
    for rows in chunks[1:]:
        if not live:
            break
        first, second = a.piece(rows), b.piece(rows)
        live = [pattern for pattern in live if pattern.fits(first, second)]
    return live[0].words if live else ""


def _candidates(first: MatrixRows, second: MatrixRows, twin: MatrixReader | None) -> Iterator[Pattern]:
    """Yield the patterns to test, the most specific first."""
    yield Pattern("columns 2j and 2j+1 are exchanged: nibbles in the wrong order", _pairs_exchanged)
    for words, fits in ONE_SIDED.items():
        yield Pattern(words.format("B"), fits)
        yield Pattern(words.format("A"), _reversed(fits))
    if twin is not None and twin.shape[1] == first.values.shape[1]:
        name = twin.parts["weight"].matrix
        yield Pattern(f"B has the values of {name} of A here", lambda a, b: _same(twin.piece(a.rows).values, b.values))
    factor = _factor(first.values, second.values)
    if factor:
        yield factor


def _reversed(fits: Fits) -> Fits:
    return lambda a, b: fits(b, a)


def _same(first: Values, second: Values) -> bool:
    return np.array_equal(first, second, equal_nan=True)


def _pairs_exchanged(a: MatrixRows, b: MatrixRows) -> bool:
    if a.values.shape[1] % 2:
        return False
    return _same(a.values[:, 0::2], b.values[:, 1::2]) and _same(a.values[:, 1::2], b.values[:, 0::2])


def _rounded_to_bf16(source: MatrixRows, harmed: MatrixRows) -> bool:
    return _same(_bf16(source.values), harmed.values)


def _bf16(values: Values) -> Values:
    """Round to bf16, to nearest with ties to even; NaN is kept."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return np.where(np.isnan(values), values, rounded.view(np.float32))


def _codes(piece: MatrixRows) -> Values | None:
    """Return the values of the codes without their scale; None for a format without scales."""
    raw = dict(piece.raw)
    if piece.form in ("fp4", "fp8"):
        return decode(piece.form, raw | {"scale": np.full_like(raw["scale"], E8M0_BIAS)})
    if piece.form == "nvfp4":
        ones = np.full_like(raw["weight_scale"], E4M3_ONE)
        return decode(piece.form, raw | {"weight_scale": ones, "weight_scale_2": np.ones_like(raw["weight_scale_2"])})
    return None


def _without_scale(source: MatrixRows, harmed: MatrixRows) -> bool:
    codes = _codes(source)
    return codes is not None and _same(codes, harmed.values)


def _scale_bytes_as_numbers(source: MatrixRows, harmed: MatrixRows) -> bool:
    codes = _codes(source) if "scale" in source.raw else None
    if codes is None:
        return False
    misread = codes * _per_value(source, source.raw["scale"].astype(np.float32))
    return _same(misread, harmed.values) or _same(_bf16(misread), harmed.values)


def _per_value(piece: MatrixRows, scale: Values) -> Values:
    """Expand an fp4 or fp8 block scale to one scale per value."""
    rows, columns = piece.values.shape
    if piece.form == "fp4":
        return scale.repeat(FP4_BLOCK, axis=1)
    return scale.repeat(FP8_BLOCK, axis=0)[:rows].repeat(FP8_BLOCK, axis=1)[:, :columns]


def _vanished(source: MatrixRows, harmed: MatrixRows) -> bool:
    return bool(np.all(np.abs(harmed.values) <= NEARLY_ZERO) and np.any(np.abs(source.values) > SOUND))


def _below_fp8(source: MatrixRows, harmed: MatrixRows) -> bool:
    if harmed.form != "fp8":
        return False
    one = decode("fp8", {**harmed.raw, "weight": np.full_like(harmed.raw["weight"], E4M3_ONE)})
    return bool(np.all(np.abs(source.values - harmed.values) <= one * np.float32(E4M3_HALF_STEP)))


# {} is the harmed side; each function takes the sound piece, then the harmed one
ONE_SIDED: dict[str, Fits] = {
    "{} holds the codes without their scale": _without_scale,
    "{} took the scale bytes as numbers: 120 as 120, not as 2^-7": _scale_bytes_as_numbers,
    "{} is zero, as when scale bytes are converted as numbers": _vanished,
    "{} is rounded to bf16": _rounded_to_bf16,
    "{} is rounded to FP8: the scales of a block differ too much for its range": _below_fp8,
}


def _factor(first: Values, second: Values) -> Pattern | None:
    """Return a pattern if B is A times a constant, estimated at the largest value of A.

    None for matrices with too few values to tell.
    """
    if first.size < FEW:
        return None
    finite = np.where(np.isfinite(first) & np.isfinite(second), np.abs(first), 0)
    largest = np.unravel_index(int(finite.argmax()), finite.shape)
    if not finite[largest] or not second[largest]:
        return None
    factor = np.float32(second[largest] / first[largest])
    if abs(factor - 1) < 2.0**-6:
        return None
    mantissa, exponent = np.frexp(factor)
    if mantissa == 0.5:
        return Pattern(
            f"every value of B is 2^{exponent - 1} times that of A", lambda a, b: _same(a.values * factor, b.values)
        )
    return Pattern(
        f"every value of B is about {factor:.4g} times that of A",
        # one rounding to bf16 apart
        lambda a, b: np.allclose(a.values * factor, b.values, rtol=2.0**-7, atol=0, equal_nan=True),
    )
