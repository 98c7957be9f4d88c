"""Translation of `inference/config.json` and of transformers' keys to the official keys; no torch.

Sources: official `ModelArgs`; transformers 5.23 DeepseekV4Config, as its save_pretrained writes it.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from dsv4cli.engine.config.keys import (
    ATTENTION_FACTOR,
    COMPRESS_RATES,
    DEFAULTS,
    DSPARK_KEYS,
    DSPARK_STAGES,
    HASH_MLP,
    INFERENCE_IGNORED,
    INFERENCE_KEYS,
    INFERENCE_ROPE_KEYS,
    LAYER_TYPES,
    MAX_NUMBER,
    RELEASE_KEY,
    ROPE_FIXED,
    SCORE_MLP,
    TRANSFORMERS_KEYS,
)
from dsv4cli.errors import CheckpointError, UnknownKey, UnsupportedCheckpoint

REMEDY = "use the config.json that came with the weights"
# an official key, its value, the keys of transformers that say so
Fact = tuple[str, Any, str]


def translate_inference(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the keys of `inference/config.json` to those of the root `config.json`."""
    rope: dict[str, Any] = {"type": "yarn"}
    result: dict[str, Any] = {"max_position_embeddings": 1048576}
    for key, value in values.items():
        if key in INFERENCE_ROPE_KEYS:
            rope[INFERENCE_ROPE_KEYS[key]] = value
        elif key not in INFERENCE_IGNORED:
            result[INFERENCE_KEYS.get(key, key)] = value
    return result | {"rope_scaling": rope}


def check_agreement(root: Mapping[str, Any], inference: Mapping[str, Any], path: Path, other: Path) -> None:
    """Raise CheckpointError for the first official key that has different values in `path` and `other`."""
    # 0731: the root file says one MTP layer, the inference file counts the three DSpark stages
    skipped = {"max_position_embeddings", "num_nextn_predict_layers", "rope_scaling", RELEASE_KEY}
    if inference.get("expert_dtype") is None and root.get("expert_dtype") != "fp4":
        # in the official script, the value is "fp4", or null for any other dtype
        skipped.add("expert_dtype")
    pairs = [(key, root[key], value) for key, value in inference.items() if key in root and key not in skipped]
    scaling = root.get("rope_scaling", {})
    pairs += [
        (f"rope_scaling.{key}", scaling.get(key, value), value) for key, value in inference["rope_scaling"].items()
    ]
    for key, value, second in pairs:
        if value != second:
            raise CheckpointError(
                f"{path} and {other} contradict each other: {key} is {value!r} and {second!r}",
                "fetch both files again from one revision",
            )


def official_values(values: Mapping[str, Any], where: str, drafter_stored: bool = True) -> dict[str, Any]:
    """Return the values of a root `config.json`, in either dialect or in both, under the official keys alone.

    transformers strips compress_ratios, which include the draft stages. Without them, num_nextn_predict_layers is the
    number of MTP stages. For DSpark the releases state 1 there, so the three stages of every release are assumed unless
    the key says more.

    Args:
        values: content of the file.
        where: names the file in errors.
        drafter_stored: whether the checkpoint has tensors under `mtp.`, which many tools drop. Without them the model
            has no drafter, whatever the keys say; the keys still determine the release.

    Raises CheckpointError, naming both keys, if the dialects contradict each other.
    """
    if values.get("mlp_bias"):
        raise UnsupportedCheckpoint(f"{where}: mlp_bias is {values['mlp_bias']!r}; DeepSeek-V4 has no biases", REMEDY)
    result = {key: value for key, value in values.items() if key not in TRANSFORMERS_KEYS}
    release = _stated_release(result, drafter_stored)
    if not drafter_stored:
        result = _without_drafter(result)
    said_by: dict[str, str] = {}
    for key, value, origin in _facts({**result, **_spoken(values)}, where):
        if result.get(key) is None:
            result[key], said_by[key] = value, origin
        elif result[key] != value:
            first, detail = said_by.get(key, key), _difference(key, result[key], value)
            raise CheckpointError(f"{where}: {first} and {origin} contradict each other: {detail}", REMEDY)
    return result | {RELEASE_KEY: release or _stated_release(result, drafter_stored)}


def _stated_release(values: Mapping[str, Any], drafter_stored: bool) -> Any:
    """Return the release that official keys state, or else the one that their description of a drafter implies.

    April's releases have one MTP stage, 0731 and later DSpark with three. num_nextn_predict_layers is 1 in all of them.
    """
    if values.get(RELEASE_KEY) is not None:
        return values[RELEASE_KEY]
    if any(key in values for key in DSPARK_KEYS):
        return "0731"
    stages = _listed_stages(values)
    # stored stages without DSpark's keys are MTP's, however many there are
    is_dspark = stages == DSPARK_STAGES and not drafter_stored
    return "0731" if is_dspark else "v4" if stages > 0 else None


def _without_drafter(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a model as if it never had a drafter."""
    result = {key: value for key, value in values.items() if key not in DSPARK_KEYS}
    if _listed_stages(values) > 0:
        result["compress_ratios"] = values["compress_ratios"][: values["num_hidden_layers"]]
    return result | {"num_nextn_predict_layers": 0}


def names_drafter(values: Mapping[str, Any]) -> bool:
    """Return whether a root `config.json` describes a drafter."""
    count = values.get("num_nextn_predict_layers")
    return any(key in values for key in DSPARK_KEYS) or _listed_stages(values) > 0 or (type(count) is int and count > 0)


def _listed_stages(values: Mapping[str, Any]) -> int:
    """Return how many entries compress_ratios has after those of the main layers."""
    ratios, layers = values.get("compress_ratios"), values.get("num_hidden_layers")
    return len(ratios) - layers if isinstance(ratios, list) and type(layers) is int and layers > 0 else 0


def _difference(key: str, first: Any, second: Any) -> str:
    """Describe how two values differ; for two lists, which may be long, the first entry that differs."""
    if isinstance(first, list) and isinstance(second, list):
        if len(first) != len(second):
            return f"{key} has {len(first)} and {len(second)} entries"
        entry = next(i for i, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1])
        return f"{key}[{entry}] is {first[entry]!r} and {second[entry]!r}"
    return f"{key} is {first!r} and {second!r}"


def _spoken(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of transformers' keys that are set; null counts as absent."""
    return {key: values[key] for key in TRANSFORMERS_KEYS if values.get(key) is not None}


def _facts(values: Mapping[str, Any], where: str) -> Iterator[Fact]:
    """Yield the values of transformers' keys as official keys."""
    if values.get("compress_rates", COMPRESS_RATES) != COMPRESS_RATES:
        raise UnsupportedCheckpoint(
            f"{where}: compress_rates is {values['compress_rates']!r}; known values are 4 and 128"
        )
    if "layer_types" in values:
        yield "compress_ratios", _ratios(values, where), "layer_types"
    if "mlp_layer_types" in values:
        yield "num_hash_layers", _hash_layers(values, where), "mlp_layer_types"
    if "partial_rotary_factor" in values:
        yield "qk_rope_head_dim", _rope_dim(values, values["partial_rotary_factor"]), "partial_rotary_factor"
    if "rope_parameters" in values:
        yield from _rope(values, where)


def _types(values: Mapping[str, Any], key: str, known: Collection[str], where: str) -> list[str]:
    """Return one of the lists with a type for each main layer, checked against the known types."""
    types, layers = values[key], values.get("num_hidden_layers")
    if not isinstance(types, list) or len(types) != layers:
        what = f"{len(types)} entries" if isinstance(types, list) else f"{types!r}"
        raise CheckpointError(
            f"{where}: {key} and num_hidden_layers contradict each other: {what} and {layers!r} layers", REMEDY
        )
    strange = [name for name in types if name not in known]
    if strange:
        raise UnsupportedCheckpoint(f"{where}: {key} holds {strange[0]!r}; known values are {', '.join(known)}")
    return types


def _ratios(values: Mapping[str, Any], where: str) -> list[Any]:
    """Return the ratios of the main layers, then those of the draft stages from compress_ratios, or zeros."""
    ratio_of = {name: ratio for ratio, name in LAYER_TYPES.items()}
    ratios = [ratio_of[name] for name in _types(values, "layer_types", [*ratio_of], where)]
    given = values.get("compress_ratios")
    return ratios + (given[len(ratios) :] if isinstance(given, list) else [0] * _stages(values, len(ratios)))


def _stages(values: Mapping[str, Any], layers: int) -> int:
    """Return the number of draft stages of a model that does not list them.

    0 for an absurd number, which is refused later.
    """
    count = values.get("num_nextn_predict_layers", DEFAULTS["num_nextn_predict_layers"])
    if type(count) is not int or not 0 <= count <= max(layers, DSPARK_STAGES):
        return 0
    return DSPARK_STAGES if count <= 1 and any(key in values for key in DSPARK_KEYS) else count


def _hash_layers(values: Mapping[str, Any], where: str) -> int:
    types = _types(values, "mlp_layer_types", (HASH_MLP, SCORE_MLP), where)
    count = types.count(HASH_MLP)
    if HASH_MLP in types[count:]:
        raise UnsupportedCheckpoint(f"{where}: mlp_layer_types has {HASH_MLP!r} after {SCORE_MLP!r}", REMEDY)
    given = values.get("num_hash_layers")
    # all of them, and the number may be larger
    return given if type(given) is int and given > count == len(types) else count


def _rope_dim(values: Mapping[str, Any], factor: Any) -> Any:
    """Return the rotated dimensions of a head, computed from `factor` as in transformers; None if they cannot be."""
    width = values.get("head_dim")
    if type(width) is not int or not 0 <= width <= MAX_NUMBER or type(factor) not in (int, float):
        return None
    if not 0 <= factor <= 1:
        return None
    return int(width * factor)


def _rope(values: Mapping[str, Any], where: str) -> Iterator[Fact]:
    """Yield the official keys of rope_parameters: `main` for layers without a compressor, `compress` for the others."""
    main = _table(values, "main", {"rope_type": "default"}, where)
    compress = _table(values, "compress", {"rope_type": "yarn", "attention_factor": ATTENTION_FACTOR}, where)
    for key, name, table in (("rope_theta", "main", main), ("compress_rope_theta", "compress", compress)):
        yield key, table.get("rope_theta"), f"rope_parameters.{name}.rope_theta"
        if "partial_rotary_factor" in table:
            origin = f"rope_parameters.{name}.partial_rotary_factor"
            yield "qk_rope_head_dim", _rope_dim(values, table["partial_rotary_factor"]), origin
    given = values.get("rope_scaling")
    kind = {key: given[key] for key in ("type", "rope_type") if key in given} if isinstance(given, Mapping) else {}
    scaling = {key: compress[key] for key in INFERENCE_ROPE_KEYS.values() if key in compress}
    yield "rope_scaling", (kind or {"type": "yarn"}) | scaling, "rope_parameters.compress"


def _table(values: Mapping[str, Any], name: str, fixed: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return one of the two tables; every key in `fixed` must have the given value."""
    tables = values["rope_parameters"]
    table = tables.get(name) if isinstance(tables, Mapping) else None
    if not isinstance(table, Mapping):
        raise CheckpointError(f"{where}: rope_parameters is {str(tables)[:80]}, expected main and compress", REMEDY)
    known = {"type", "rope_theta", "partial_rotary_factor", *fixed}
    known |= {*INFERENCE_ROPE_KEYS.values(), *ROPE_FIXED} if name == "compress" else set()
    unknown = sorted(key for key in table if key not in known)
    if unknown:
        raise UnknownKey(f"{where}: unknown key rope_parameters.{name}.{unknown[0]}", REMEDY)
    for key, value in fixed.items():
        if table.get(key) != value:
            raise UnsupportedCheckpoint(
                f"{where}: rope_parameters.{name}.{key} is {table.get(key)!r}; DeepSeek-V4 has {value!r}", REMEDY
            )
    check_rope_table(table, f"{where}: rope_parameters.{name}")
    return table


def check_rope_table(table: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedCheckpoint for a key whose value differs from DeepSeek-V4's."""
    for key, allowed in ROPE_FIXED.items():
        if table.get(key) not in allowed:
            raise UnsupportedCheckpoint(f"{where}.{key} is {table[key]!r}; DeepSeek-V4 has {allowed[0]!r}", REMEDY)
