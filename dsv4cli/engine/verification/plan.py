"""Which checks a run makes, and what they cost. No torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dsv4cli.engine.verification.batching import batching_checks
from dsv4cli.engine.verification.calls import ApiCall
from dsv4cli.engine.verification.check import FAMILIES, Check
from dsv4cli.engine.verification.checked_server import CheckedServer
from dsv4cli.engine.verification.encoding import encoding_checks
from dsv4cli.engine.verification.limits import limit_checks
from dsv4cli.engine.verification.long_context import long_checks
from dsv4cli.engine.verification.numbers import number_check
from dsv4cli.engine.verification.other_apis import api_checks
from dsv4cli.engine.verification.reference import ServerReference
from dsv4cli.engine.verification.replies import leak_checks, reply_checks
from dsv4cli.engine.verification.reply_streams import stream_checks
from dsv4cli.engine.verification.temperature import temperature_check
from dsv4cli.engine.verification.thinking import thinking_checks
from dsv4cli.engine.verification.tools import tool_checks
from dsv4cli.errors import UsageError

# what a check must know of the server: attributes of `CheckedServer`, by the beginning of the check's name
NEEDS: Mapping[str, Sequence[str]] = {
    "encoding.": ("tokenizer", "release"),
    "replies.thinking-off": ("completions", "tokenizer"),
    "replies.stop": ("logprobs",),
    "replies.max-tokens": ("logprobs",),
    "replies.temperature": ("logprobs",),
    "replies.stream": ("logprobs",),
    "replies.utf8": ("logprobs",),
    "replies.usage": ("logprobs",),
    "replies.messages": ("messages",),
    "replies.responses": ("responses",),
    "tools.raw": ("completions",),
    "batching.": ("logprobs",),
    "batching.prefix": ("echo", "tokenizer"),
    "numbers.": ("echo", "logprobs"),
    "long.": ("limit", "tokenizer"),
}


@dataclass(frozen=True)
class Scope:
    """What to check.

    Attributes:
        quick: at most 60 requests.
        long: also check long contexts.
        only: families to check; empty for all.
    """

    quick: bool = False
    long: bool = False
    only: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PlannedCost:
    """What checks cost: requests, prompt tokens, and the maximum number of answer tokens."""

    requests: int
    tokens_in: int
    tokens_out: int


def check_scope(scope: Scope) -> None:
    """Raise UsageError if a scope names a family that does not exist."""
    unknown = sorted(scope.only - {*FAMILIES})
    if unknown:
        raise UsageError(f"there are no checks named {unknown[0]!r}", f"use {', '.join(FAMILIES)}")


def plan_checks(
    server: CheckedServer,
    scope: Scope,
    sent: Callable[[], Sequence[ApiCall]],
    reference: ServerReference | None = None,
    *,
    recorded: bool = False,
) -> list[Check]:
    """Return the checks in the order in which they run.

    A check that depends on what the server did not answer in time is not run, and has the verdict "no answer".

    Args:
        sent: returns the calls of the run so far.
        reference: the answers of a trusted server to compare with.
        recorded: whether the answers become a reference, which requires log-probabilities to be checked.
    """
    checks = [
        *encoding_checks(server, quick=scope.quick),
        *thinking_checks(server, quick=scope.quick),
        *reply_checks(server, quick=scope.quick),
        temperature_check(server, quick=scope.quick),
        *stream_checks(server, quick=scope.quick),
        *([] if scope.quick else api_checks(server)),
        *tool_checks(server, quick=scope.quick, baseline=reference.calls if reference else None),
        *batching_checks(server, quick=scope.quick),
        *([number_check(server, reference, quick=scope.quick)] if reference is not None or recorded else []),
        *limit_checks(server, quick=scope.quick),
        *(long_checks(server) if scope.long or "long" in scope.only else []),
        *leak_checks(sent),
    ]
    return [_answerable(server, check) for check in checks if not scope.only or check.family in scope.only]


def _answerable(server: CheckedServer, check: Check) -> Check:
    """Return the check, or one that only reports what it must know of the server and does not."""
    needs = dict.fromkeys(need for name, needed in NEEDS.items() if check.name.startswith(name) for need in needed)
    late = [server.unknown[need] for need in needs if need in server.unknown][:1]
    return Check(check.name, check.reason, check.meaning, [], lambda replies: late) if late else check


def cost_of(checks: Sequence[Check]) -> PlannedCost:
    """Return the cost of checks. A request that several checks judge is made once."""
    requests = tokens_in = tokens_out = 0
    made: set[str] = set()
    for step in (step for check in checks if not check.skip for step in check.steps):
        if step.most:
            requests += step.most
            tokens_in += step.tokens_in
            tokens_out += step.tokens_out
            continue
        calls = [call for call in step.plan({}) if call.key not in made]
        made.update(call.key for call in calls)
        requests += len(calls)
        tokens_in += sum(call.tokens_in for call in calls)
        tokens_out += sum(call.tokens_out for call in calls)
    return PlannedCost(requests, tokens_in, tokens_out)
