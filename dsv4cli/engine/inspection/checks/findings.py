"""Rules for wrong or suspicious values, each with its bound and the reason for it."""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from dsv4cli.engine.inspection.checks.measure import ENOUGH, SCALE_CODES, BadRows, Measurement
from dsv4cli.engine.inspection.checks.statistics import Statistics

# wrong: the model does not compute what its publisher meant. suspicious: a person should know why
Severity = Literal["wrong", "suspicious"]
# gain of a matrix (factor on its input's RMS): RMS * sqrt(columns). Trained matrices have 1 to 10 (wo_a of Pro: 1.7);
# FP8 codes without their scales give thousands, FP4 codes 160 and more
GAIN: dict[Severity, float] = {"wrong": 256.0, "suspicious": 64.0}
# RMS over the median of the same matrix in all layers: trained layers are within a few times of each other; FP8 codes
# without their scales are 2^9 to 2^12 too large
SPREAD: dict[Severity, float] = {"wrong": 256.0, "suspicious": 32.0}
# minimum group size to tell which member is an outlier
MEMBERS = 3
# share of zeros above the median of the same matrix: a hole of a tenth of a tensor
HOLE = 0.1
# largest magnitude outside matrices: norms multiply, biases and sinks are added to numbers below 100
LARGEST: dict[Severity, float] = {"wrong": 1e8, "suspicious": 1e4}
# number of zeros of one sign that cannot be chance (p = 2^-64)
ZEROS = 64
# rows are looked up in these, nothing is multiplied by them
LOOKED_UP = {"embed", "markov_head.markov_w1"}
POSITION = re.compile(r"^(layers|mtp)\.\d+\.|(?<=experts\.)\d+\.")


@dataclass(frozen=True, slots=True)
class ValueFinding:
    """A wrong or suspicious property of a tensor. check: short name of the rule. message: the sentence."""

    tensor: str
    severity: Severity
    check: str
    message: str


@dataclass(frozen=True, slots=True)
class MeasuredMatrix:
    """The results for one matrix, after all its rows.

    Attributes:
        name: the weight's name.
        kind: name of the matrix without layer and expert.
        columns: 0 for a tensor that is not an operand of a matrix product.
        exponents: smallest and largest of its power-of-two scales.
    """

    name: str
    kind: str
    family: str
    columns: int
    statistics: Statistics
    exponents: tuple[int, int] | None
    findings: tuple[ValueFinding, ...]


def judge(found: Measurement) -> MeasuredMatrix:
    """Summarize a measurement, with the findings that need no comparison with other tensors."""
    weight, kind = found.weight, kind_of(found.weight.matrix)
    is_matrix = len(weight.shape) == 2 and weight.name.endswith(".weight") and kind not in LOOKED_UP
    columns = found.matrix.shape[1] if is_matrix else 0
    return MeasuredMatrix(
        name=weight.name,
        kind=kind,
        family=weight.family,
        columns=columns,
        statistics=found.statistics,
        exponents=_exponents(found),
        findings=(*_numbers(found), *_scales(found), *_magnitude(found, columns), *_table(found)),
    )


def kind_of(matrix: str) -> str:
    """Return the name shared by the same matrix of every layer and expert, as in `ffn.experts.w1`."""
    return POSITION.sub("", matrix).removesuffix(".weight")


def compare(found: Collection[MeasuredMatrix]) -> Iterator[ValueFinding]:
    """Yield the findings from comparing a matrix with the same matrix of other layers."""
    kinds: dict[str, list[MeasuredMatrix]] = defaultdict(list)
    for item in found:
        if item.columns and item.statistics.finite:
            kinds[item.kind].append(item)
    for items in kinds.values():
        if len(items) < MEMBERS:
            continue
        rms = sorted(item.statistics.rms for item in items)[len(items) // 2]
        zeros = sorted(_zero_share(item.statistics) for item in items)[len(items) // 2]
        for item in items:
            yield from _odd(item, rms, zeros)


def _odd(item: MeasuredMatrix, rms: float, zeros: float) -> Iterator[ValueFinding]:
    statistics = item.statistics
    ratio = statistics.rms / rms if rms else 1.0
    severity = _severity(ratio, SPREAD)
    of_kind = f"of {item.kind} in all layers"
    if severity:
        text = f"{item.name} has RMS {statistics.rms:.3g}, {ratio:,.0f} times the median {of_kind}"
        yield ValueFinding(item.name, severity, "magnitude", text)
    elif 0 < ratio < 1 / SPREAD["suspicious"]:
        text = f"{item.name} has RMS {statistics.rms:.3g}, 1/{1 / ratio:,.0f} of the median {of_kind}"
        yield ValueFinding(item.name, "suspicious", "magnitude", text)
    share = _zero_share(statistics)
    if zeros + HOLE < share < 1:
        text = f"{item.name} is {share:.0%} zeros, the median {of_kind} is {zeros:.0%}"
        yield ValueFinding(item.name, "suspicious", "zeros", text)


def _numbers(found: Measurement) -> Iterator[ValueFinding]:
    """Yield findings on values that are NaN or infinite, all equal, or were rounded to BF16."""
    name, statistics = found.weight.name, found.statistics
    if found.codes["nan"]:
        fnuz = "" if found.codes["-0"] else ", and no -0: they may be codes of the FNUZ variant"
        text = f"{name} has {_times(found.codes['nan'], 'the NaN code of e4m3, 0x7f or 0xff')}{fnuz}"
        yield ValueFinding(name, "wrong", "nan", text)
    elif statistics.not_finite and not _bad_scale(found):
        text = f"{name} has {statistics.not_finite:,} values of {statistics.count:,} that are NaN or infinite"
        yield ValueFinding(name, "wrong", "nan", text)
    if statistics.is_constant:
        # a bias or a norm that was never trained is possible, a matrix is not
        severity: Severity = "wrong" if len(found.weight.shape) == 2 and name.endswith(".weight") else "suspicious"
        check, text = ("constant", f"{statistics.low:.6g}") if statistics.low else ("zeros", "zero")
        yield ValueFinding(name, severity, check, f"{name} is {text} everywhere, all {statistics.count:,} values")
    if found.is_kept_wide and found.narrow and len(found.distinct) >= ENOUGH:
        text = f"{name} is F32, but all {statistics.count:,} values are BF16 numbers: it was BF16 once"
        yield ValueFinding(name, "suspicious", "narrow", text)
    plus, smallest = found.codes["+0"], found.codes["smallest"]
    # rounding alone gives half as many zeros as smallest codes; rows of zeros give many more
    if not found.codes["nan"] and not found.codes["-0"] and ZEROS <= plus <= 2 * smallest:
        text = f"{name} has {plus:,} zeros and no -0: its codes may be of the FNUZ variant, which has none"
        yield ValueFinding(name, "suspicious", "fnuz", text)


def _bad_scale(found: Measurement) -> bool:
    scale = found.block_scale
    if scale is None or scale.dtype not in SCALE_CODES:
        return bool(found.scale_numbers.wrong)
    return bool(found.scale[list(SCALE_CODES[scale.dtype].nan)].any())


def _scales(found: Measurement) -> Iterator[ValueFinding]:
    for role, number in found.numbers.items():
        if not (math.isfinite(number) and number > 0):
            name = found.matrix.parts[role].name
            yield ValueFinding(name, "wrong", "scale", f"{name} is {number:g}, not a scale")
    scale = found.block_scale
    if scale is None:
        return
    if scale.dtype not in SCALE_CODES:
        yield from _scale_numbers(found, scale.name)
        return
    codes, name, count = SCALE_CODES[scale.dtype], scale.name, int(found.scale.sum())
    nan = int(found.scale[list(codes.nan)].sum())
    if nan:
        yield ValueFinding(name, "wrong", "scale", f"{name} has {_times(nan, f'byte {codes.nan[0]}, which is NaN')}")
    if found.hidden:
        what = f"byte {codes.zero[0]}, which is {'2^-127' if scale.dtype == 'F8_E8M0' else 'zero'}"
        yield ValueFinding(
            name, "wrong", "scale", f"{name} has {_times(found.hidden, what)}, over codes that are not zero"
        )
    if count and int(found.scale[codes.one]) == count:
        text = f"{name} is 1 everywhere (byte {codes.one}): {found.weight.name} is read without a scale"
        yield ValueFinding(name, "wrong", "scale", text)
    if scale.dtype == "F8_E4M3" and found.scale[0x81:0xFF].any():
        yield ValueFinding(name, "wrong", "scale", f"{name} has negative scales")


def _scale_numbers(found: Measurement, name: str) -> Iterator[ValueFinding]:
    """Yield findings on fp32 block scales."""
    numbers = found.scale_numbers
    if numbers.wrong:
        yield ValueFinding(name, "wrong", "scale", f"{name} has {_times(numbers.wrong, 'a number that is no scale')}")
    if numbers.count and numbers.ones == numbers.count:
        text = f"{name} is 1 everywhere: {found.weight.name} is read without a scale"
        yield ValueFinding(name, "wrong", "scale", text)


def _magnitude(found: Measurement, columns: int) -> Iterator[ValueFinding]:
    name, statistics = found.weight.name, found.statistics
    gain = statistics.rms * math.sqrt(columns)
    severity = _severity(gain, GAIN)
    if severity:
        text = f"{name} has RMS {statistics.rms:.3g} in {columns:,} columns, makes its input {gain:,.0f} times larger"
        hint = ", as codes without their scales do" if severity == "wrong" else ""
        yield ValueFinding(name, severity, "magnitude", text + hint)
    severity = _severity(statistics.largest, LARGEST) if not columns and found.matrix.form != "i64" else None
    if severity:
        yield ValueFinding(name, severity, "magnitude", f"{name} has a value of magnitude {statistics.largest:.3g}")


def _table(found: Measurement) -> Iterator[ValueFinding]:
    name = found.weight.name
    bad: tuple[tuple[BadRows, str, str], ...] = (
        (found.outside, "names an expert that does not exist", "range"),
        (found.twice, "names an expert twice", "twice"),
    )
    for rows, words, check in bad:
        if rows.count:
            others = f" ({rows.count:,} rows do)" if rows.count > 1 else ""
            text = f"{name}: row {rows.row}, {list(rows.ids)}, {words}{others}"
            yield ValueFinding(name, "wrong", check, text)


def _exponents(found: Measurement) -> tuple[int, int] | None:
    if found.matrix.form not in ("fp4", "fp8"):
        return None
    present = found.scale.nonzero()[0]
    return (int(present[0]) - 127, int(present[-1]) - 127) if present.size else None


def _severity(value: float, bounds: dict[Severity, float]) -> Severity | None:
    return next((severity for severity, bound in bounds.items() if value > bound), None)


def _zero_share(statistics: Statistics) -> float:
    return statistics.zeros / statistics.finite


def _times(count: int, what: str) -> str:
    return f"{count:,} times {what}" if count > 1 else f"once {what}"
