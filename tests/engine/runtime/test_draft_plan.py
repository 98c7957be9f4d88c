"""What the leader takes in of a step with drafts."""

from types import SimpleNamespace

import pytest

from dsv4cli.engine.runtime.drafts.draft_plan import DraftPlan
from dsv4cli.engine.settings import Drafting


@pytest.mark.parametrize(("read", "noted"), [(1, {(1, 4): 0.5}), (6, {})])
def test_steps_that_read_a_prompt_are_not_timed(read, noted):
    plan = DraftPlan(SimpleNamespace(name="mtp", default=3, most=7), Drafting(None), 64)
    for _ in range(2):
        plan.time([SimpleNamespace(first=0, end=read, tokens=read + 3)], 3, (0.5, 0.25))
    assert plan.gate.verifying.seconds == noted
