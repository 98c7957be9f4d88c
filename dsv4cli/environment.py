"""Environment settings of the program. `cli.py` reads them once; commands receive them as `context.obj`."""

from dataclasses import dataclass
from pathlib import Path

from dsv4cli.output import Colours


@dataclass(frozen=True)
class Environment:
    """The environment of one run of the program.

    Attributes:
        colours: Which of stdout and stderr may carry colors.
        term: The type of terminal, TERM.
        state_home: XDG_STATE_HOME, where `chat` keeps sessions; None if unset.
        torchrun: Whether torchrun started this process.
        hub_cache: The Hugging Face cache, which completion reads without importing huggingface_hub.
        serve_variables: Names of the variables that set options of `serve`.
    """

    colours: Colours
    term: str
    state_home: Path | None
    torchrun: bool
    hub_cache: Path
    serve_variables: tuple[str, ...] = ()
