"""The ways in which checkpoints go wrong, each found by `dsv4 inspect` with the tensor's name; and arbitrary damage.

The traps are those that users of this model reported: converters that read a scale as a number or lose it, loaders that
skip what they do not know, tools that narrow what is F32.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dsv4cli.engine.checkpoint.values import e4m3_values, e8m0_values
from tests.support import damage, foreign, program
from tests.support.damage import Damage, Stored

HASH, SCORED = "layers.0.ffn.gate.", "layers.3.ffn.gate."
WO_A, WO_A_SCALE = "layers.3.attn.wo_a.weight", "layers.3.attn.wo_a.scale"
EXPERT = "layers.2.ffn.experts.1.w2"


def inspect(folder: Path, *options: str):
    return program.inside("inspect", str(folder), *options)


def raw(stored: Stored, kind: type = np.uint8) -> np.ndarray:
    return np.frombuffer(stored.data, kind)


def bf16(values: np.ndarray) -> bytes:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


def of(tensor: str, change: Callable[[Stored], Stored]) -> Damage:
    """Changes one tensor."""
    return lambda folder: damage.edit_tensor(folder, tensor, change)


def data(tensor: str, change: Callable[[Stored], bytes]) -> Damage:
    """Changes the bytes of one tensor."""
    return of(tensor, lambda stored: replace(stored, data=change(stored)))


def without(*words: str) -> Damage:
    """Loses the tensors whose names have one of these words, from files and index."""

    def lose(folder: Path) -> None:
        damage.rewrite(folder, lambda name, stored: {} if any(word in name for word in words) else {name: stored})

    return lose


def renamed(old: str, new: str) -> Damage:
    """Gives tensors another name."""
    return lambda folder: damage.rewrite(folder, lambda name, stored: {name.replace(old, new): stored})


def converted_by_value(stored: Stored) -> bytes:
    """e8m0 scales copied as numbers into bytes: 2^-9 becomes 0."""
    return e8m0_values()[raw(stored)].astype(np.uint8).tobytes()


def byte_as_number(stored: Stored) -> bytes:
    """The byte 120 taken for the number 120.0, whose nearest power of two is 2^7."""
    return (np.round(np.log2(raw(stored).astype(float))) + 127).astype(np.uint8).tobytes()


def widened_scale(stored: Stored) -> Stored:
    """The bytes of a scale as floats: 120 becomes 120.0."""
    return Stored("F32", stored.shape, raw(stored).astype(np.float32).tobytes())


def codes_as_bf16(every: bool) -> Damage:
    """wo_a cast to BF16 without its block scale, in every layer or in one."""

    def cast(name: str, stored: Stored) -> dict[str, Stored]:
        if not name.endswith(("attn.wo_a.weight", "attn.wo_a.scale")) or not (every or name[:8] == WO_A[:8]):
            return {name: stored}
        return {} if name.endswith("scale") else {name: Stored("BF16", stored.shape, bf16(e4m3_values()[raw(stored)]))}

    return lambda folder: damage.rewrite(folder, cast)


def narrowed(stored: Stored) -> bytes:
    """F32 to BF16 and back."""
    return (raw(stored, np.uint32) & 0xFFFF0000).astype(np.uint32).tobytes()


def as_bf16(stored: Stored) -> Stored:
    return Stored("BF16", stored.shape, bf16(raw(stored, np.float32)))


def one_byte(value: int) -> Callable[[Stored], bytes]:
    return lambda stored: bytes([value]) + stored.data[1:]


def fnuz(stored: Stored) -> bytes:
    """Codes drawn anew for a format whose largest is 0x7f, and whose NaN is -0."""
    codes = raw(stored).copy()
    codes[codes == 0x80] = 0
    codes[np.abs(e4m3_values()[codes]) > 400] |= 0x7F
    codes[7] = 0x7F
    return codes.tobytes()


def expert_out_of_range(stored: Stored) -> bytes:
    ids = raw(stored, np.int64).copy()
    ids[5] = 6
    return ids.tobytes()


def expert_twice(stored: Stored) -> bytes:
    ids = raw(stored, np.int64).reshape(stored.shape).copy()
    ids[17] = ids[17, 0]
    return ids.tobytes()


def bias_in_a_hash_layer(folder: Path) -> None:
    """A loader that takes every layer for a scored one."""

    def change(name: str, stored: Stored) -> dict[str, Stored]:
        return {HASH + "bias": Stored("F32", [6], bytes(24))} if name == HASH + "tid2eid" else {name: stored}

    damage.rewrite(folder, change)


def zero_experts(folder: Path) -> None:
    """A buffer that was never filled."""
    damage.rewrite(
        folder, lambda name, stored: {name: replace(stored, data=bytes(len(stored.data))) if EXPERT in name else stored}
    )


def swap_scale_format(folder: Path) -> None:
    damage.edit_json(folder / "config.json", lambda config: config["quantization_config"].update(scale_fmt="fp32"))


# what happened -> (how, the tensor or what else must be named); seen in headers and configuration
IN_HEADERS: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "a scale as floats": (of(damage.SCALE, widened_scale), (damage.SCALE, "F32 instead of F8_E8M0")),
    "wo_a as BF16 codes in one layer": (codes_as_bf16(every=False), (WO_A, "BF16 instead of F8_E4M3")),
    "a table missing in a hash layer": (without(HASH + "tid2eid"), (HASH + "tid2eid", "is missing")),
    "a bias in a hash layer": (bias_in_a_hash_layer, (HASH + "tid2eid", HASH + "bias")),
    "a bias missing in a scored layer": (without(SCORED + "bias"), (SCORED + "bias", "is missing")),
    "a prefix for experts.1 takes more": (without("ffn.experts.1."), ("layers.0.ffn.experts.1.w1.weight", "missing")),
    "shared experts skipped": (without("shared_experts"), ("layers.0.ffn.shared_experts.w1.weight", "missing")),
    "head and embedding skipped": (without("embed.weight", "head.weight"), ("embed.weight", "head.weight")),
    "scales skipped": (without(".scale"), ("layers.0.attn.wq_a.scale", "is missing")),
    "scales under another suffix": (renamed("wkv.scale", "wkv.weight_scale_inv"), ("wkv.weight_scale_inv",)),
    "half of the layers skipped": (without("layers.2.", "layers.3.", "layers.4."), ("layers.2.hc_attn_fn", "missing")),
    "F32 stored as BF16": (of("layers.3.hc_attn_fn", as_bf16), ("layers.3.hc_attn_fn", "BF16 instead of F32")),
    "a table stored as int32": (
        of(HASH + "tid2eid", lambda s: Stored("I32", s.shape, raw(s, np.int64).astype(np.int32).tobytes())),
        (HASH + "tid2eid", "I32 instead of I64"),
    ),
    "scale_fmt of another format": (swap_scale_format, ("scale_fmt",)),
    "MTP tensors, DSpark configuration": (damage.config_names_other_drafter, ("mtp by its tensors", "dspark by its")),
    "half of the drafter skipped": (without("mtp.0.ffn."), ("mtp.0.ffn.gate.weight", "missing")),
    "block scales of another dtype": (foreign.has_bf16_scales, ("block scales stored as BF16",)),
}  # fmt: skip
# seen in values only: how, the tensor, words, whether it is wrong or only suspicious
IN_VALUES: dict[str, tuple[Damage, str, str, bool]] = {
    "e8m0 scales converted by value": (data(damage.SCALE, converted_by_value), damage.SCALE, "byte 0", True),
    "scales of an expert converted by value": (data(EXPERT + ".scale", converted_by_value), EXPERT, "byte 0", True),
    "scale bytes taken for numbers": (data(damage.SCALE, byte_as_number), damage.WEIGHT, "times", True),
    "scale bytes of an expert taken for numbers": (data(EXPERT + ".scale", byte_as_number), EXPERT, "times", True),
    "scales that default to one": (data(WO_A_SCALE, lambda s: b"\x7f" * len(s.data)), WO_A_SCALE, "1 everywhere", True),
    "wo_a as BF16 codes in every layer": (codes_as_bf16(every=True), WO_A, "codes without their scales", True),
    "a NaN scale": (damage.scale_is_nan, damage.SCALE, "byte 255, which is NaN", True),
    "a NaN code": (data(damage.WEIGHT, one_byte(0x7F)), damage.WEIGHT, "once the NaN code", True),
    "FNUZ codes": (data(damage.WEIGHT, fnuz), damage.WEIGHT, "FNUZ", True),
    "experts of zeros": (zero_experts, EXPERT, "zero everywhere", True),
    "an expert that is not there": (data(HASH + "tid2eid", expert_out_of_range), HASH + "tid2eid", "row 2", True),
    "an expert twice": (data(HASH + "tid2eid", expert_twice), HASH + "tid2eid", "row 17", True),
    "F32 that was BF16 once": (data("layers.3.hc_attn_fn", narrowed), "layers.3.hc_attn_fn", "BF16 once", False),
    "NaN in the embedding": (data("embed.weight", lambda s: b"\xc0\x7f" + s.data[2:]), "embed.weight", "NaN", True),
    "a bias that was lost": (data(SCORED + "bias", lambda s: bytes(len(s.data))), SCORED + "bias", "zero", False),
}  # fmt: skip

# by default one of each check; tests/engine/inspection has the checks of values one by one
HEADERS_BY_DEFAULT = (
    "a scale as floats",
    "a bias in a hash layer",
    "half of the layers skipped",
    "MTP tensors, DSpark configuration",
    "block scales of another dtype",
)
VALUES_BY_DEFAULT = ("scale bytes taken for numbers", "an expert twice", "F32 that was BF16 once", "a NaN code")


@pytest.mark.parametrize(
    "trap",
    [
        pytest.param(trap, id=name, marks=[] if name in HEADERS_BY_DEFAULT else [pytest.mark.slow])
        for name, trap in IN_HEADERS.items()
    ],
)
def test_a_trap_that_headers_show(tmp_path, trap):
    harm, words = trap
    folder = damage.copy_checkpoint(tmp_path)
    harm(folder)
    done = inspect(folder, "--json")
    assert done.exit_code == 3
    document = json.loads(done.stdout)
    assert not document["loads"]
    known = json.dumps([document["problem"], document["coverage"]])
    table = " ".join(inspect(folder).stdout.split())
    assert all(word in known or word in table for word in words)


@pytest.mark.parametrize(
    "trap",
    [
        pytest.param(trap, id=name, marks=[] if name in VALUES_BY_DEFAULT else [pytest.mark.slow])
        for name, trap in IN_VALUES.items()
    ],
)
def test_a_trap_that_values_show(tmp_path, trap):
    harm, tensor, words, is_wrong = trap
    folder = damage.copy_checkpoint(tmp_path)
    harm(folder)
    assert inspect(folder).exit_code == 0  # the headers are those of a sound model
    done = inspect(folder, "--values", "full", "--json")
    assert done.exit_code == (3 if is_wrong else 0)
    findings = json.loads(done.stdout)["values"]["findings"]
    severity = "wrong" if is_wrong else "suspicious"
    assert any(
        tensor in finding["message"] and words in finding["message"] and finding["severity"] == severity
        for finding in findings
    )
