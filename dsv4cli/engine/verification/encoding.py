"""Checks that prompts have the official encoder's number of tokens. No torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from dsv4cli.engine.config.presets import RELEASES, Release
from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.prompt import EFFORTS
from dsv4cli.engine.verification.calls import ApiCall
from dsv4cli.engine.verification.chat_answer import UnreadableReply, read_chat
from dsv4cli.engine.verification.check import Check, Problem, Replies, fixed
from dsv4cli.engine.verification.checked_server import CheckedServer, prompt_parts
from dsv4cli.engine.verification.conversations import SampleConversation, conversations

REASON = (
    "The checkpoint has an encoder script and no chat template, so servers use templates written by hand. A prompt "
    "that differs from what the model was trained on makes answers worse without any error."
)
MEANING = "The model reads another prompt than the one it was trained on; expect worse answers and failing tool calls."
NO_TOKENIZER = "the model's tokenizer is not on this machine; name it with --tokenizer"
# conversations of each kind with --quick
QUICK = {"plain": 1, "system": 1, "multi-turn": 1, "unicode": 1, "special-tokens": 1, "thinking": 1, "efforts": 1}
QUICK |= {"tools": 1, "tool-results": 2}


def encoding_checks(server: CheckedServer, *, quick: bool) -> list[Check]:
    """Return the checks, one per kind of conversation."""
    return [
        _check(server, kind, listed[: QUICK[kind]] if quick else listed) for kind, listed in conversations().items()
    ]


def _check(server: CheckedServer, kind: str, listed: Sequence[SampleConversation]) -> Check:
    name = f"encoding.{kind}"
    calls = [
        server.chat(f"{name}/{number}", one.messages, level=one.level, tools=one.tools, most=1)
        for number, one in enumerate(listed)
    ]
    skip = NO_TOKENIZER if server.tokenizer is None else ""

    def judge(replies: Replies) -> Iterator[Problem]:
        yield from _judge(server, list(zip(listed, calls, strict=True)), replies)

    return Check(name, REASON, MEANING, [] if skip else [fixed(calls)], judge, skip)


def _judge(
    server: CheckedServer, sent: Sequence[tuple[SampleConversation, ApiCall]], replies: Replies
) -> Iterator[Problem]:
    counted: list[tuple[SampleConversation, ApiCall, int]] = []
    for one, call in sent:
        try:
            count = read_chat(replies[call.key], streamed=False).count("prompt_tokens")
        except UnreadableReply as error:
            yield Problem(f"the server did not answer conversation {call.key}", [str(error)], call)
            continue
        if count is None:
            yield Problem("the response has no usage.prompt_tokens", [], call)
            continue
        counted.append((one, call, count))
    # a text that is parsed as a token is right for the official script, and wrong for nobody: see _PARSED
    wrong = [(one, call, count) for one, call, count in counted if count != count_prompt(server, one)]
    if not wrong:
        return
    explained = explain(server, [(one, count) for one, _, count in wrong])
    what = f"{len(wrong)} of {len(counted)} prompts differ from the official encoder's (release {server.release})"
    evidence = [
        f"{call.key}: the server counts {count:,} tokens, the official encoder {count_prompt(server, one):,}"
        for one, call, count in wrong
    ]
    smallest = min((call for _, call, _ in wrong), key=lambda call: len(call.content or b""))
    if explained == PARSED:
        remark = (
            "texts of special tokens in users' messages become tokens, so a user can write turns of the conversation"
        )
        yield Problem(f"{remark}; the official script does this too", evidence, smallest, wrong=False)
        return
    yield Problem(f"{what}{f': {explained}' if explained else ''}", [*evidence, remedy(explained)], smallest)


def count_prompt(server: CheckedServer, one: SampleConversation) -> int:
    """Return the number of tokens of the official encoder's prompt. Text in messages never becomes a special token."""
    return _count(server, one)


Variant = Callable[[CheckedServer, SampleConversation], int]
PARSED = "texts of special tokens are read as tokens"


def _count(server: CheckedServer, one: SampleConversation, *, drop_thinking: bool = True, parsed: bool = False) -> int:
    assert server.tokenizer is not None
    parts = prompt_parts(one.messages, one.tools, one.level, server.release, drop_thinking=drop_thinking)
    return len(server.tokenizer.encode_parts(["".join(parts)] if parsed else parts)[0])


def _without_system(one: SampleConversation) -> SampleConversation:
    return replace(one, messages=[message for message in one.messages if message["role"] != "system"])


def _last_turn(one: SampleConversation) -> SampleConversation:
    at = max(number for number, message in enumerate(one.messages) if message["role"] == "user")
    return replace(one, messages=one.messages[at:])


def _without_reasoning(one: SampleConversation) -> SampleConversation:
    plain = [{key: value for key, value in message.items() if key != "reasoning_content"} for message in one.messages]
    return replace(one, messages=plain)


def _level(one: SampleConversation, level: str) -> SampleConversation:
    return one if one.level == "off" else replace(one, level=level)


# what servers do with prompts, and the number of tokens that follows. Efforts are compared in `explain`
VARIANTS: Mapping[str, Variant] = {
    PARSED: lambda server, one: _count(server, one, parsed=True),
    f"the prompt lacks the token {tokens.BOS} at its start": lambda server, one: _count(server, one) - 1,
    f"the prompt has the token {tokens.BOS} twice at its start": lambda server, one: _count(server, one) + 1,
    "the tools are missing": lambda server, one: _count(server, replace(one, tools=())),
    "the system message is missing": lambda server, one: _count(server, _without_system(one)),
    "only the last turn of the conversation is read": lambda server, one: _count(server, _last_turn(one)),
    "reasoning of earlier turns is kept, where it must be left out": lambda server, one: _count(
        server, one, drop_thinking=False
    ),
    "reasoning of earlier turns is left out, where it must be kept": lambda server, one: _count(
        server, _without_reasoning(one)
    ),
}


def _has_effort(server: CheckedServer, wrong: Sequence[tuple[SampleConversation, int]], level: str) -> bool:
    return all(_count(server, _level(one, level)) == count for one, count in wrong)


def _has_release(server: CheckedServer, one: SampleConversation, release: Release, count: int) -> bool:
    return one.level in ("off", *EFFORTS[release]) and _count(replace(server, release=release), one) == count


def remedy(explained: str) -> str:
    """Return what the chat template of this project can do about a deviation that `explain` found."""
    field = next((field for word, field in _FIELDS.items() if word in explained), "")
    text = "`dsv4 inspect MODEL --template` prints a chat template that writes the official prompt"
    return f"{text}, if the server passes {field} to it" if field else text


# parts of a request that servers drop before the template, by a word of the deviation
_FIELDS = {
    "effort": "reasoning_effort",
    "tools": "the tools",
    "system message": "all messages",
    "last turn": "all messages",
    "reasoning of earlier turns is left out": "reasoning_content of earlier messages",
}


def explain(server: CheckedServer, wrong: Sequence[tuple[SampleConversation, int]]) -> str:
    """Return the deviation that explains all token counts, or their common difference; "" if there is neither."""
    for name, variant in VARIANTS.items():
        if all(variant(server, one) == count for one, count in wrong):
            return name
    efforts = [level for level in ("off", *EFFORTS[server.release]) if _has_effort(server, wrong, level)]
    if efforts:
        return f"the effort in the prompt is {' or '.join(efforts)}, whatever the request says"
    for release in RELEASES:
        if all(_has_release(server, one, release, count) for one, count in wrong):
            return f"the prompts are those of release {release}"
    differences = {count - count_prompt(server, one) for one, count in wrong}
    if len(differences) == 1:
        return f"each has {differences.pop():+,} tokens"
    return ""
