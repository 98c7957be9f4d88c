"""`dsv4 trace`: find where two computations of the same tokens diverge."""

from dsv4cli.command import Application
from dsv4cli.commands.trace.bisect import BISECT_EXAMPLES, bisect
from dsv4cli.commands.trace.compare import COMPARE_EXAMPLES, compare
from dsv4cli.commands.trace.record import RECORD_EXAMPLES, record
from dsv4cli.options import epilog

trace = Application(
    help="Record what each block computes; find where two computations diverge.",
    epilog=epilog(
        "dsv4 trace record flash --out A",
        "dsv4 trace compare A B",
        "dsv4 trace bisect flash --backend torch",
    ),
)
trace.command(epilog=epilog(*RECORD_EXAMPLES))(record)
trace.command(epilog=epilog(*COMPARE_EXAMPLES))(compare)
trace.command(short_help="Find the first stage where two sides diverge.", epilog=epilog(*BISECT_EXAMPLES))(bisect)
