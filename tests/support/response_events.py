"""The events of a streamed response: their order, and what a client makes of them."""

from typing import Any

ENDS = ("response.completed", "response.incomplete", "response.failed")
# the event that ends a text, the field that has it, and what its deltas are called
TEXTS = {
    "response.output_text.done": "text",
    "response.reasoning_text.done": "text",
    "response.reasoning_summary_text.done": "text",
    "response.function_call_arguments.done": "arguments",
    "response.custom_tool_call_input.done": "input",
}


def checked_response(events: list[tuple[str, Any]], *, cut_call: bool = False) -> dict[str, Any]:
    """The response at the end of a stream, whose events are in order, numbered and say the same as it.

    cut_call: the last call does not end, and is not part of the response.
    """
    assert all(name == event["type"] for name, event in events)
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    assert [name for name, _ in events[:2]] == ["response.created", "response.in_progress"]
    *inner, (last, end) = [*events[2:]]
    assert last in ENDS
    done: dict[int, Any] = {}
    open_index, open_kind, begun, cut, texts, parts = None, "", 0, 0, "", 0
    for name, event in inner:
        if name == "response.output_item.added":
            assert event["output_index"] == begun
            cut += open_index is not None
            assert open_index is None or (open_kind.endswith("call") and event["item"]["type"] == "message")
            open_index, open_kind, texts, begun = begun, event["item"]["type"], "", begun + 1
            continue
        assert event["output_index"] == open_index, name
        if name.endswith(("part.added", "part.done")):
            parts += 1 if name.endswith("added") else -1
        elif name.endswith(".delta"):
            assert event["delta"]
            texts += event["delta"]
        elif name in TEXTS:
            assert event[TEXTS[name]] == texts
        else:
            assert name == "response.output_item.done"
            assert not parts
            done[open_index], open_index = event["item"], None
    assert cut + (open_index is not None) == cut_call
    assert open_index is None or open_kind.endswith("call")
    response: dict[str, Any] = end["response"]
    assert response["output"] == list(done.values())
    assert response["status"] == last.removeprefix("response.")
    assert events[0][1]["response"]["id"] == response["id"]
    return response


def without_ids(value: Any) -> Any:
    """A response or a part of it without what differs between two answers of the same words."""
    if isinstance(value, list):
        return [without_ids(one) for one in value]
    if not isinstance(value, dict):
        return value
    changing = ("id", "call_id", "created_at", "completed_at", "encrypted_content", "previous_response_id")
    kept = {key: without_ids(one) for key, one in value.items() if key not in changing}
    return kept | ({"input_tokens_details": None} if "input_tokens_details" in kept else {})
