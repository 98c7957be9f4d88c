"""The input of the Responses API, a text or a list of items, as messages of the prompt format. No torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from dsv4cli.engine.server.fields import Fields
from dsv4cli.engine.server.refusals import bad_field
from dsv4cli.engine.server.response_seal import Seal
from dsv4cli.engine.server.response_tools import INPUT, entry, prompt_name
from dsv4cli.engine.text.prompt import Message
from dsv4cli.engine.text.prompt_text import to_json

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")
# items of built-in tools, and items that control OpenAI's server: they are left out of the prompt
FOREIGN = (
    "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "compaction", "compaction_trigger",
    "computer_call", "computer_call_output", "configuration_update", "file_search_call", "image_generation_call",
    "local_shell_call", "local_shell_call_output", "mcp_approval_request", "mcp_approval_response", "mcp_call",
    "mcp_list_tools", "program", "program_output", "shell_call", "shell_call_output", "tool_search_call",
    "tool_search_output", "web_search_call",
)  # fmt: skip
# the beginning of an item's id, by its type
ID_PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco",
}  # fmt: skip


def new_id(kind: str) -> str:
    """Return a new id.

    kind: the type of an item, "resp" for a response, or "call" for a call.
    """
    return f"{ID_PREFIXES.get(kind, kind)}_{uuid4().hex}"


def input_items(given: Any, find: Callable[[str], dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Return the input as items with types and ids. References are replaced by the items that they refer to.

    Args:
        find: returns the stored item with an id.

    Raises:
        Refusal: the input is not a text or a list of objects, or refers to an item that is not stored.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise bad_field("input", "expected a text or a list of items")
    items = []
    for nth, one in enumerate(given):
        fields = entry(one, f"input[{nth}]")
        kind = fields.text("type") or ("message" if fields.value("role") is not None else "item_reference")
        if kind == "item_reference":
            found = find(fields.needed("id"))
            if found is None:
                raise bad_field(fields.name("id"), f"no item {one['id']!r} is stored: send the item itself")
            items.append(found)
        else:
            items.append({**one, "type": kind, "id": fields.text("id") or new_id(kind)})
    return items


@dataclass
class InputReader:
    """Turns items into messages.

    Attributes:
        messages: the messages so far.
        notes: what was left out, for the log.
    """

    seal: Seal
    messages: list[Message] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def read(self, items: list[dict[str, Any]], where: str) -> None:
        """Add items. Raises `Refusal` if one is invalid.

        Args:
            where: the name of the list, for errors.
        """
        for nth, item in enumerate(items):
            fields = Fields(item, f"{where}[{nth}]")
            match item["type"]:
                case "message":
                    self._message(fields)
                case "reasoning":
                    self._reasoning(fields)
                case "function_call":
                    self._call(fields, fields.needed("arguments"))
                case "custom_tool_call":
                    self._call(fields, to_json({INPUT: fields.needed("input")}))
                case "function_call_output" | "custom_tool_call_output":
                    self._output(fields)
                case "additional_tools":
                    pass  # read with the tools
                case kind if kind in FOREIGN:
                    self.notes.append(f"input items of type {kind}")
                case kind:
                    raise fields.wrong("type", "expected message, function_call or another type of the API", kind)

    def _message(self, fields: Fields) -> None:
        role = fields.choice("role", ROLES)
        if role is None:
            raise bad_field(fields.name("role"), f"expected one of {', '.join(ROLES)}, got nothing")
        texts = _texts(fields.value("content"), fields.name("content"))
        if role == "assistant":
            self._answer()["content"] += "".join(texts)
        else:
            # a developer message instructs the model like a system message, wherever it is
            text = "\n\n".join(texts)
            self.messages.append({"role": "user" if role == "user" else "system", "content": text})

    def _reasoning(self, fields: Fields) -> None:
        token = fields.text("encrypted_content")
        text = None if token is None else self.seal.open(token)
        content, summary = (_part_texts(fields, name) for name in ("content", "summary"))
        plain = "".join(content or summary)
        if token and text is None and not plain:
            self.notes.append("encrypted_content that this server process has not written")
        self._answer()["reasoning_content"] += plain if text is None else text

    def _call(self, fields: Fields, arguments: str) -> None:
        name = prompt_name(fields.text("namespace"), fields.needed("name"))
        function = {"name": name, "arguments": arguments}
        self._answer()["tool_calls"].append({"id": fields.needed("call_id"), "type": "function", "function": function})

    def _output(self, fields: Fields) -> None:
        output = fields.value("output")
        if isinstance(output, list):
            output = [_result_part(one, f"{fields.name('output')}[{nth}]") for nth, one in enumerate(output)]
        elif not isinstance(output, str):
            raise fields.wrong("output", "expected a text or a list of parts", output)
        self.messages.append({"role": "tool", "tool_call_id": fields.needed("call_id"), "content": output})

    def _answer(self) -> Message:
        """Return the assistant message that the next item of an answer belongs to."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []})
        return self.messages[-1]


def _texts(given: Any, where: str) -> list[str]:
    """Return the texts of a message's content."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list):
        raise bad_field(where, "expected a text or a list of parts")
    texts = []
    for nth, one in enumerate(given):
        part = entry(one, f"{where}[{nth}]")
        kind = part.needed("type")
        if kind not in (*TEXT_PARTS, "refusal"):
            reason = "expected input_text, output_text or refusal: DeepSeek-V4 accepts only text"
            raise part.wrong("type", reason, kind)
        texts.append(part.needed("refusal" if kind == "refusal" else "text"))
    return texts


def _part_texts(fields: Fields, name: str) -> list[str]:
    """Return the texts of a list of parts, which may be absent."""
    given = fields.items(name) or []
    return [entry(one, f"{fields.name(name)}[{nth}]").needed("text") for nth, one in enumerate(given)]


def _result_part(given: Any, where: str) -> dict[str, Any]:
    """Return a part of a tool's output in the chat API's shape. The prompt has a note in place of images and files."""
    part = entry(given, where)
    kind = part.needed("type")
    return {"type": "text", "text": part.needed("text")} if kind in TEXT_PARTS else {"type": kind}


def listed(item: dict[str, Any]) -> dict[str, Any]:
    """Return an input item in the full form in which the API lists it: with a status and a list of parts."""
    if item["type"] != "message":
        return {"status": "completed", **item}
    answers, content = item["role"] == "assistant", item["content"]
    if isinstance(content, str):
        part: dict[str, Any] = {"type": "output_text" if answers else "input_text", "text": content}
        content = [part | ({"annotations": []} if answers else {})]
    return {**item, "status": "completed", "content": content}
