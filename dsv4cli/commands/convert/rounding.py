"""What `dsv4 convert` says about tensors whose values the target does not have."""

from itertools import islice
from typing import TYPE_CHECKING, Any

from dsv4cli.output import Output, counted

if TYPE_CHECKING:
    from dsv4cli.engine.conversion.job import Conversion

SHOWN = 8  # rounded tensors that are listed: what a person reads at once


def report_rounding(out: Output, conversion: "Conversion", device: Any, workers: int) -> dict[str, float]:
    """Print the tensors that will be rounded most, and return the relative error of each that will be rounded."""
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
