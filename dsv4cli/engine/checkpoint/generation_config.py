"""The sampling defaults of a checkpoint, from its generation_config.json; no torch."""

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsv4cli.engine.settings import Sampling
from dsv4cli.engine.system.regular_files import read_bytes
from dsv4cli.errors import CheckpointError, UsageError


def own_sampling(folder: Path) -> Sampling:
    """Return the sampling defaults in a checkpoint's generation_config.json; temperature 1 if it has none.

    A key that is null counts as absent, as in transformers.

    Raises:
        CheckpointError: the file is invalid.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return Sampling()
    try:
        values = json.loads(read_bytes(path).decode())
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        given: dict[str, Any] = {key: value for key, value in values.items() if value is not None}
        temperature = _number(given, "temperature") if given.get("do_sample", True) else 0.0
        top_k, min_p = _number(given, "top_k", 0), _number(given, "min_p", 0)
        if top_k != int(top_k):
            raise ValueError(f"top_k is {top_k}, expected a whole number")
        return Sampling(
            temperature,
            _number(given, "top_p"),
            top_k=int(top_k),
            min_p=min_p,
            repetition_penalty=_number(given, "repetition_penalty"),
        )
    except (OSError, ValueError, OverflowError, RecursionError, UsageError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}", "correct it, fetch it again, or remove it") from None


def _number(given: Mapping[str, Any], key: str, otherwise: float = 1.0) -> float:
    """Return a number of the file, or `otherwise` if it is absent."""
    value = given.get(key, otherwise)
    if type(value) not in (int, float):
        raise ValueError(f"{key} is {reprlib.repr(value)}, expected a number")
    return float(value)
