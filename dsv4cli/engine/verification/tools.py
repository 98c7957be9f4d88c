"""Checks of tool calls: schema accuracy, calls lost and invented, markup that leaks. No torch."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsv4cli.engine.text.prompt import Tool
from dsv4cli.engine.text.reply import MalformedReply, parse_reply
from dsv4cli.engine.text.tokens import DSML, EOS
from dsv4cli.engine.verification.calls import ApiCall
from dsv4cli.engine.verification.chat_answer import ChatAnswer, ToolUse, UnreadableReply, read_chat, read_raw
from dsv4cli.engine.verification.check import Check, Problem, Replies, fixed
from dsv4cli.engine.verification.checked_server import CheckedServer
from dsv4cli.engine.verification.replies import unreadable
from dsv4cli.engine.verification.schema_errors import schema_errors
from dsv4cli.engine.verification.tool_scenarios import ToolScenario, quick_scenarios, scenarios

# the share of calls that must match their schema. The official API of comparable models reaches 100 %; weak models
# make a mistake in a few of a hundred calls when nothing constrains them
ACCURACY = 0.9
# scenarios whose raw text is compared with the parsed calls
RAW, RAW_QUICK = 12, 1
# the beginning of a call in the model's markup, after a server has removed the special token in it
INVOKE = '<invoke name="'
REASON = (
    "Tool calls are text in the model's own markup. Parsers lose them, cut their arguments or leak the markup, and the "
    "response still has status 200."
)
MEANING = "Agents stop, call the wrong function, or act on wrong arguments."


@dataclass
class ToolFigures:
    """Counts of tool calls, as the verifier of Kimi K2 reports them.

    Attributes:
        scenarios: answers that could be read.
        triggered: answers with calls.
        calls: number of calls.
        valid: calls of an offered function whose arguments match its schema.
        lost, invented: answers without a required call, and answers with a forbidden one.
        leaked: answers with markup in a text.
        made: the names of the called functions, by scenario.
    """

    scenarios: int = 0
    triggered: int = 0
    calls: int = 0
    valid: int = 0
    lost: int = 0
    invented: int = 0
    leaked: int = 0
    made: dict[str, list[str]] = field(default_factory=dict)

    @property
    def accuracy(self) -> float:
        """The share of calls that match their schema; 1 without calls."""
        return self.valid / self.calls if self.calls else 1.0

    def record(self) -> dict[str, Any]:
        """Return the figures for reports."""
        names = ("scenarios", "triggered", "calls", "valid", "lost", "invented", "leaked")
        return {name: getattr(self, name) for name in names} | {"schema_accuracy": round(self.accuracy, 4)}


@dataclass(frozen=True)
class _Sent:
    scenario: ToolScenario
    call: ApiCall


def tool_checks(server: CheckedServer, *, quick: bool, baseline: Mapping[str, Sequence[str]] | None) -> list[Check]:
    """Return the checks of tool calls.

    Args:
        baseline: the names of the functions that a trusted server called, by scenario; None for no comparison.
    """
    listed = quick_scenarios() if quick else scenarios()
    sent = [_sent(server, number, one) for number, one in enumerate(listed)]
    judges: dict[str, Callable[[Replies], Iterator[Problem]]] = {
        "arguments": lambda replies: _judge_arguments(sent, replies),
        "choice": lambda replies: _judge_choice(sent, replies),
        "leaks": lambda replies: _judge_leaks(sent, replies),
    }
    found = [
        Check(
            "tools.answers",
            REASON,
            MEANING,
            [fixed([one.call for one in sent])],
            lambda replies: unreadable([one.call for one in sent], replies),
            figures=lambda replies: figures_of(sent_answers(sent, replies)).record(),
        )
    ]
    found += [Check(f"tools.{name}", REASON, MEANING, [], judge) for name, judge in judges.items()]
    found.append(_raw_check(server, sent, RAW_QUICK if quick else RAW))
    if baseline and not quick:
        found.append(_baseline_check(sent, baseline))
    return found


def _sent(server: CheckedServer, number: int, one: ToolScenario) -> _Sent:
    key = f"tools.answers/{number}"
    return _Sent(one, server.chat(key, one.messages, tools=one.tools, most=one.most, **one.fields))


Answered = tuple[ToolScenario, ApiCall, ChatAnswer]


def sent_answers(sent: Sequence[_Sent], replies: Replies) -> list[Answered]:
    """Return the scenarios whose answers can be read, with their calls and answers."""
    found = []
    for one in sent:
        try:
            found.append((one.scenario, one.call, read_chat(replies[one.call.key], streamed=one.call.streams)))
        except UnreadableReply:
            continue
    return found


def figures_of(answered: Sequence[Answered]) -> ToolFigures:
    """Return the figures of answers."""
    found = ToolFigures(scenarios=len(answered))
    for scenario, call, answer in answered:
        found.triggered += bool(answer.calls)
        found.calls += len(answer.calls)
        found.valid += sum(not errors_of(use, scenario.tools) for use in answer.calls)
        found.lost += bool(_lost(scenario, answer)) and answer.finish != "length"
        found.invented += bool(answer.calls) and scenario.choice == "none"
        found.leaked += any(_has_markup(text) for _, text in answer.texts())
        found.made[call.key] = [use.name for use in answer.calls]
    return found


def errors_of(use: ToolUse, tools: Sequence[Tool]) -> list[str]:
    """Return what is wrong with a call: its function is not offered, or its arguments do not match the schema."""
    schema = next((tool["function"]["parameters"] for tool in tools if tool["function"]["name"] == use.name), None)
    if schema is None:
        return [f"the function {use.name!r} is not offered"]
    try:
        value = json.loads(use.arguments)
    except (ValueError, RecursionError):
        return ["arguments are not JSON"]
    return list(schema_errors(value, schema))


def _has_markup(text: str) -> bool:
    """Return whether a text contains the markup of calls, with its special tokens or without them."""
    return DSML in text or INVOKE in text


def _lost(scenario: ToolScenario, answer: ChatAnswer) -> str:
    """Return why an answer without calls should have some; "" otherwise."""
    if answer.calls:
        return ""
    if scenario.choice in ("required", "named"):
        return f"tool_choice is {scenario.choice!r}"
    return "finish_reason is 'tool_calls'" if answer.finish == "tool_calls" else ""


def _judge_arguments(sent: Sequence[_Sent], replies: Replies) -> Iterator[Problem]:
    answered = sent_answers(sent, replies)
    broken: list[tuple[str, ApiCall, bool]] = []
    for scenario, call, answer in answered:
        if answer.finish == "length":
            continue  # the limit of the check cut the arguments
        for use in answer.calls:
            for error in errors_of(use, scenario.tools)[:1]:
                malformed = "not JSON" in error or "not offered" in error or scenario.choice in ("required", "named")
                broken.append((f"{scenario.kind}: {use.name}({use.arguments[:160]}): {error}", call, malformed))
    if not broken:
        return
    figures = figures_of([one for one in answered if one[2].finish != "length"])
    severe = any(malformed for _, _, malformed in broken) or figures.accuracy < ACCURACY
    yield Problem(
        f"{figures.valid} of {figures.calls} calls match the schema of their function ({figures.accuracy:.0%})",
        [text for text, _, _ in broken],
        min((call for _, call, _ in broken), key=lambda call: len(call.content or b"")),
        wrong=severe,
    )


def _judge_choice(sent: Sequence[_Sent], replies: Replies) -> Iterator[Problem]:
    for scenario, call, answer in sent_answers(sent, replies):
        names = [use.name for use in answer.calls]
        why = _lost(scenario, answer)
        if why and answer.finish != "length":
            yield Problem(f"a call is lost: {why}, and the answer has none", [_shown(answer)], call)
        if names and scenario.choice == "none":
            yield Problem(
                f"a call is invented: tool_choice is 'none', and {names[0]} is called", [_shown(answer)], call
            )
        first = scenario.tools[0]["function"]["name"]
        if names and scenario.choice == "named" and {*names} != {first}:
            yield Problem(f"tool_choice names {first}, and {', '.join(names)} is called", [_shown(answer)], call)
        # some engines report "stop" for a call that was required
        if names and answer.finish not in ("tool_calls", "length"):
            named = scenario.choice in ("named", "required")
            yield Problem(
                f"an answer with calls has finish_reason {answer.finish!r}", [_shown(answer)], call, wrong=not named
            )


def _judge_leaks(sent: Sequence[_Sent], replies: Replies) -> Iterator[Problem]:
    for _, call, answer in sent_answers(sent, replies):
        for name, text in answer.texts():
            if _has_markup(text):
                yield Problem(f"{name} contains the markup of calls", [repr(text[:200])], call)
                break


def _shown(answer: ChatAnswer) -> str:
    calls = ", ".join(f"{use.name}({use.arguments[:80]})" for use in answer.calls) or "no calls"
    return f"content {(answer.content or '')[:120]!r}, {calls}, finish_reason {answer.finish!r}"


def _raw_check(server: CheckedServer, sent: Sequence[_Sent], count: int) -> Check:
    """Return the check that compares the parsed calls with the model's own text, which the official parser reads."""
    free = [one for one in sent if one.scenario.choice == "auto"]
    free.sort(key=lambda one: one.scenario.kind != "parallel")  # calls are lost most often where there are several
    pairs = [
        (one, server.raw(f"tools.raw/{number}", _prompt(server, one), one.scenario.most))
        for number, one in enumerate(free[:count])
    ]

    def judge(replies: Replies) -> Iterator[Problem]:
        for one, raw in pairs:
            text = read_raw(replies[raw.key])
            for _, call, answer in sent_answers([one], replies):
                yield from _compared(call, answer, text)

    skip = "" if server.completions else "the server has no /v1/completions that returns the model's own text"
    return Check("tools.raw", REASON, MEANING, [] if skip else [fixed([raw for _, raw in pairs])], judge, skip)


def _prompt(server: CheckedServer, one: _Sent) -> str:
    return server.prompt(one.scenario.messages, one.scenario.tools, "off")


def _compared(call: ApiCall, answer: ChatAnswer, text: str) -> Iterator[Problem]:
    """Yield calls that the model wrote and the server lost, or the reverse. Text without markup is not compared."""
    if DSML not in text and not answer.calls:
        return
    try:
        wanted = parse_reply(text.removesuffix(EOS) + EOS, thinking=False).tool_calls
    except MalformedReply:
        return
    if not wanted and DSML not in text and answer.calls:
        return  # the server's /v1/completions removes special tokens
    names, made = [one["function"]["name"] for one in wanted], [use.name for use in answer.calls]
    if names != made and answer.finish != "length":
        verb = "lost" if len(made) < len(names) else "invented" if len(made) > len(names) else "changed"
        shown = [f"the model writes {text[:300]!r}", f"the server returns calls of {', '.join(made) or 'nothing'}"]
        yield Problem(f"a call is {verb}: the model calls {', '.join(names) or 'nothing'}", shown, call)


def _baseline_check(sent: Sequence[_Sent], baseline: Mapping[str, Sequence[str]]) -> Check:
    def judge(replies: Replies) -> Iterator[Problem]:
        made = figures_of(sent_answers(sent, replies)).made
        common = [key for key in made if key in baseline]
        other = [key for key in common if list(baseline[key]) != made[key]]
        if not common or not other:
            return
        calls = {one.call.key: one.call for one in sent}
        lines = [
            f"{key}: {', '.join(baseline[key]) or 'no call'} → {', '.join(made[key]) or 'no call'}" for key in other
        ]
        yield Problem(
            f"the functions called differ from the reference in {len(other)} of {len(common)} scenarios",
            lines,
            calls[other[0]],
            wrong=len(other) > len(common) * (1 - ACCURACY),
        )

    return Check("tools.baseline", REASON, MEANING, [], judge)
