"""Parser for tool calls in damaged markup. A call is read exactly as written, or left out; none lacks an argument."""

import json
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from dsv4cli.engine.text.markup import BEGUN_NAMES, BLOCK_NAMES, MARKS, TAG_NAMES
from dsv4cli.engine.text.plain_text import open_tail
from dsv4cli.engine.text.prompt_text import from_json, to_json
from dsv4cli.engine.text.reply import ToolCall, excerpt
from dsv4cli.engine.text.tokens import DSML

# the required parameters of each declared function
Required = Mapping[str, Set[str]]

_KNOWN = "|".join(sorted(TAG_NAMES, key=len, reverse=True))
_CLOSING = rf"(?:<\n?)?/{DSML} ?(?P<closed>{_KNOWN})\b(?:\s*>)?"
_OPENING = rf"(?:<\n?)?{DSML} ?(?P<opened>{_KNOWN})\b(?P<attributes>[^<>]*)>?"
# a mark without a known name, with the rest of its tag if there is one, or a tag that was cut off within its name
_REST = rf'\w+(?:\s+\w+="[^"<>]*")*\s*>| ?(?:{"|".join(BEGUN_NAMES)})\Z'
_OTHER = rf"(?:<\n?)?/?{DSML}(?:{_REST})?"

_TAG = re.compile(f"{_CLOSING}|{_OPENING}|{_OTHER}")
# tags without the mark, which the model sometimes omits; outside a block and inside a value they are text
_BARE_CLOSING = rf"</(?P<bare_closed>{_KNOWN})\s*>"
_BARE_OPENING = rf"<(?P<bare_opened>{_KNOWN})\b(?P<bare_attributes>[^<>]*)>"
_TAG_OF_BLOCK = re.compile(f"{_TAG.pattern}|{_BARE_CLOSING}|{_BARE_OPENING}")
_TAG_OF_BARE_VALUE = re.compile(rf"{_TAG.pattern}|</(?P<bare_closed>param|parameter)\s*>")

_ATTRIBUTE = re.compile(rf'\s*(\w+)="((?:(?!{DSML})[^"<>\n])+)"')


@dataclass(frozen=True)
class _Tag:
    """A tag in the markup.

    Attributes:
        kind: "calls", "invoke", "parameter", or "" for markup that is not a tag of a call.
        bare: whether the tag lacks the DSML mark.
    """

    kind: str
    closes: bool
    attributes: dict[str, str] | None  # None if they cannot be parsed
    bare: bool
    start: int
    end: int


@dataclass
class _OpenValue:
    """A parameter whose value is being read."""

    name: str
    kind: str | None  # value of the attribute `string`
    bare: bool
    text: str = ""
    broken: bool = False  # it contains markup


@dataclass
class _OpenCall:
    """A call that is being read; `fault` is why it is left out, empty if it is sound."""

    name: str
    arguments: dict[str, str] = field(default_factory=dict)
    text: str = ""  # text outside of parameters
    fault: str = ""


class CallReader:
    """Reads the markup of an answer's calls.

    Attributes:
        calls: the complete calls. All calls after one that is left out are left out too, because they may depend on it.
        loose: the text outside of tags and calls.
        words: descriptions of what was repaired or left out.
    """

    def __init__(self, markup: str, ended: bool, required: Required) -> None:
        """Read the whole markup.

        Args:
            ended: True if the model ended the answer, False if the answer was cut off.
        """
        self.calls: list[ToolCall] = []
        self.loose = ""
        self.words: list[str] = []
        self._markup, self._ended, self._required = markup, ended, required
        self._call: _OpenCall | None = None
        self._value: _OpenValue | None = None
        self._in_block = False
        self._sealed = False  # the last call was closed, and its block too
        self._over = False  # a call was left out, so that all later ones are
        self._read()

    def _read(self) -> None:
        at = 0
        while (tag := self._next_tag(at)) is not None:
            self._take_text(self._markup[at : tag.start])
            self._take_tag(tag)
            at = tag.end
        rest = self._markup[at:]
        self._take_text(rest[: len(rest) - open_tail(rest, MARKS)] if self._in_block else rest)
        if self._value is not None:
            self._fail("was cut off")
        if self._call is not None:
            self._close_call(whole=False, follows=False)

    def _next_tag(self, at: int) -> _Tag | None:
        pattern = _TAG
        if self._value is None and (self._in_block or self._call is not None):
            pattern = _TAG_OF_BLOCK
        elif self._value is not None and self._value.bare:
            pattern = _TAG_OF_BARE_VALUE
        found = pattern.search(self._markup, at)
        if found is None:
            return None
        parts: dict[str, str | None] = {"bare_closed": None, "bare_opened": None} | found.groupdict()
        closed, opened = parts["closed"] or parts["bare_closed"], parts["opened"] or parts["bare_opened"]
        attributes = _attributes((parts["attributes"] or parts.get("bare_attributes") or "") if opened else "")
        bare = parts["closed"] is None and parts["opened"] is None
        return _Tag(_kind(closed or opened or ""), closed is not None, attributes, bare, *found.span())

    def _take_text(self, text: str) -> None:
        if self._value is not None:
            if self._value.broken and text:
                self._fail(f"has markup inside the parameter {self._value.name}")
            self._value.text += text
        elif self._call is not None:
            self._call.text += text
        elif text.strip():
            self.loose += text

    def _take_tag(self, tag: _Tag) -> None:
        if self._value is not None:
            if not tag.kind:
                self._value.broken = True
                return
            self._close_value(closed=tag.kind == "parameter" and tag.closes)
            if tag.kind == "parameter" and tag.closes:
                return
        if tag.kind == "calls":
            self._sealed = tag.closes and self._call is None
            self._in_block = not tag.closes
            self._close_call(whole=False)
        elif tag.kind == "invoke":
            self._close_call(whole=tag.closes)
            if not tag.closes:
                self._open_call(tag)
        elif tag.kind == "parameter" and not tag.closes:
            self._open_value(tag)
        elif not tag.kind:
            self._take_mark()

    def _take_mark(self) -> None:
        """Handle markup that is not a tag of a call. Inside a block it may be a damaged one."""
        if self._call is not None:
            self._fail("has markup between its parameters")
        elif self._in_block:
            self.words.append("markup between the calls cannot be read")
            self._over = True

    def _open_call(self, tag: _Tag) -> None:
        name = (tag.attributes or {}).get("name")
        self._call, self._sealed = _OpenCall(name or ""), False
        if name is None:
            self._fail("without a name")

    def _open_value(self, tag: _Tag) -> None:
        attributes = tag.attributes or {}
        if self._call is None:
            self._leave_out_last()
            self._call = _OpenCall("", fault="without a name")
        if self._markup[tag.end - 1] != ">":
            self._fail("has a parameter whose tag does not end")
        elif "name" not in attributes:
            self._fail("has a parameter without a name")
        self._value = _OpenValue(attributes.get("name", ""), attributes.get("string"), tag.bare)

    def _leave_out_last(self) -> None:
        """Drop the last call if a parameter follows it, because the parameter may be an argument of that call."""
        if self.calls and not (self._sealed or self._over):
            name = self.calls.pop()["function"]["name"]
            self.words.append(f"a parameter follows the closed call of {name}, which is left out")
        self._over = True

    def _close_value(self, closed: bool) -> None:
        """Add the value to the call's arguments. An unclosed value must be JSON, because JSON shows where it ends."""
        value, self._value = self._value, None
        assert value is not None
        assert self._call is not None
        text = value.text if closed else value.text.strip().removesuffix("</parameter>")
        as_json = value.kind != "true" and is_json(text)
        if not (closed or as_json):
            self._fail(f"has the parameter {value.name}, which was not closed")
        elif not closed:
            self.words.append(f"the parameter {value.name} was not closed")
        elif value.broken:
            self.words.append(f"markup inside the parameter {value.name} was left out")
        if value.kind is None and _ATTRIBUTE.match(text):
            self._fail(f"has the parameter {value.name}, whose tag was closed early")
        elif value.name and value.kind not in ("true", "false"):
            self.words.append(f"the parameter {value.name} did not say whether it is text")
        argument = text if as_json else to_json(text)
        if self._call.arguments.setdefault(value.name, argument) != argument:
            self._fail(f"has the parameter {value.name} twice")

    def _fail(self, fault: str) -> None:
        if self._call is not None:
            self._call.fault = self._call.fault or fault

    def _close_call(self, whole: bool, follows: bool = True) -> None:
        """End the open call.

        Args:
            whole: the call was closed by its own tag.
            follows: another tag follows.
        """
        call, self._call = self._call, None
        if call is None:
            return
        names, arguments = self._arguments(call)
        if not whole and not ((follows or self._ended) and self._complete(call.name, names)):
            call.fault = call.fault or "was cut off"
        if call.fault or self._over:
            self._leave_out(call)
            return
        if not whole:
            self.words.append(f"the call of {call.name} was not closed")
        self.calls.append({"type": "function", "function": {"name": call.name, "arguments": arguments}})

    def _arguments(self, call: _OpenCall) -> tuple[Set[str], str]:
        """Return the names of the arguments, and the arguments as JSON."""
        text = call.text.strip()
        members = None if call.arguments else _members(text)
        if members is not None:
            self.words.append(f"the call of {call.name} had its arguments as one JSON object")
            return members, text
        if text:
            call.fault = call.fault or f"has text that belongs to no parameter: {excerpt(text)}"
        joined = ", ".join(f"{to_json(key)}: {value}" for key, value in call.arguments.items())
        return call.arguments.keys(), f"{{{joined}}}"

    def _complete(self, function: str, names: Set[str]) -> bool:
        """Return True if a call without a closing tag has all arguments that its function requires.

        If the function is unknown, one argument is enough.
        """
        required = self._required.get(function)
        return bool(names) if required is None else required <= names

    def _leave_out(self, call: _OpenCall) -> None:
        self._over = True
        if not call.name:
            self.words.append(f"a tool call {call.fault} was left out")
        elif call.fault:
            self.words.append(f"the call of {call.name} {call.fault}: it is left out")
        else:
            self.words.append(f"the call of {call.name} was left out, because it follows one that was")


def is_json(text: str) -> bool:
    """Return True if a text is JSON that every parser accepts."""
    try:
        from_json(text)
    except (ValueError, RecursionError):
        return False
    return True


def _kind(name: str) -> str:
    if name in BLOCK_NAMES:
        return "calls"
    return "parameter" if name == "param" else name


def _attributes(text: str) -> dict[str, str] | None:
    """Return the attributes of a tag, or None if its text contains anything else."""
    found = {(match[1], match[2]) for match in _ATTRIBUTE.finditer(text)}
    named = dict(found)
    return named if len(named) == len(found) and not _ATTRIBUTE.sub("", text).strip() else None


def _members(text: str) -> Set[str] | None:
    """Return the names of a JSON object's members, or None if a name occurs twice or the text is not a JSON object."""
    if not is_json(text):
        return None
    members: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members[:] = [name for name, _ in pairs]  # the outermost object ends last
        return dict(pairs)

    value = json.loads(text, object_pairs_hook=note)
    return {*members} if isinstance(value, dict) and len(value) == len(members) else None
