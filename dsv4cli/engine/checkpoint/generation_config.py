"""How a checkpoint asks to be sampled: its generation_config.json; no torch."""

import json
from pathlib import Path
from typing import Any

from dsv4cli.engine.settings import Sampling
from dsv4cli.engine.system.regular_files import read_bytes
from dsv4cli.errors import CheckpointError, UsageError


def own_sampling(folder: Path) -> Sampling:
    """The sampling that a checkpoint asks for in its generation_config.json; at temperature 1 where it has none.

    Raises CheckpointError for a file that holds something else.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return Sampling()
    try:
        values: dict[str, Any] = json.loads(read_bytes(path).decode())
        temperature, top_p = float(values.get("temperature", 1.0)), float(values.get("top_p", 1.0))
        return Sampling(temperature if values.get("do_sample", True) else 0.0, top_p)
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError, UsageError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}", "fetch it again, or remove it") from None
