"""Wrapping of messages at the width of a terminal; standard library only."""

import os
import re
import textwrap
from typing import TextIO

# indentation of wrapped lines on a narrow terminal
FOLDED = "    "
# the space between a number and its unit
QUANTITY = re.compile(r"(?<=\d) (?=(?:s|ms|min|h|%|[kMG]B|tokens?(?:/s)?)(?:\W|$))")


def folded(text: str, stream: TextIO) -> str:
    """Return a line wrapped between words at the terminal's width; unchanged if the stream is not a terminal.

    A number stays on the line of its unit.
    """
    if not stream.isatty():
        return text
    width = os.get_terminal_size(stream.fileno()).columns
    if width <= len(FOLDED) or len(text) <= width:
        return text
    bound = QUANTITY.sub("\0", text)
    lines = textwrap.wrap(bound, width, subsequent_indent=FOLDED, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")
