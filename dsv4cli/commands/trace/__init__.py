"""`dsv4 trace`: where two computations of the same tokens part."""

from dsv4cli.command import Application
from dsv4cli.commands.trace.bisect import bisect
from dsv4cli.commands.trace.compare import compare
from dsv4cli.commands.trace.record import record
from dsv4cli.options import epilog

trace = Application(
    help="Record what each block computes; find where two sides part.",
    epilog=epilog(
        "dsv4 trace record flash --out A",
        "dsv4 trace compare A B",
        "dsv4 trace bisect flash --backend torch",
    ),
)
trace.command(
    epilog=epilog(
        "dsv4 trace record --out A",
        'dsv4 trace record flash --prompt "What is 17 + 25?" --steps 16 --out A',
        "dsv4 trace record flash --ids 5,6,7 --layers 0-3 --what block,router --out A",
        "dsv4 trace record flash --like A --tp 2 --out B",
    )
)(record)
trace.command(
    epilog=epilog(
        "dsv4 trace compare A B", "dsv4 trace compare A B --stages", "dsv4 trace compare A B --plot parts.png"
    )
)(compare)
trace.command(
    short_help="Find the first stage where two sides part.",
    epilog=epilog(
        "dsv4 trace bisect flash --backend torch",
        "dsv4 trace bisect flash --against OUT",
        "dsv4 trace bisect nano --prefill-chunk 1",
        "dsv4 trace bisect nano --drafts",
        "dsv4 trace bisect nano --slots",
    ),
)(bisect)
