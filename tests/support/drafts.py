"""Steps that give several tokens, as with drafts that the model draws itself."""

import pytest

from dsv4cli.engine.runtime.drafts.draft_report import DraftReport
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.request import Request, Result


class ManyTokens:
    """Makes the steps of every engine give up to `most` tokens to each request, one in those that read a prompt.

    What a step gave is in `steps`; engines report as if each had verified `most` - 1 drafts a request.
    """

    def __init__(self, patch: pytest.MonkeyPatch, most: int = 3) -> None:
        self.most = most
        self.steps: list[list[int]] = []
        self.single = Engine.step
        self.reports: dict[Engine, DraftReport] = {}
        patch.setattr(Engine, "step", lambda engine: self._step(engine))
        patch.setattr(Engine, "draft_report", lambda engine: self._report(engine))

    def _step(self, engine: Engine) -> list[Result]:
        found = {one.request: one for one in self.single(engine)}
        drafts = self.most - 1 if all(_decodes(one) for one in found.values()) else 0
        for _ in range(drafts):
            for more in self.single(engine) if engine.busy else ():
                before = found[more.request]
                found[more.request] = Result(more.request, before.tokens + more.tokens)
        self._count(engine, [len(one.tokens) for one in found.values()], drafts)
        self.steps.append([len(one.tokens) for one in found.values()])
        return list(found.values())

    def _report(self, engine: Engine) -> DraftReport:
        return self.reports.get(engine, DraftReport("mtp"))

    def _count(self, engine: Engine, given: list[int], drafts: int) -> None:
        before, given = self._report(engine), [count for count in given if count]
        earlier = before.per_position or [0] * (self.most - 1)
        self.reports[engine] = DraftReport(
            "mtp",
            before.steps + len(given),
            before.drafted + drafts * len(given),
            before.accepted + sum(given) - len(given),
            [had + sum(count > place + 1 for count in given) for place, had in enumerate(earlier)],
            before.tokens + sum(given),
        )


def _decodes(result: Result) -> bool:
    request: Request = result.request
    return len(request.ids) - len(result.tokens) > len(request.prompt)
