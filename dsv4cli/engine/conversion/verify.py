"""Whether a conversion kept the values: the output is read again and compared with the source, by other code than wrote
it; numpy, no torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from dsv4cli.engine.compare import Comparison, row_chunks
from dsv4cli.engine.layout import Role, TensorSpec
from dsv4cli.engine.stored import StoredModel
from dsv4cli.engine.values import Values, decode, form_of, scale_rows

# of the row pieces of a matrix, one in this many is compared when a sample is enough
SAMPLE = 16
# pairs of formats whose conversion loses nothing or is refused, beside a format and itself
EXACT_PAIRS = {("fp4", "bf16"), ("fp8", "bf16"), ("fp4", "fp8"), ("fp4", "nvfp4"), ("bf16", "f32")}
Progress = Callable[[int, int], None]


@dataclass
class Verification:
    """What the comparison of an output with its source found.

    exact: matrices and plain tensors whose compared values are the same bit for bit. errors: relative L2 error of each
    of the others, the worst first. wrong: those that the conversion should have kept exact. compared, values: values
    compared, and of all of them.
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
    """Compares matrices of the output, under their official names, with the source; the pieces of a sample are spread
    over the rows of each, and other for each matrix.

    copies: the matrices, and which of the places of each are compared; 0 alone where the output has it once.

    Raises what reading raises.
    """
    ours, theirs = source.matrices(), output.matrices()
    result = Verification()
    total = sum(len(places) * _count(theirs[name]["weight"]) for name, places in copies.items())

    def compare(job: tuple[int, str]) -> tuple[str, Comparison]:
        number, name = job
        comparison = Comparison()
        for rows in _pieces(theirs[name]["weight"], None if full else number):
            expected = _values(source, ours[source_name(name)], rows)
            for copy in copies[name]:
                comparison.add(expected, _values(output, theirs[name], rows, copy), rows.start)
        return name, comparison

    with ThreadPoolExecutor(workers) as pool:
        for name, comparison in pool.map(compare, enumerate(copies)):
            _enter(result, name, comparison, _pair(ours[source_name(name)], theirs[name]))
            result.values += len(copies[name]) * _count(theirs[name]["weight"])
            if progress is not None:
                progress(result.values, total)
    result.errors = dict(sorted(result.errors.items(), key=lambda entry: -entry[1]))
    return result


def _enter(result: Verification, name: str, comparison: Comparison, pair: tuple[str, str]) -> None:
    result.compared += comparison.values
    if comparison.exact:
        result.exact.append(name)
        return
    result.errors[name] = comparison.relative_error
    if pair[0] == pair[1] or pair in EXACT_PAIRS:
        result.wrong.append(name)


def _pieces(weight: TensorSpec, sample: int | None) -> Iterator[slice]:
    """The rows to compare: all, or every SAMPLE-th piece, counted from another one for each matrix."""
    rows, columns = weight.shape[0], max(_count(weight) // max(weight.shape[0], 1), 1)
    pieces = list(row_chunks(rows, columns))
    yield from pieces if sample is None else pieces[sample % min(SAMPLE, max(len(pieces), 1)) :: SAMPLE]


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
    """Values of a matrix or plain tensor."""
    count = 1
    for size in weight.shape[:-1]:
        count *= size
    return count * (weight.columns or weight.shape[-1])
