"""The golden checkpoints stored differently: other formats, other names, cut for ranks; slow and plain.

It shares no line with `dsv4 convert`: what it writes is an independent opinion.
"""

from collections.abc import Callable, Collection
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from dsv4cli.engine.checkpoint.identify import recognise
from dsv4cli.engine.checkpoint.layout import TensorSpec, expected_tensors, matrices
from dsv4cli.engine.checkpoint.naming import Location, Naming, OfficialNaming
from dsv4cli.engine.checkpoint.stored import StoredModel
from dsv4cli.engine.checkpoint.values import decode, e4m3_values, form_of
from dsv4cli.engine.config.storage import Formats
from tests.support import damage

GOLDEN = damage.GOLDEN / "tiny-flash"
OFFICIAL = Formats()
Arrays = dict[str, np.ndarray]
# name of a matrix, its official format, its raw arrays by role, the wanted format -> raw arrays by role
Encode = Callable[[str, str, Arrays, str], Arrays]


def recoded(name: str, old: str, raw: Arrays, new: str) -> Arrays:
    """The raw arrays of a matrix in another format; exact for power-of-two scales that fit."""
    if old == new:
        return raw
    values = decode(old, raw)
    if new == "f32":
        return {"weight": values}
    if new == "bf16":
        return {"weight": torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()}
    if new == "nvfp4":
        # e8m0 byte b to the e4m3 code of 2 ** (b - top + 8), for two blocks of 16 each
        top = int(raw["scale"].max())
        exponent = raw["scale"].astype(int) - top + 8
        assert exponent.min() >= -6
        scale = ((exponent + 7) << 3).astype(np.uint8).repeat(2, axis=1)
        second, one = np.array(2.0 ** (top - 127 - 8), np.float32), np.array(1, np.float32)
        return {"weight": raw["weight"], "weight_scale": scale, "weight_scale_2": second, "input_scale": one}
    if new == "fp8_f32":
        coded = recoded(name, old, raw, "fp8")
        return {**coded, "scale": np.ldexp(1.0, coded["scale"].astype(int) - 127).astype(np.float32)}
    assert new == "fp8", new
    rows, columns = values.shape
    blocks = np.abs(values).reshape(rows // 128, 128, columns // 128, 128).max((1, 3))
    scale = np.floor(np.log2(np.maximum(blocks, 2.0**-100))) - 8
    unscaled = values / np.ldexp(1.0, scale.astype(int)).repeat(128, 0).repeat(128, 1)
    return {"weight": e4m3_codes(unscaled.astype(np.float32)), "scale": (scale + 127).astype(np.uint8)}


def write_variant(
    target: Path,
    formats: Formats = OFFICIAL,
    naming: Naming | None = None,
    encode: Encode = recoded,
    source: Path = GOLDEN,
) -> Path:
    """Writes a golden checkpoint in other formats and names; `encode` makes the arrays of each matrix."""
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    specs, tensors = _arrays(formats, encode, source)
    lay_out(target, naming or OfficialNaming(), specs, tensors)
    return target


@lru_cache(maxsize=8)
def _arrays(formats: Formats, encode: Encode, source: Path) -> tuple[list[TensorSpec], Arrays]:
    """The table of a golden checkpoint in these formats, and its tensors, which nobody changes."""
    with StoredModel(recognise(source)) as model:
        specs = expected_tensors(model.identity.config, formats)
        old = model.matrices()
        tensors = {}
        for name, parts in matrices(specs.values()).items():
            raw = {role: model.read(spec) for role, spec in old[name].items()}
            made = encode(name, form_of(old[name]["weight"]), raw, form_of(parts["weight"]))
            tensors |= {parts[role].name: array for role, array in made.items()}
    return [*specs.values()], tensors


def e4m3_codes(values: np.ndarray) -> np.ndarray:
    """The nearest codes; a tie may go either way."""
    table = e4m3_values()[:0x7F]
    nearest = np.searchsorted((table[1:] + table[:-1]) / 2, np.abs(values)).astype(np.uint8)
    return nearest | (np.signbit(values).astype(np.uint8) << 7)


def lay_out(folder: Path, naming: Naming, specs: Collection[TensorSpec], tensors: Arrays) -> None:
    """Writes tensors, raw arrays by official name, where a naming puts them."""
    stored: dict[str, tuple[Location, np.ndarray]] = {}
    for spec in specs:
        for location in naming.locations(spec):
            part = 1 / tensors[spec.name] if location.reciprocal else tensors[spec.name]
            if location.cut:
                part = np.take(part, range(part.shape[location.cut.dim])[location.cut.of(part.shape)], location.cut.dim)
            shape = (*location.shape[:-1], location.shape[-1] // 2) if location.dtype == "F4" else location.shape
            _, whole = stored.setdefault(location.name, (location, np.zeros(shape, part.dtype)))
            whole.reshape(-1)[location.begin : location.begin + part.size] = part.reshape(-1)
    files: dict[str, dict[str, damage.Stored]] = {}
    for key, (location, array) in stored.items():
        file, _, name = key.rpartition("/")
        entry = damage.Stored(location.dtype, list(location.shape), array.tobytes())
        files.setdefault(file or "model", {})[name] = entry
    for file, entries in files.items():
        damage.write_shard(folder / f"{file}.safetensors", entries)
