"""The faults of the proxy, each as servers in the field have it, with the check that must name it."""

from typing import Any

from dsv4cli.engine.text import tokens
from tests.support.faulty_proxy import DONE, Fault, FaultyProxy, Passing, copied, on_answers, on_chat

LIMIT = 8192  # nano's


def leak_markup(passing: Passing) -> None:
    for message in passing.messages():
        for call in message.pop("tool_calls", None) or ():
            text = call["function"].get("arguments") or ""
            message["content"] = (message.get("content") or "") + f"<{tokens.DSML}invoke>{text}"
    for choice in passing.choices():
        if choice.get("finish_reason") == "tool_calls":
            choice["finish_reason"] = "stop"


def merge_reasoning(passing: Passing) -> None:
    for message in passing.messages():
        reasoning = message.pop("reasoning_content", None)
        message.pop("reasoning", None)
        if reasoning and passing.document:
            message["content"] = f"<think>{reasoning}</think>{message.get('content') or ''}"


def without_bos(passing: Passing) -> None:
    for usage in passing.usages():
        usage["prompt_tokens"] -= 1
        usage["total_tokens"] -= 1


def drop(*names: str) -> Any:
    def change(passing: Passing) -> None:
        for name in names:
            passing.body.pop(name, None)

    return on_chat(change)


def set_field(name: str, value: Any) -> Any:
    return on_chat(lambda passing: passing.body.update({name: value}))


def keep_stale(passing: Passing, proxy: FaultyProxy) -> None:
    """The answer to another request whose beginning is the same."""
    if passing.status != 200 or not passing.document or len(passing.text) < 300:
        return
    passing.document = copied(proxy.seen.setdefault(passing.text[:200], copied(passing.document)))


def think(passing: Passing) -> None:
    passing.body |= {"reasoning_effort": "high", "chat_template_kwargs": {"thinking": True}}


def think_always(passing: Passing) -> None:
    """Thinks whatever the request says, and remembers whether it asked for that."""
    passing.wants_thinking = passing.body.get("reasoning_effort") != "none"
    think(passing)


def show_reasoning(passing: Passing) -> None:
    """The reasoning is at the beginning of the content, without a mark, where the request turns thinking off."""
    for message in () if passing.wants_thinking or not passing.document else passing.messages():
        reasoning = message.pop("reasoning_content", None) or ""
        message.pop("reasoning", None)
        message["content"] = f"{reasoning}\n{message.get('content') or ''}"
    forget_details(passing)


def show_all_reasoning(passing: Passing) -> None:
    """No parser: all reasoning is at the beginning of the content, without a mark."""
    passing.wants_thinking = False
    show_reasoning(passing)


def hide_reasoning(passing: Passing) -> None:
    """The reasoning is dropped where the request turns thinking off. Its tokens still count."""
    for message in () if passing.wants_thinking else passing.messages():
        message.pop("reasoning_content", None)
        message.pop("reasoning", None)
    forget_details(passing)


def forget_details(passing: Passing) -> None:
    for usage in passing.usages():
        usage.pop("completion_tokens_details", None)


def cut_stream(passing: Passing) -> None:
    if passing.events:
        passing.events = passing.events[: len(passing.events) // 2]


def count_more(passing: Passing) -> None:
    for usage in passing.usages():
        usage["completion_tokens"] += 3
        usage["total_tokens"] += 3


def empty(passing: Passing) -> None:
    for message in passing.messages():
        for name in ("content", "reasoning_content", "reasoning"):
            if name in message:
                message[name] = None


def repeat_after_cancel(passing: Passing, proxy: FaultyProxy) -> None:
    if passing.path.endswith("chat/completions") and proxy.cancelled and passing.document and passing.status == 200:
        for choice in passing.choices():
            listed = (choice.get("logprobs") or {}).get("content")
            if listed and choice["message"].get("content"):
                choice["message"]["content"] = listed[0]["token"] + choice["message"]["content"]
                choice["logprobs"]["content"] = [listed[0], *listed]


def more_tokens(passing: Passing) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        if isinstance(passing.body.get(name), int) and passing.body[name] > 0:
            passing.body[name] += 1


def always_stop(passing: Passing) -> None:
    for choice in passing.choices():
        if choice.get("finish_reason"):
            choice["finish_reason"] = "stop"


def no_usage_in_stream(passing: Passing) -> None:
    passing.events = [one for one in passing.events if one == DONE or not one.get("usage")]


def break_characters(passing: Passing) -> None:
    if passing.events:
        for message in passing.messages():
            if message.get("content"):
                message["content"] = "".join(c if c < "\x80" else "\ufffd" for c in message["content"])


def lose_delta(passing: Passing) -> None:
    texts = [n for n, one in enumerate(passing.events) if one != DONE and "content" in str(one.get("choices"))]
    if len(texts) > 3:
        del passing.events[texts[2]]


def weaken_effort(passing: Passing) -> None:
    if passing.body.get("reasoning_effort") == "max":
        passing.body["reasoning_effort"] = "high"


def leak_end(passing: Passing) -> None:
    if passing.document:
        for message in passing.messages():
            if message.get("content"):
                message["content"] += tokens.EOS


def cut_arguments(passing: Passing) -> None:
    if passing.document:
        for message in passing.messages():
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"] = call["function"]["arguments"][:-2]


def never_required(passing: Passing) -> None:
    if passing.body.get("tool_choice") not in (None, "auto", "none"):
        passing.body["tool_choice"] = "none"


def never_none(passing: Passing) -> None:
    if passing.body.get("tool_choice") == "none":
        passing.body["tool_choice"] = "auto"


def one_call(passing: Passing) -> None:
    if passing.document:
        for message in passing.messages():
            if message.get("tool_calls"):
                message["tool_calls"] = message["tool_calls"][:1]
    for event in passing.events:
        for choice in (event.get("choices") or ()) if event != DONE else ():
            calls = choice["delta"].get("tool_calls")
            if calls:
                choice["delta"]["tool_calls"] = [call for call in calls if not call.get("index")]


def fail(passing: Passing, proxy: FaultyProxy) -> None:
    if passing.status in (400, 404, 422):
        passing.status = 500


def hang(passing: Passing, proxy: FaultyProxy) -> None:
    if passing.path.endswith("chat/completions") and passing.status == 400 and not passing.body:
        passing.status = 0


def mix(passing: Passing, proxy: FaultyProxy) -> None:
    """The answer of the request before, if both ran at the same time."""
    if passing.status == 200 and passing.document and passing.path.endswith("chat/completions"):
        with proxy.lock:
            before, proxy.seen["last"] = proxy.seen.get("last"), copied(passing.document)
            if proxy.running > 1 and before is not None:
                passing.document = before


def cut_prompt(passing: Passing) -> None:
    for message in passing.body.get("messages") or ():
        if isinstance(message, dict) and isinstance(message.get("content"), str) and len(message["content"]) > 12000:
            message["content"] = message["content"][-2000:]


def short_context(passing: Passing, proxy: FaultyProxy) -> None:
    """The limit is one token lower than what is announced."""
    for usage in passing.usages():
        if usage["prompt_tokens"] + usage["completion_tokens"] >= LIMIT:
            passing.status, passing.document = 400, {"error": {"message": "too long"}}


def drop_system(passing: Passing) -> None:
    messages = passing.body.get("messages")
    if isinstance(messages, list):
        passing.body["messages"] = [one for one in messages if one.get("role") != "system"] or messages


def forget_reasoning(passing: Passing) -> None:
    for message in passing.body.get("messages") or ():
        if isinstance(message, dict):
            message.pop("reasoning_content", None)


FAULTS = (
    Fault("DSML leaked", "tools.leaks", after=on_answers(leak_markup)),
    Fault("reasoning in content", "replies.reasoning", after=on_answers(merge_reasoning)),
    Fault("template without BOS", "encoding.plain", after=on_answers(without_bos)),
    Fault("tools dropped", "encoding.tools", before=drop("tools", "tool_choice")),
    Fault("system dropped", "encoding.system", before=on_chat(drop_system)),
    Fault("reasoning of history dropped", "encoding.thinking", before=on_chat(forget_reasoning), whole=True),
    Fault("effort ignored", "encoding.efforts", before=on_chat(weaken_effort)),
    Fault("stale prefix", "batching.prefix", after=keep_stale),
    Fault("answers mixed in a batch", "batching.together", after=mix),
    Fault("token repeated after a cancel", "batching.cancelled", after=repeat_after_cancel, pause=0.02),
    Fault("temperature ignored", "replies.temperature", before=set_field("temperature", 1), whole=True),
    Fault("always greedy", "replies.temperature", before=set_field("temperature", 0)),
    Fault("stop ignored", "replies.stop", before=drop("stop")),
    Fault("one token too many", "replies.max-tokens", before=on_chat(more_tokens)),
    Fault("finish_reason always stop", "replies.max-tokens", after=on_answers(always_stop)),
    Fault("thinking not off", "replies.thinking-off", before=on_chat(think)),
    Fault("thinking in the content", "replies.thinking-off", on_chat(think_always), on_answers(show_reasoning)),
    Fault("always thinking, no parser", "replies.thinking-off", on_chat(think_always), on_answers(show_all_reasoning)),
    Fault("thinking hidden", "replies.thinking-off", on_chat(think_always), on_answers(hide_reasoning)),
    Fault("stream cut", "replies.stream", after=on_answers(cut_stream)),
    Fault("delta lost", "replies.stream", after=on_answers(lose_delta)),
    Fault("characters broken", "replies.utf8", after=on_answers(break_characters)),
    Fault("usage wrong", "replies.usage", after=on_answers(count_more)),
    Fault("usage missing in streams", "replies.usage", after=on_answers(no_usage_in_stream)),
    Fault("null content", "replies.content", after=on_answers(empty)),
    Fault("end token leaked", "replies.markup", after=on_answers(leak_end)),
    Fault("arguments cut", "tools.arguments", after=on_answers(cut_arguments)),
    Fault("required call ignored", "tools.choice", before=on_chat(never_required)),
    Fault("none ignored", "tools.choice", before=on_chat(never_none)),
    Fault("second call lost", "tools.raw", after=on_answers(one_call)),
    Fault("errors are 500", "limits.fields", after=fail),
    Fault("hangs on malformed JSON", "limits.malformed", after=hang),
    Fault("long prompts cut silently", "limits.too-long", before=on_chat(cut_prompt)),
    Fault("context off by one", "long.edge", after=short_context),
)
