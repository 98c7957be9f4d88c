"""The leader's decisions about draft tokens: how many a step verifies, how many follow it, and the statistics."""

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite

from dsv4cli.engine.runtime.drafts.draft_controller import AlwaysDraft, DraftController
from dsv4cli.engine.runtime.drafts.draft_report import DraftReport
from dsv4cli.engine.runtime.drafts.drafters import Drafter
from dsv4cli.engine.runtime.request import Request, Token
from dsv4cli.engine.runtime.step import Chunk
from dsv4cli.engine.settings import Drafting
from dsv4cli.errors import UnsoundResult


class DraftPlan:
    """The draft decisions of one engine.

    Attributes:
        report: statistics.
    """

    def __init__(self, drafter: Drafter, drafting: Drafting, rows: int) -> None:
        """Args:
        drafting: maximum number of draft tokens; None means the drafter's usual number.
        rows: maximum number of rows of a step with draft tokens.
        """
        bound = drafter.default if drafting.most is None else min(drafting.most, drafter.most)
        self.gate = AlwaysDraft(bound, rows) if drafting.always else DraftController(bound, rows)
        self.report = DraftReport(drafter.name, per_position=[0] * bound)
        self._chances: dict[Request, list[float]] = {}

    def begin(self, requests: Sequence[Request], active: Sequence[Request]) -> int:
        """Trim the requests' draft tokens to those that the next step verifies; return how many to draft after it.

        Args:
            active: these and all other running requests.
        """
        for gone in self._chances.keys() - set(active):
            del self._chances[gone]
        count = self.gate.drafts(len(requests), [self._chances.get(request, []) for request in requests])
        for request in requests:
            request.drafts = request.drafts[: max(min(count, request.end - len(request.ids) - 1), 0)]
        return self.gate.count(len(requests))

    def take(self, ready: Sequence[Chunk], sampled: Sequence[Sequence[Token]], made: Sequence[Sequence[float]]) -> None:
        """Record each ready request's tokens and its new draft tokens, followed by their probabilities.

        Draft tokens after the end of an answer do not count. Raises UnsoundResult for probabilities that are not
        finite.
        """
        report, per_position, steps, drafted, count = self.report, list(self.report.per_position), 0, 0, 0
        for chunk, tokens, row in zip(ready, sampled, made, strict=True):
            accepted = len(tokens) - 1
            decodes = chunk.first >= len(chunk.request.prompt)  # not where a prompt is read
            steps, count = steps + decodes, count + len(tokens) * decodes
            verified = accepted if tokens[-1].finish else len(chunk.drafts)
            drafted += verified
            chunk.request.drafted += verified
            chunk.request.accepted += accepted
            self.gate.note_drafts(self._chances.get(chunk.request, []), verified, accepted)
            for number in range(accepted):
                per_position[number] += 1
            middle = len(row) // 2
            if not all(map(isfinite, row[middle:])):
                raise UnsoundResult(
                    "the drafter's chances are not finite: its weights or this machine's arithmetic are wrong",
                    "compare the checksums of the weight files with the publisher's; --draft off does without it",
                )
            chunk.request.drafts = [int(token) for token in row[:middle]]
            self._chances[chunk.request] = list(row[middle:])
        self.report = replace(
            report,
            steps=report.steps + steps,
            drafted=report.drafted + drafted,
            accepted=sum(per_position),
            per_position=per_position,
            tokens=report.tokens + count,
        )

    def time(self, chunks: Sequence[Chunk], count: int, seconds: Sequence[float]) -> None:
        """Record the time of a step whose chunks are consecutive tokens, and of the drafting after it."""
        if all(chunk.end - chunk.first == 1 for chunk in chunks):
            verifying, drafting = seconds
            self.gate.verifying.note(len(chunks), max(chunk.tokens for chunk in chunks), verifying)
            self.gate.drafting.note(len(chunks), count, drafting)
