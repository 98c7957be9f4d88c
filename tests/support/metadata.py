"""What the tests of a conversion's metadata share: a model, its files, and how they get into a folder."""

import json
from pathlib import Path

from dsv4cli.engine.config.read import read_config
from dsv4cli.engine.config.storage import Formats
from tests.support.damage import GOLDEN

TINY = GOLDEN / "tiny-flash"
CONFIG = read_config(TINY)
ROOT = json.loads((TINY / "config.json").read_text()) | {"dsv4_release": "v4"}
# formats that --attention and --experts can ask for beside the targets' own
PARTIAL = [Formats("bf16", "fp4"), Formats("fp8", "bf16"), Formats("bf16", "fp8"), Formats("f32", "f32", "f32")]


def with_inference(folder: Path) -> Path:
    """A source that has inference/config.json, as the official repositories have."""
    (folder / "inference").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(ROOT))
    (folder / "inference" / "config.json").write_text(json.dumps({"dim": 256, "expert_dtype": "fp4"}))
    return folder


def saved(folder: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder
