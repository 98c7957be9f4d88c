"""The plan of a conversion: every matrix once, in time that does not grow with the number of files."""

import pytest

from dsv4cli.engine.config.presets import PRESETS, shortened
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.conversion import plan
from dsv4cli.engine.conversion.gguf import plan as gguf
from dsv4cli.engine.conversion.target import choose_target

CONFIG = parse_config(shortened(PRESETS["tiny"], 3, 4), "test").without_drafter()


@pytest.mark.parametrize("to", ["official", "nvfp4", "transformers", "mp", "gguf"])
def test_a_file_is_planned_from_its_own_matrices(monkeypatch, to):
    target = choose_target(to, CONFIG, ranks=2 if to == "mp" else None)
    owner, looked_at = gguf if to == "gguf" else plan._Writer, []
    make = owner._item
    monkeypatch.setattr(owner, "_item", lambda *given: (looked_at.append(given), make(*given))[1])
    specs = target.table(CONFIG)
    if to == "gguf":
        files = gguf.plan_gguf(specs, target.naming, {}, "model", 400_000)
    else:
        files = plan.plan_files(specs, target.naming, 400_000)
    items = [item for file in files for batch in file.batches for item in batch]
    assert len(files) > (1 if to == "mp" else 8)
    assert len(looked_at) == len(items)
    assert {item.matrix for item in items} == plan.matrices(specs.values()).keys()
