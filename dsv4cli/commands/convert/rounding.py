"""Report of `dsv4 convert` on tensors whose values the target layout cannot represent exactly."""

from itertools import islice
from typing import TYPE_CHECKING, Any

from dsv4cli.output import Output, counted

if TYPE_CHECKING:
    from dsv4cli.engine.conversion.job import Conversion

SHOWN = 8  # maximum rounded tensors listed on a terminal


def report_rounding(out: Output, conversion: "Conversion", device: Any, workers: int) -> dict[str, float]:
    """Print the tensors with the largest rounding errors. Return the relative error of each tensor that is rounded."""
    from dsv4cli.engine.conversion.rounding import rounded_matrices

    with out.counting("looking for values that will be rounded") as progress:
        found = rounded_matrices(conversion, device, workers, lambda done, total: progress(done, total, ""))
    if found:
        what = f"--to {conversion.target.name} rounds the values of {counted(len(found), 'tensor')}"
        out.warning(f"{what}; relative rounding errors, in a sample:")
    for name, error in islice(found.items(), SHOWN):
        out.status(f"  {name}  {error:.2g}")
    if len(found) > SHOWN:
        out.status(f"  and {len(found) - SHOWN:,} more, none larger; --json lists them")
    return found
