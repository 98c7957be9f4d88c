"""Reading and validating a checkpoint's `config.json` in every dialect; no torch."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsv4cli.engine.config.checks import REMEDY, check_config, number
from dsv4cli.engine.config.dialects import check_agreement, check_rope_table, official_values, translate_inference
from dsv4cli.engine.config.keys import (
    DEFAULTS,
    DSPARK_KEYS,
    EOS_TOKEN_ID,
    FIXED,
    IGNORED,
    INTEGERS,
    MODEL_TYPE,
    NUMBERS,
    RELEASE_KEY,
    ROPE_FIXED,
)
from dsv4cli.engine.config.layer_kind import LAYER_KINDS
from dsv4cli.engine.config.model_config import DSparkConfig, ModelConfig, Yarn
from dsv4cli.engine.config.presets import RELEASES, Release
from dsv4cli.engine.config.storage import check_storage
from dsv4cli.engine.system.regular_files import is_there, read_bytes
from dsv4cli.errors import CheckpointError, UnknownKey, UnsupportedCheckpoint

# objects and lists in each other; a release has 3
MAX_DEPTH = 20


def read_config(folder: Path, drafter_stored: bool = True) -> ModelConfig:
    """Read the configuration of a checkpoint folder: `config.json`, or `inference/config.json` if that is missing.

    drafter_stored: as in `parse_config`. Raises CheckpointError when neither file exists, one is not JSON, or a key is
    missing or contradicts another, and UnsupportedCheckpoint when the file describes another model.
    """
    files = config_values(folder)
    path, values = next(files)
    config = parse_config(values, str(path), drafter_stored)
    for other, second in files:
        both = ((values, path), (second, other))
        first, second = (official_values(one, str(named), drafter_stored) for one, named in both)
        check_agreement(first, second, path, other)
    return config


def config_values(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield path and values of `config.json` and of `inference/config.json` (keys translated), those that exist.

    Raises CheckpointError when neither exists or one is not JSON.
    """
    root, inference = folder / "config.json", folder / "inference" / "config.json"
    here = [path for path in (root, inference) if is_there(path)]
    if not here:
        raise CheckpointError(f"{folder} has no config.json", "copy config.json of the official repository into it")
    if root in here:
        yield root, read_json(root)
    if inference in here:
        yield inference, translate_inference(read_json(inference))


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises CheckpointError if it cannot be read or is nested too deeply to display.
    """
    remedy = f"fetch {path.name} again"
    try:
        values = json.loads(read_bytes(path).decode())
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}", remedy) from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} does not contain a JSON object", remedy)
    inner: list[Any] = [values]
    for _ in range(MAX_DEPTH):
        parts = [value.values() if isinstance(value, dict) else value for value in inner]
        inner = [child for part in parts for child in part if isinstance(child, dict | list)]
    if inner:
        raise CheckpointError(f"{path} is nested more than {MAX_DEPTH} deep", remedy)
    return values


def parse_config(values: Mapping[str, Any], where: str, drafter_stored: bool = True) -> ModelConfig:
    """Validate a root `config.json`, in official keys, transformers' keys or both, and build the ModelConfig.

    Args:
        values: content of the file.
        where: names the file in errors.
        drafter_stored: whether the checkpoint has tensors under `mtp.` (see `official_values`).
    """
    _refuse_other_models(values, where)
    check_storage(values, where)
    return _build(official_values(values, where, drafter_stored), where)


def _build(values: Mapping[str, Any], where: str) -> ModelConfig:
    """Return the model that the official keys describe, independent of how its weights are stored."""
    for key, value in FIXED.items():
        if values.get(key, value) != value:
            raise UnsupportedCheckpoint(f"{where}: {key} is {values[key]!r}; DeepSeek-V4 has {value!r}", REMEDY)
    numbers: dict[str, Any] = {key: number(values, key, int, where) for key in INTEGERS}
    numbers |= {key: number(values, key, float, where) for key in NUMBERS}
    given = DEFAULTS | {key: value for key, value in values.items() if key in DEFAULTS and value is not None}
    numbers |= {key: number(given, key, type(value), where) for key, value in DEFAULTS.items()}
    numbers["num_hash_layers"] = min(numbers["num_hash_layers"], numbers["num_hidden_layers"])
    nextn = numbers.pop("num_nextn_predict_layers")
    dspark = _dspark(values, where)
    known = {*numbers, *FIXED, *IGNORED, *DSPARK_KEYS, "num_nextn_predict_layers", "eos_token_id", "model_type"}
    known |= {"compress_ratios", "rope_scaling", "quantization_config", "expert_dtype", RELEASE_KEY}
    unknown = sorted(key for key in values if key not in known)
    if unknown:
        raise UnknownKey(
            f"{where}: unknown key {unknown[0]!r}, which may change the model's numbers",
            "use the config.json of the release, or remove the key if it is harmless",
        )
    config = ModelConfig(
        **numbers,
        eos_token_ids=_end_tokens(values.get("eos_token_id"), where),
        yarn=_yarn(values, where),
        compress_ratios=_ratios(values, where),
        dspark=dspark,
        release=_release(values, where),
    )
    check_config(config, nextn, where)
    return config


def _refuse_other_models(values: Mapping[str, Any], where: str) -> None:
    model_type = values.get("model_type", MODEL_TYPE)
    if model_type != MODEL_TYPE:
        remedy = "use a release of that model's own engine (vLLM and SGLang run it)"
        raise UnsupportedCheckpoint(f"{where}: model_type is {model_type!r}; dsv4 runs only {MODEL_TYPE!r}", remedy)


def _end_tokens(given: Any, where: str) -> tuple[int, ...]:
    """Return the EOS tokens: one, several, or the official one if the file names none."""
    if given is None:
        return (EOS_TOKEN_ID,)
    several = given if isinstance(given, list) else [given]
    if not several:
        raise CheckpointError(f"{where}: eos_token_id is []: no answer would end", REMEDY)
    return tuple(dict.fromkeys(number({"eos_token_id": one}, "eos_token_id", int, where) for one in several))


def _yarn(values: Mapping[str, Any], where: str) -> Yarn:
    scaling = values.get("rope_scaling")
    if not isinstance(scaling, Mapping) or scaling.get("type", scaling.get("rope_type")) != "yarn":
        raise CheckpointError(f"{where}: rope_scaling is {scaling!r}, expected type 'yarn'", "use the official file")
    unknown = set(scaling) - {"type", "rope_type", *ROPE_FIXED, *Yarn.__dataclass_fields__}
    if unknown:
        raise UnknownKey(f"{where}: unknown key rope_scaling.{min(unknown)}", REMEDY)
    check_rope_table(scaling, f"{where}: rope_scaling")
    kinds = {"original_max_position_embeddings": int}
    numbers = {
        key: number(scaling, key, kinds.get(key, float), where, "rope_scaling.") for key in Yarn.__dataclass_fields__
    }
    return Yarn(**numbers)


def _ratios(values: Mapping[str, Any], where: str) -> tuple[int, ...]:
    ratios = values.get("compress_ratios")
    if not isinstance(ratios, list) or not ratios:
        raise CheckpointError(f"{where} lacks the list 'compress_ratios'", REMEDY)
    strange = [ratio for ratio in ratios if type(ratio) is not int or ratio not in LAYER_KINDS]
    if strange:
        raise UnsupportedCheckpoint(f"{where}: compress_ratios holds {strange[0]!r}; known values are 0, 4 and 128")
    return tuple(ratios)


def _release(values: Mapping[str, Any], where: str) -> Release | None:
    given = values.get(RELEASE_KEY)
    for release in RELEASES:
        if given == release:
            return release
    if given is None:
        return None
    known = ", ".join(RELEASES)
    raise CheckpointError(
        f"{where}: {RELEASE_KEY} is {given!r}, known releases are {known}", "correct the key, or remove it"
    )


def _dspark(values: Mapping[str, Any], where: str) -> DSparkConfig | None:
    if not any(key in values for key in DSPARK_KEYS):
        return None
    block, noise, rank = (number(values, key, int, where) for key in (*DSPARK_KEYS[:2], DSPARK_KEYS[3]))
    targets = values.get("dspark_target_layer_ids")
    if not isinstance(targets, list) or not all(type(layer) is int for layer in targets):
        raise CheckpointError(f"{where}: dspark_target_layer_ids is {targets!r}, expected a list of layers", REMEDY)
    return DSparkConfig(block, noise, tuple(targets), rank)
