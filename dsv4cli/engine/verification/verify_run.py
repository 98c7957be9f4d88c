"""Runs checks against a server, and collects their results. No torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic

from dsv4cli.engine.verification.calls import ApiCall, ServerReply
from dsv4cli.engine.verification.check import Check, CheckResult, Problem
from dsv4cli.engine.verification.plan import PlannedCost, cost_of
from dsv4cli.engine.verification.sender import Sender


@dataclass
class VerifyRun:
    """A run of checks.

    Attributes:
        calls: the requests so far.
        replies: the responses, by the key of their call.
        results: the results so far.
        seconds: the time that the checks have taken.
    """

    sender: Sender
    calls: list[ApiCall] = field(default_factory=list)
    replies: dict[str, ServerReply] = field(default_factory=dict)
    results: list[CheckResult] = field(default_factory=list)
    seconds: float = 0.0

    def cost(self, checks: Sequence[Check]) -> PlannedCost:
        """Return the cost of checks."""
        return cost_of(checks)

    def run(self, checks: Sequence[Check], progress: Callable[[int, int], None]) -> None:
        """Run checks, in order.

        Args:
            progress: called with the number of requests done and their total.

        Raises:
            ServerError: the server does not accept connections.
        """
        total, before, start = self.cost(checks).requests, 0, monotonic()
        for check in checks:
            progress(before, total)
            self._run(check, partial(_shifted, progress, before, total))
            before += self.cost([check]).requests
        progress(total, total)
        self.seconds += monotonic() - start

    def _run(self, check: Check, progress: Callable[[int], None]) -> None:
        calls: list[ApiCall] = []
        for step in () if check.skip else check.steps:
            # two checks may need the same request
            planned = [call for call in step.plan(self.replies) if call.key not in self.replies]
            count = [len(calls)]

            def done(count: list[int] = count) -> None:
                count[0] += 1
                progress(count[0])

            self.replies |= self.sender.send_all(planned, step.together, done, keep=not check.ordered)
            calls += planned
        if check.ordered:
            self.sender.keep(calls, self.replies)
        self.calls += calls
        problems = () if check.skip else tuple(map(self._excused, check.judge(self.replies)))
        problems += tuple(self._unanswered(calls, problems))
        figures = {} if check.skip else check.figures(self.replies)
        self.results.append(CheckResult(check, problems, len(calls), figures))

    def _excused(self, problem: Problem) -> Problem:
        """Return a problem, as no error if the server only did not answer in time any request that shows it."""
        shown = [call for call in (problem.call, *problem.others) if call is not None]
        if not shown:
            return problem
        answered = next((call for call in shown if not self._excuses(call)), None)
        return replace(problem, wrong=False, late=True) if answered is None else replace(problem, call=answered)

    def _excuses(self, call: ApiCall) -> bool:
        """Return whether a response is missing that may still come; a hang on an invalid request is an error."""
        reply = self.replies.get(call.key)
        return reply is not None and reply.late and not (call.seconds is not None and reply.failure == "no answer")

    def _unanswered(self, calls: Sequence[ApiCall], problems: Sequence[Problem]) -> Iterator[Problem]:
        """Yield a problem for late responses that no other problem mentions: judges leave out what they cannot read."""
        named = {problem.call.key for problem in problems if problem.call is not None}
        others = [call for call in calls if call.seconds is None and call.key not in named]
        late = [call for call in others if self.replies[call.key].late]
        if late:
            lines = [f"{call.key}: {self.replies[call.key].summary}" for call in late]
            yield Problem(f"requests without an answer in time: {len(late)}", lines, late[0], wrong=False, late=True)

    def answered_tokens(self) -> tuple[int, int]:
        """Return the tokens of prompts and of answers that the server reports."""
        given = drawn = 0
        for reply in self.replies.values():
            for document in (reply.document, *reversed(reply.events)):
                usage = document.get("usage") if isinstance(document, dict) else None
                if isinstance(usage, dict):
                    given += int(usage.get("prompt_tokens") or usage.get("input_tokens") or 0)
                    drawn += int(usage.get("completion_tokens") or usage.get("output_tokens") or 0)
                    break
        return given, drawn


def _shifted(progress: Callable[[int, int], None], before: int, total: int, count: int) -> None:
    progress(before + count, total)
