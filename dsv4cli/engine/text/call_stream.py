"""Streaming of tool calls: names and arguments are returned as soon as they are certain.

The result is always a prefix of what `repair_reply` returns, whatever text follows. If the markup deviates from the
format that the model was trained on, nothing more is returned until the end. A call's closing brace is returned with
the tag after the call, because one more argument may come before that tag.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsv4cli.engine.text.call_reader import is_json
from dsv4cli.engine.text.lookalikes import unmarked
from dsv4cli.engine.text.plain_text import open_tail
from dsv4cli.engine.text.prompt_text import to_json
from dsv4cli.engine.text.reply import ToolCall
from dsv4cli.engine.text.tokens import DSML
from dsv4cli.engine.text.wrapped_arguments import Declared, may_wrap

# the model sometimes misspells the first tag
_OPEN = re.compile(rf"\n\n<{DSML}(?:tool_calls|toolcalls|tool)>")
_STRAY = re.compile(rf"\s*</{DSML}[a-z_]*>")
_CLOSE = re.compile(rf"\n{{0,2}}</{DSML}tool_calls>")
_INVOKE = re.compile(rf'\n?<{DSML}invoke name="([^"<>\n]+)">')
_PARAMETER = re.compile(rf'\n{{0,2}}<{DSML}parameter name="([^"<>\n]+)" string="(true|false)">')
_INVOKE_CLOSE = re.compile(rf"\n{{0,2}}</{DSML}invoke>")
_PARAMETER_CLOSE = f"</{DSML}parameter>"
# how the end of a value begins; the official parser allows a line break after the `<`
_MARKS = (f"</{DSML}", f"<\n/{DSML}", f"/{DSML}", f"<{DSML}", DSML)


@dataclass(frozen=True)
class CallDelta:
    """An addition to a tool call.

    Attributes:
        index: the call, counted from 0.
        name: the function's name, only in the first delta of a call.
        arguments: the next characters of the arguments' JSON.
    """

    index: int
    name: str = ""
    arguments: str = ""


@dataclass
class _Begun:
    """The part of a call that has been returned."""

    name: str
    arguments: str = ""


class CallStream:
    """Reads the text of one block of calls as it is generated.

    Attributes:
        open_call: after `finish`, the index of a call that was started but is not part of the answer, because its end
            is missing; None otherwise.
    """

    def __init__(self, declared: Declared) -> None:
        """Create the stream.

        Args:
            declared: the parameters of each function. Calls that wrap their arguments in another parameter are returned
                only at the end.
        """
        self._declared = declared
        self.open_call: int | None = None
        self._held = ""
        self._begun: list[_Begun] = []
        self._keys: list[str] = []  # parameter names of the last call
        self._is_text = False
        self._brace = ""  # the end of the last call's arguments, pending since it was closed
        # parser state: consumes held text, and returns True if more can be read; None: nothing more is certain
        self._read: Callable[[], bool] | None = self._opening
        self._deltas: list[CallDelta] = []

    def push(self, text: str) -> list[CallDelta]:
        """Add text of the kind "calls" from `ReplyStream`. Return the deltas that are now certain."""
        self._held += text
        while self._read is not None and self._read():
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self, calls: Sequence[ToolCall]) -> list[CallDelta]:
        """Return the rest of the calls in the complete answer."""
        self._read = None
        for index, call in enumerate(calls):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if index == len(self._begun):
                self._begin(name)
            self._give(arguments[len(self._begun[index].arguments) :], index)
        self.open_call = len(calls) if len(calls) < len(self._begun) else None
        deltas, self._deltas = self._deltas, []
        return deltas

    def _begin(self, name: str) -> None:
        self._begun.append(_Begun(unmarked(name)))
        self._deltas.append(CallDelta(len(self._begun) - 1, unmarked(name)))

    def _give(self, arguments: str, index: int = -1) -> None:
        arguments = unmarked(arguments)
        if arguments:
            index %= len(self._begun)
            self._begun[index].arguments += arguments
            self._deltas.append(CallDelta(index, arguments=arguments))

    def _tag(self) -> str | None:
        """Remove and return the text up to the end of the next tag, or return None if the tag is incomplete."""
        tag, end, rest = self._held.partition(">")
        if not end:
            return None
        self._held = rest
        return tag + end

    def _opening(self) -> bool:
        """Read the tag that opens a block. Closing tags without a call are ignored."""
        tag = self._tag()
        if tag is None:
            return False
        if not _STRAY.fullmatch(tag):
            self._read = self._between if _OPEN.fullmatch(tag) else None
        return True

    def _between(self) -> bool:
        """Read the tag that opens a call or closes the block."""
        tag = self._tag()
        if tag is None:
            return False
        named = _INVOKE.fullmatch(tag)
        if _CLOSE.fullmatch(tag):
            self._close_call()
            self._read = None if self._begun else self._opening
        elif named is None or DSML in named[1]:
            self._read = None
        else:
            self._close_call()
            self._begin(named[1])
            self._keys = []
            self._read = self._inside
        return True

    def _close_call(self) -> None:
        """Return the closing brace of the previous call, if there is one: its arguments are now complete."""
        if self._brace:
            self._give(self._brace)
        self._brace = ""

    def _inside(self) -> bool:
        """Read the tag that opens a parameter or closes the call."""
        tag = self._tag()
        if tag is None:
            return False
        named = _PARAMETER.fullmatch(tag)
        if _INVOKE_CLOSE.fullmatch(tag):
            self._brace = "}" if self._keys else "{}"
            self._read = self._between
        elif named is None or not self._may_follow(named[1]):
            self._read = None
        else:
            self._keys.append(named[1])
            self._read, self._is_text = self._value, named[2] == "true"
            if self._is_text:
                self._give(self._before_value() + '"')
        return True

    def _may_follow(self, key: str) -> bool:
        """Return True if a parameter of this name is certainly an argument of the call."""
        wraps = may_wrap(self._declared, self._begun[-1].name, unmarked(key))
        return DSML not in key and key not in self._keys and not wraps

    def _before_value(self) -> str:
        return f"{', ' if len(self._keys) > 1 else '{'}{to_json(self._keys[-1])}: "

    def _value(self) -> bool:
        at = self._held.find(DSML)
        if at < 0:
            if self._is_text:
                certain = len(self._held) - open_tail(self._held, _MARKS)
                self._give(_escaped(self._held[:certain]))
                self._held = self._held[certain:]
            return False
        value, end = self._held[: max(at - 2, 0)], self._held[max(at - 2, 0) :]
        if len(end) < len(_PARAMETER_CLOSE) and _PARAMETER_CLOSE.startswith(end):
            return False
        if not end.startswith(_PARAMETER_CLOSE) or not (self._is_text or is_json(value)):
            self._read = None
            return False
        self._give(_escaped(value) + '"' if self._is_text else self._before_value() + value)
        self._held = end[len(_PARAMETER_CLOSE) :]
        self._read = self._inside
        return True


def _escaped(text: str) -> str:
    """Return a part of a text as it appears in a JSON string."""
    return to_json(text)[1:-1]
