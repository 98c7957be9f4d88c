"""Tool calls as they come: names and arguments of what is well formed, as soon as it is certain.

What is given is how the calls of `repair_reply` begin, whatever follows. Where the markup is not as the model was
taught to write it, nothing more is given until the end, which has the rest. A call's closing brace comes with the tag
behind the call: what stands between may be one more argument.
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

# the model misspells the first tag at times
_OPEN = re.compile(rf"\n\n<{DSML}(?:tool_calls|toolcalls|tool)>")
_STRAY = re.compile(rf"\s*</{DSML}[a-z_]*>")
_CLOSE = re.compile(rf"\n{{0,2}}</{DSML}tool_calls>")
_INVOKE = re.compile(rf'\n?<{DSML}invoke name="([^"<>\n]+)">')
_PARAMETER = re.compile(rf'\n{{0,2}}<{DSML}parameter name="([^"<>\n]+)" string="(true|false)">')
_INVOKE_CLOSE = re.compile(rf"\n{{0,2}}</{DSML}invoke>")
_PARAMETER_CLOSE = f"</{DSML}parameter>"
# how what ends a value begins; the official parser lets a line end behind the `<`
_MARKS = (f"</{DSML}", f"<\n/{DSML}", f"/{DSML}", f"<{DSML}", DSML)


@dataclass(frozen=True)
class CallDelta:
    """What is added to a call. index: which one, from 0. name: of the function, with the first delta of a call and only
    there. arguments: the next characters of the arguments as JSON."""

    index: int
    name: str = ""
    arguments: str = ""


@dataclass
class _Begun:
    """What has been given of a call."""

    name: str
    arguments: str = ""


class CallStream:
    """Reads the text of one block of calls. open_call: once it is finished, the index of a call that was begun and is
    none, for its end is missing; else None."""

    def __init__(self, declared: Declared) -> None:
        """declared: the parameters of functions; calls that hold theirs in another are not given before the end."""
        self._declared = declared
        self.open_call: int | None = None
        self._held = ""
        self._begun: list[_Begun] = []
        self._keys: list[str] = []  # of the parameters of the last call
        self._is_text = False
        self._brace = ""  # what ends the arguments of the last call, which was closed
        # reads what is held as far as it goes: whether it may go on. None: nothing more is certain
        self._read: Callable[[], bool] | None = self._opening
        self._deltas: list[CallDelta] = []

    def push(self, text: str) -> list[CallDelta]:
        """What a text of `ReplyStream`'s kind "calls" makes certain."""
        self._held += text
        while self._read is not None and self._read():
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self, calls: Sequence[ToolCall]) -> list[CallDelta]:
        """The rest of the calls that the whole text has."""
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
        """The text up to the end of the next tag."""
        tag, end, rest = self._held.partition(">")
        if not end:
            return None
        self._held = rest
        return tag + end

    def _opening(self) -> bool:
        """Before a block; closing tags without a call are nothing."""
        tag = self._tag()
        if tag is None:
            return False
        if not _STRAY.fullmatch(tag):
            self._read = self._between if _OPEN.fullmatch(tag) else None
        return True

    def _between(self) -> bool:
        """Before a call, or the end of the block."""
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
        """The call before, if there is one, has all its arguments."""
        if self._brace:
            self._give(self._brace)
        self._brace = ""

    def _inside(self) -> bool:
        """Within a call, before a parameter."""
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
        """Whether a parameter of this name is one for certain."""
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
    """A part of a text as a JSON string has it."""
    return to_json(text)[1:-1]
