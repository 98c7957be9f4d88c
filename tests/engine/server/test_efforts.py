"""How hard to think, in every client's words."""

import pytest

from dsv4cli.engine.server.efforts import Effort, effort_of
from dsv4cli.engine.server.fields import Fields


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Effort("off")),
        ({"reasoning_effort": "minimal"}, Effort("low", None, True)),
        ({"reasoning_effort": "medium"}, Effort("low", None, True)),
        ({"reasoning_effort": "high"}, Effort("high", None, True)),
        ({"reasoning_effort": "xhigh"}, Effort("max", None, True)),
        ({"reasoning_effort": "none"}, Effort("off", None, True)),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, Effort("high", 9, True)),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, Effort("max", None, True)),
        ({"output_config": {"effort": "max"}}, Effort("off")),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, Effort("off", None, True)),
        ({"chat_template_kwargs": {"thinking": True}}, Effort("high", None, True)),
        ({"chat_template_kwargs": {"enable_thinking": False}}, Effort("off", None, True)),
        ({"chat_template_kwargs": {"thinking": True, "reasoning_effort": "max"}}, Effort("max", None, True)),
        ({"reasoning": {"effort": "low", "max_tokens": 5}}, Effort("low", 5, True)),
        ({"reasoning": {"enabled": True}}, Effort("high", None, True)),
        ({"reasoning": {"max_tokens": 5}}, Effort("high", 5, True)),
        ({"reasoning": {"max_tokens": 5, "enabled": False}}, Effort("off", None, True)),
        ({"reasoning": {"max_tokens": 5, "effort": "none"}}, Effort("off", None, True)),
    ],
    ids=str,
)
def test_every_dialect_is_understood(fields, expected):
    assert effort_of(Fields(fields), "0731", "off") == expected


def test_a_level_that_a_release_lacks_is_the_next_one():
    assert effort_of(Fields({"reasoning_effort": "low"}), "v4", "off").level == "high"


def test_what_is_left_open_is_the_server_s():
    assert effort_of(Fields({}), "v4", "max") == Effort("max")
    assert effort_of(Fields({"thinking": {"type": "enabled"}}), "v4", "max").level == "max"
