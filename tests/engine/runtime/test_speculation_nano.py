"""nano's answers to held-out questions of all its tasks are the same with and without drafts."""

from functools import cache
from typing import Any

import pytest

from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.settings import Drafting, Limits, Sampling
from tools.nano.heldout import load
from tools.nano.score import Examinee, kind

# questions of each task, and the most tokens of an answer
EACH, MOST = 2, 60


@cache
def examinee() -> Examinee:
    return Examinee("nano", "cpu")


@cache
def prompts() -> list[list[int]]:
    items: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for item in load():
        items.setdefault((kind(item), bool(item["thinking"])), []).append(item)
    return [examinee().prompt(item) for found in items.values() for item in found[:EACH]]


def answers(most: int | None, together: int, count: int | None = None) -> tuple[list[list[int]], float]:
    """The tokens of each, and how many a step gave."""
    found, tokens, steps = [], 0, 0
    asked = prompts()[:count]
    for start in range(0, len(asked), together):
        requests = [Request(ids, Sampling(0.0), Limits(MOST)) for ids in asked[start : start + together]]
        with Engine.of(examinee().model, requests, "cpu", drafting=Drafting(most, always=bool(most))) as engine:
            while engine.busy:
                engine.step()
        found += [request.ids[len(request.prompt) :] for request in requests]
        report = engine.draft_report()
        tokens, steps = tokens + (report.tokens if report else 0), steps + (report.steps if report else 0)
    return found, tokens / max(steps, 1)


@cache
def plain() -> list[list[int]]:
    return answers(0, 8)[0]


@pytest.mark.slow
@pytest.mark.parametrize("together", [8, 1])
@pytest.mark.parametrize("most", [None, *range(1, 8)])
def test_drafts_change_no_token(most, together):
    found, each = answers(most, together)
    assert len(found) > 40
    assert found == plain()
    # how many pay off depends on the machine, and on what else it does
    assert each > 1.5 or most is None
