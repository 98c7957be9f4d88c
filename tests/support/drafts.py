"""Steps that give several tokens, as with drafts that the model draws itself."""

import pytest

from dsv4cli.engine.runtime.draft_report import DraftReport
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
        if all(_decodes(one) for one in found.values()):
            for _ in range(self.most - 1):
                # those that go on; none of them begins
                for more in self.single(engine) if engine.busy else ():
                    before = found[more.request]
                    found[more.request] = Result(more.request, before.tokens + more.tokens)
            self._count(engine, list(found.values()))
        self.steps.append([len(one.tokens) for one in found.values()])
        return list(found.values())

    def _report(self, engine: Engine) -> DraftReport:
        return self.reports.get(engine, DraftReport("mtp"))

    def _count(self, engine: Engine, results: list[Result]) -> None:
        before, drafted = self._report(engine), self.most - 1
        accepted = [len(one.tokens) - 1 for one in results]
        earlier = before.per_position or [0] * drafted
        self.reports[engine] = DraftReport(
            "mtp",
            before.steps + len(results),
            before.drafted + drafted * len(results),
            before.accepted + sum(accepted),
            [had + sum(count > place for count in accepted) for place, had in enumerate(earlier)],
            before.tokens + sum(len(one.tokens) for one in results),
        )


def _decodes(result: Result) -> bool:
    request: Request = result.request
    return len(request.ids) - len(result.tokens) > len(request.prompt)
