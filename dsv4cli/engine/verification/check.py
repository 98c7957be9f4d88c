"""The protocol of a check: the requests that it makes, and how their responses are judged. No torch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dsv4cli.engine.verification.calls import ApiCall, ServerReply

# the responses so far, by the key of their call
Replies = Mapping[str, ServerReply]
Verdict = Literal["right", "note", "wrong", "no answer", "skipped"]
FAMILIES = ("encoding", "replies", "tools", "batching", "numbers", "limits", "long")


@dataclass(frozen=True)
class Problem:
    """Something that a check found.

    Attributes:
        what: one sentence that says what the server did.
        evidence: lines that show it: what was expected, and what was received.
        call: the request that shows it.
        others: further requests that show it, each of them alone.
        wrong: False for a remark that is not an error of the server.
        late: whether the server did not answer the request in time. That is no error: it may only be slow.
    """

    what: str
    evidence: Sequence[str] = ()
    call: ApiCall | None = None
    wrong: bool = True
    late: bool = False
    others: Sequence[ApiCall] = ()


@dataclass(frozen=True)
class CheckStep:
    """Requests that may be sent at the same time.

    Attributes:
        plan: returns the requests, given the responses to earlier steps.
        together: maximum number of concurrent requests; None for the limit of the run.
        most: maximum number of requests of a step that depends on earlier responses; 0 if the step does not.
        tokens_in, tokens_out: for such a step, an estimate of its prompt tokens, and the maximum of its answer tokens.
    """

    plan: Callable[[Replies], Sequence[ApiCall]]
    together: int | None = None
    most: int = 0
    tokens_in: int = 0
    tokens_out: int = 0


@dataclass(frozen=True)
class Check:
    """One check of a server.

    Attributes:
        name: family and name, such as `replies.stop`.
        reason: why servers get this wrong, or why it matters.
        meaning: what a failure means for a user.
        steps: the requests, in the order in which they are sent.
        judge: yields the problems; none if the check passes.
        skip: why the check cannot run against this server; empty if it can.
        figures: returns numbers to report besides the verdict.
        ordered: whether the responses depend on the order of the requests. An interrupted check is then repeated from
            its first request.
    """

    name: str
    reason: str
    meaning: str
    steps: Sequence[CheckStep]
    judge: Callable[[Replies], Iterable[Problem]]
    skip: str = ""
    figures: Callable[[Replies], Mapping[str, Any]] = field(default=lambda replies: {})
    ordered: bool = False

    @property
    def family(self) -> str:
        """The family that the check belongs to."""
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class CheckResult:
    """The result of a check.

    Attributes:
        requests: number of requests that the check made.
    """

    check: Check
    problems: Sequence[Problem]
    requests: int
    figures: Mapping[str, Any]

    @property
    def verdict(self) -> Verdict:
        """The verdict of the check."""
        if any(problem.wrong for problem in self.problems):
            return "wrong"
        if any(problem.late for problem in self.problems):
            return "no answer"
        if self.problems:
            return "note"
        return "skipped" if self.check.skip else "right"


def verdict_of_run(results: Iterable[CheckResult]) -> Literal["right", "wrong", "no answer"]:
    """Return the verdict of a run: that of its worst check."""
    verdicts = {result.verdict for result in results}
    return "wrong" if "wrong" in verdicts else "no answer" if "no answer" in verdicts else "right"


def fixed(calls: Sequence[ApiCall], together: int | None = None) -> CheckStep:
    """Return a step whose requests do not depend on earlier responses."""
    return CheckStep(lambda replies: calls, together)
