"""How many drafts there may be."""

from dataclasses import replace

import pytest

from dsv4cli.engine.config.capacity import ROLLBACK
from dsv4cli.engine.config.presets import FLASH_0731
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.runtime.drafts.drafters import default_drafts, most_drafts


@pytest.mark.parametrize(("block", "most"), [(3, 3), (12, ROLLBACK - 1)])
def test_no_more_drafts_than_can_be_taken_back(block, most):
    config = parse_config(FLASH_0731, "flash-0731")
    assert config.dspark is not None
    config = replace(config, dspark=replace(config.dspark, block_size=block))
    assert most_drafts(config) == default_drafts(config) == most
