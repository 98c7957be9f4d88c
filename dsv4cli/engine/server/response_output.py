"""The output items of a response as they are generated, and the events that stream them. Does not import torch."""

from typing import Any

from dsv4cli.engine.chat.answer_stream import Delta
from dsv4cli.engine.server.response_input import new_id
from dsv4cli.engine.server.response_seal import Seal
from dsv4cli.engine.server.response_tools import OfferedTool
from dsv4cli.engine.server.tool_input import ToolInput

# an event without its sequence number
Event = dict[str, Any]


class OutputItem:
    """An output item that is being generated.

    Attributes:
        item: the item as it is now.
    """

    # the kind of its deltas
    kind = ""

    def __init__(self, index: int, **fields: Any) -> None:
        self.item: dict[str, Any] = {"id": new_id(self.kind), "type": self.kind, "status": "in_progress", **fields}
        self._index = index
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def begin(self) -> list[Event]:
        """Return the events that begin the item."""
        # a copy: the item goes on to change
        return [{"type": "response.output_item.added", "output_index": self._index, "item": {**self.item}}]

    def push(self, text: str) -> list[Event]:
        """Add text, and return its events."""
        raise NotImplementedError

    def close(self, status: str) -> list[Event]:
        """Complete the item, and return the events that end it."""
        self.item["status"] = status
        return [{"type": "response.output_item.done", "output_index": self._index, "item": self.item}]

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"response.{kind}", "item_id": self.item["id"], "output_index": self._index, **fields}


class MessageItem(OutputItem):
    """The text of an answer."""

    kind = "message"

    def __init__(self, index: int) -> None:
        super().__init__(index, role="assistant", content=[])

    def begin(self) -> list[Event]:
        """Return the events that begin the item and its only part."""
        return [*super().begin(), self._event("content_part.added", content_index=0, part=self._part())]

    def push(self, text: str) -> list[Event]:
        """Add text, and return its events."""
        self._texts.append(text)
        return [self._event("output_text.delta", content_index=0, delta=text, logprobs=[])]

    def close(self, status: str) -> list[Event]:
        """Complete the item, and return the events that end it."""
        self.item["content"] = [self._part()]
        return [
            self._event("output_text.done", content_index=0, text=self.text, logprobs=[]),
            self._event("content_part.done", content_index=0, part=self._part()),
            *super().close(status),
        ]

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}


class ReasoningItem(OutputItem):
    """The reasoning of an answer, as text or as its own summary."""

    kind = "reasoning"

    def __init__(self, index: int, *, summarized: bool, seal: Seal | None) -> None:
        """Create an empty item.

        Args:
            summarized: whether the client requests a summary. If so, the whole text is returned as the summary.
            seal: makes the item's `encrypted_content`, None for an item without it.
        """
        super().__init__(index, summary=[], **({} if summarized else {"content": []}))
        self._summarized, self._seal = summarized, seal

    def begin(self) -> list[Event]:
        """Return the events that begin the item and its only part."""
        return [*super().begin(), self._of_part("added")]

    def push(self, text: str) -> list[Event]:
        """Add text, and return its events."""
        self._texts.append(text)
        return [self._of_text("delta", delta=text)]

    def close(self, status: str) -> list[Event]:
        """Complete the item, and return the events that end it."""
        self.item["summary" if self._summarized else "content"] = [self._part()]
        if self._seal is not None:
            self.item["encrypted_content"] = self._seal.close(self.text)
        return [self._of_text("done", text=self.text), self._of_part("done"), *super().close(status)]

    def _part(self) -> dict[str, Any]:
        return {"type": "summary_text" if self._summarized else "reasoning_text", "text": self.text}

    def _of_part(self, stage: str) -> Event:
        if self._summarized:
            return self._event(f"reasoning_summary_part.{stage}", summary_index=0, part=self._part())
        return self._event(f"content_part.{stage}", content_index=0, part=self._part())

    def _of_text(self, stage: str, **fields: Any) -> Event:
        if self._summarized:
            return self._event(f"reasoning_summary_text.{stage}", summary_index=0, **fields)
        return self._event(f"reasoning_text.{stage}", content_index=0, **fields)


class CallItem(OutputItem):
    """A function call."""

    kind = "function_call"

    def __init__(self, index: int, tool: OfferedTool) -> None:
        own = {"call_id": new_id("call"), "name": tool.name, self._field: ""}
        super().__init__(index, **own, **({} if tool.namespace is None else {"namespace": tool.namespace}))

    _field = "arguments"

    def push(self, text: str) -> list[Event]:
        """Add a part of the arguments' JSON, and return its events."""
        self._texts.append(text)
        return [self._event("function_call_arguments.delta", delta=text)]

    def close(self, status: str) -> list[Event]:
        """Complete the item, and return the events that end it."""
        self.item["arguments"] = self.text
        return [self._event("function_call_arguments.done", arguments=self.text), *super().close(status)]


class CustomCallItem(CallItem):
    """A call of a custom tool. Its input is a text, which the model writes as the only argument of a function."""

    kind = "custom_tool_call"
    _field = "input"

    def __init__(self, index: int, tool: OfferedTool) -> None:
        super().__init__(index, tool)
        del self.item["status"]  # the API's type has none
        self._input = ToolInput()

    def push(self, text: str) -> list[Event]:
        """Add a part of the arguments' JSON, and return the events for its part of the input's text."""
        return self._deltas(self._input.push(text))

    def close(self, status: str) -> list[Event]:
        """Complete the item, and return the events that end it."""
        rest = self._deltas(self._input.finish())
        self.item["input"] = self._input.text
        done = self._event("custom_tool_call_input.done", input=self._input.text)
        ended: Event = {"type": "response.output_item.done", "output_index": self._index, "item": self.item}
        return [*rest, done, ended]

    def _deltas(self, text: str) -> list[Event]:
        return [self._event("custom_tool_call_input.delta", delta=text)] if text else []


class ResponseOutput:
    """The output of a response: its items in order. One item is open at a time.

    Attributes:
        items: the complete items.
    """

    def __init__(self, tools: dict[str, OfferedTool], *, summarized: bool, seal: Seal | None) -> None:
        """Create an empty output.

        Args:
            tools: the tools by their names in the prompt.
            summarized: whether the reasoning is returned as a summary.
            seal: makes the reasoning's `encrypted_content`, None for none.
        """
        self.items: list[dict[str, Any]] = []
        self._tools, self._summarized, self._seal = tools, summarized, seal
        self._open: OutputItem | None = None
        self._begun = 0  # number of items that have begun
        self._call = -1  # index of the newest call
        self._late = ""  # text after the calls began, which becomes a message after them

    def take(self, delta: Delta) -> list[Event]:
        """Add a delta, and return its events."""
        if delta.kind == "content" and isinstance(self._open, CallItem):
            self._late += delta.text
            return []
        if delta.kind != "calls":
            return [*self._begin("reasoning" if delta.kind == "reasoning" else "message"), *self._push(delta.text)]
        begun = self._begin_call(delta) if delta.index != self._call else []
        return begun + (self._push(delta.text) if delta.text else [])

    def finish(self, status: str, open_call: int | None) -> list[Event]:
        """Close the open item, and return its events.

        A complete answer with neither text nor call gets an empty message.

        Args:
            status: completed, or incomplete if the answer was truncated.
            open_call: the call that was truncated at the end of the answer. It is left out, and so are its closing
                events, because clients run every call that is closed.
        """
        if isinstance(self._open, CallItem):
            if self._call == open_call:
                self._open = None
            events = self._close("completed")
        else:
            events = self._close(status)
        if self._late or (status == "completed" and all(item["type"] == "reasoning" for item in self.items)):
            events += self._begin("message")
            events += self._push(self._late) if self._late else []
            events += self._close(status)
        return events

    def _push(self, text: str) -> list[Event]:
        assert self._open is not None
        return self._open.push(text)

    def _begin(self, kind: str) -> list[Event]:
        """Return the events that begin an item of this kind, unless one is open."""
        if self._open is not None and self._open.kind == kind:
            return []
        closed = self._close("completed")
        place = self._next_index()
        if kind == "message":
            self._open = MessageItem(place)
        else:
            self._open = ReasoningItem(place, summarized=self._summarized, seal=self._seal)
        return [*closed, *self._open.begin()]

    def _begin_call(self, delta: Delta) -> list[Event]:
        closed = self._close("completed")
        self._call = delta.index
        tool = self._tools.get(delta.name, OfferedTool("function", delta.name))
        self._open = (CustomCallItem if tool.kind == "custom" else CallItem)(self._next_index(), tool)
        return [*closed, *self._open.begin()]

    def _next_index(self) -> int:
        self._begun += 1
        return self._begun - 1

    def _close(self, status: str) -> list[Event]:
        """Return the events that end the open item, if there is one."""
        if self._open is None:
            return []
        closed, self._open = self._open, None
        events = closed.close(status)
        self.items.append(closed.item)
        return events
