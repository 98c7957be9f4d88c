"""Decoding of stored bytes to numbers in numpy, independent of the engine, for checks and comparisons; no torch."""

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.config.formats import STORAGE, FormatName, Role
from dsv4cli.kernels.formats import E2M1_VALUES, E8M0_BIAS, E8M0_NAN, FP4_BLOCK, FP8_BLOCK, NVFP4_BLOCK

Raw = NDArray[Any]
Values = NDArray[np.float32]
Form = FormatName | Literal["i64"]
# format of tensors that are not matrices, by dtype
PLAIN: Mapping[str, FormatName] = {"BF16": "bf16", "F32": "f32"}


def form_of(weight: TensorSpec) -> Form:
    """Return the storage format of a matrix or other tensor for `decode`, or i64."""
    if weight.form is not None:
        return weight.form
    return PLAIN.get(weight.dtype, "i64")


def words_of(weight: TensorSpec) -> str:
    """Return the readable name of a tensor's storage format."""
    form = form_of(weight)
    return form if form == "i64" else STORAGE[form].words


def scale_rows(form: Form, rows: slice) -> slice:
    """Return the rows of a scale that cover these rows of its weight; for FP8 they start at a multiple of 128."""
    block = 1 if form == "i64" else STORAGE[form].rows
    if block == 1 or rows == slice(None):
        return rows
    assert rows.start % block == 0
    return slice(rows.start // block, -(-rows.stop // block))


# an absurd scale shows in the values
@np.errstate(over="ignore", invalid="ignore")
def decode(form: Form, arrays: Mapping[Role, Raw]) -> Values:
    """Return the values of a matrix, or of rows of it, from the raw arrays of its parts (`StoredModel.read`).

    Returns float32 [rows, columns], exact for power-of-two scales, else rounded to float32. -0 is kept; e4m3 code 0x7f
    and e8m0 byte 255 become NaN. A float32 array is returned unchanged.
    """
    weight = arrays["weight"]
    if form == "f32":
        return weight
    if form == "bf16":
        return (weight.astype(np.uint32) << 16).view(np.float32)
    if form == "fp4":
        return _scaled(_codes(weight), e8m0_values()[arrays["scale"]], FP4_BLOCK)
    if form == "nvfp4":
        scale = e4m3_values()[arrays["weight_scale"]] * np.float32(arrays["weight_scale_2"])
        return _scaled(_codes(weight), scale, NVFP4_BLOCK)
    assert form in ("fp8", "fp8_f32"), form
    rows, columns = weight.shape
    scale = arrays["scale"] if form == "fp8_f32" else e8m0_values()[arrays["scale"]]
    scale = scale.repeat(FP8_BLOCK, axis=0)[:rows]
    if columns % FP8_BLOCK:
        return e4m3_values()[weight] * scale.repeat(FP8_BLOCK, axis=1)[:, :columns]
    return _scaled(e4m3_values()[weight], scale, FP8_BLOCK)


def _codes(packed: Raw) -> Values:
    """Unpack e2m1 codes to values: [rows, columns / 2] -> [rows, columns], low nibble first."""
    rows, half = packed.shape
    return np.take(_e2m1_pairs(), packed, axis=0).reshape(rows, 2 * half)


def _scaled(values: Values, scale: Values, block: int) -> Values:
    """Multiply each block of a row by its scale, in place: values [rows, n * block], scale [rows, n]."""
    rows, columns = values.shape
    blocks = values.reshape(rows, columns // block, block)
    blocks *= scale[:, :, None]
    return values


@cache
def e8m0_values() -> Values:
    """Return the 256 values of e8m0: 2 ** (byte - 127), NaN for 255."""
    values = np.ldexp(1.0, np.arange(256) - E8M0_BIAS)
    values[E8M0_NAN] = np.nan
    return values.astype(np.float32)


@cache
def e4m3_values() -> Values:
    """Return the 256 values of e4m3 (fn): bias 7, subnormals below 2 ** -6, NaN for 0x7f and 0xff, no infinity."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    magnitude[[0x7F, 0xFF]] = np.nan
    return np.copysign(magnitude, np.where(code < 128, 1, -1)).astype(np.float32)


@cache
def _e2m1_pairs() -> Values:
    """Return the two values of each byte: [256, 2]."""
    byte = np.arange(256)
    values = np.array(E2M1_VALUES, np.float32)
    return np.stack((values[byte & 15], values[byte >> 4]), axis=-1)
