"""Verifies a conversion: reads the output again and compares it with the source, in separate code. numpy, no torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from dsv4cli.engine.checkpoint.compare import Comparison, row_chunks
from dsv4cli.engine.checkpoint.gguf.model import GgufIdentity
from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.checkpoint.sizes import stored_bytes
from dsv4cli.engine.checkpoint.stored import StoredModel
from dsv4cli.engine.checkpoint.values import Values, decode, form_of, scale_rows
from dsv4cli.engine.config.formats import Role
from dsv4cli.engine.system.threads import Progress

# with --verify sample, one in this many pieces of rows is compared
SAMPLE = 16
# pairs of formats whose conversion is exact or is refused; so is every format to itself
EXACT_PAIRS = {("fp4", "bf16"), ("fp8", "bf16"), ("fp4", "fp8"), ("fp4", "nvfp4"), ("bf16", "f32")}
EXACT_PAIRS |= {("fp8", "fp8_f32"), ("fp4", "fp8_f32")}


@dataclass
class Verification:
    """The result of comparing an output with its source.

    Attributes:
        exact: matrices and plain tensors whose compared values are bit-identical.
        errors: relative L2 error of each of the others, worst first.
        wrong: those in `errors` that the conversion should have kept exact.
        compared, values: values compared, and in total.
    """

    compared: int = 0
    values: int = 0
    exact: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def verify(
    source: StoredModel,
    output: StoredModel,
    source_name: Callable[[str], str],
    copies: Mapping[str, Sequence[int]],
    *,
    full: bool,
    workers: int,
    progress: Progress | None = None,
) -> Verification:
    """Compare matrices of the output, by official name, with the source.

    A sample is spread over the rows of each matrix, at different rows for different matrices.

    Args:
        copies: the matrices, and which locations of each to compare; 0 if the output has it once.
        progress: called with bytes of the output read so far, and in total.

    Raises what reading raises.
    """
    ours, theirs = source.matrices(), output.matrices()
    result = Verification()
    numbers = {name: None if full else number for number, name in enumerate(copies)}
    read = {name: len(copies[name]) * _bytes_read(theirs[name], number) for name, number in numbers.items()}
    done, total = 0, sum(read.values())

    def compare(name: str) -> tuple[str, Comparison]:
        comparison = Comparison()
        for rows in _pieces(theirs[name]["weight"], numbers[name]):
            expected = _values(source, ours[source_name(name)], rows)
            for copy in copies[name]:
                comparison.add(expected, _values(output, theirs[name], rows, copy), rows.start)
        return name, comparison

    with ThreadPoolExecutor(workers) as pool:
        for name, comparison in pool.map(compare, copies):
            exact = not _is_rounded(output, theirs[name]) and is_exact(*_pair(ours[source_name(name)], theirs[name]))
            _enter(result, name, comparison, exact)
            result.values += len(copies[name]) * _count(theirs[name]["weight"])
            done += read[name]
            if progress is not None:
                progress(done, total)
    result.errors = dict(sorted(result.errors.items(), key=lambda entry: -entry[1]))
    return result


def is_exact(form: str, target: str) -> bool:
    """Return whether a conversion between these formats loses nothing, or is refused."""
    return form == target or (form, target) in EXACT_PAIRS


def _is_rounded(output: StoredModel, parts: Mapping[Role, TensorSpec]) -> bool:
    """Return whether values were rounded to codes that are read back as fp32."""
    return isinstance(output.identity, GgufIdentity) and output.identity.stored_type(parts["weight"]) == "Q8_0"


def _enter(result: Verification, name: str, comparison: Comparison, exact: bool) -> None:
    result.compared += comparison.values
    if comparison.exact:
        result.exact.append(name)
        return
    result.errors[name] = comparison.relative_error
    if exact:
        result.wrong.append(name)


def _pieces(weight: TensorSpec, sample: int | None) -> Iterator[slice]:
    """Yield the rows to compare: all, or every SAMPLE-th piece with a different start for each matrix."""
    rows, columns = weight.shape[0], max(_count(weight) // max(weight.shape[0], 1), 1)
    pieces = list(row_chunks(rows, columns))
    yield from pieces if sample is None else pieces[sample % min(SAMPLE, max(len(pieces), 1)) :: SAMPLE]


def _bytes_read(parts: Mapping[Role, TensorSpec], sample: int | None) -> int:
    """Return the bytes of a stored matrix that a comparison reads."""
    rows = sum(piece.stop - piece.start for piece in _pieces(parts["weight"], sample))
    return sum(map(stored_bytes, parts.values())) * rows // max(parts["weight"].shape[0], 1)


def _values(model: StoredModel, parts: Mapping[Role, TensorSpec], rows: slice, copy: int = 0) -> Values:
    form = form_of(parts["weight"])
    arrays = {
        role: model.read(spec, scale_rows(form, rows) if spec.is_scale else rows, copy) for role, spec in parts.items()
    }
    values = arrays["weight"] if form == "i64" else decode(form, arrays)
    return values.reshape(len(values), -1)


def _pair(ours: Mapping[Role, TensorSpec], theirs: Mapping[Role, TensorSpec]) -> tuple[str, str]:
    return form_of(ours["weight"]), form_of(theirs["weight"])


def _count(weight: TensorSpec) -> int:
    """Return the number of values of a matrix or plain tensor."""
    count = 1
    for size in weight.shape[:-1]:
        count *= size
    return count * (weight.columns or weight.shape[-1])
