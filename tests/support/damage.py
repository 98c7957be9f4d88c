"""Damaged copies of the golden checkpoints: pure Python, no torch.

`copy_checkpoint` makes a copy, each damage changes it in place. DAMAGES lists them with words that the error must
contain, for every command that opens a checkpoint; what `inspect` cannot see, as scale_is_nan, is not in the list.
"""

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[1] / "golden"
INDEX = "model.safetensors.index.json"
WEIGHT = "layers.3.attn.wq_a.weight"
SCALE = "layers.3.attn.wq_a.scale"
SHARD = "model-00002-of-00003.safetensors"

Damage = Callable[[Path], None]


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: dtype name, shape, bytes."""

    dtype: str
    shape: list[int]
    data: bytes


def copy_checkpoint(target: Path, name: str = "tiny-flash") -> Path:
    """A writable copy of a golden checkpoint, without its recorded outputs."""
    folder = target / name
    shutil.copytree(GOLDEN / name, folder, ignore=shutil.ignore_patterns("expected.*"))
    return folder


def read_shard(path: Path) -> dict[str, Stored]:
    content = path.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    return {
        name: Stored(
            entry["dtype"], entry["shape"], content[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
        )
        for name, entry in header.items()
    }


def write_shard(path: Path, tensors: dict[str, Stored]) -> None:
    header, position = {}, 0
    for name, stored in tensors.items():
        end = position + len(stored.data)
        header[name] = {"dtype": stored.dtype, "shape": stored.shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(stored.data for stored in tensors.values()))


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def edit_config(folder: Path, **values: Any) -> None:
    edit_json(folder / "config.json", lambda config: config.update(values))


def shard_of(folder: Path, tensor: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][tensor]


def edit_tensor(folder: Path, tensor: str, change: Callable[[Stored], Stored]) -> None:
    path = shard_of(folder, tensor)
    tensors = read_shard(path)
    tensors[tensor] = change(tensors[tensor])
    write_shard(path, tensors)


def drop_tensor(folder: Path, tensor: str) -> None:
    path = shard_of(folder, tensor)
    tensors = read_shard(path)
    del tensors[tensor]
    write_shard(path, tensors)


def rewrite(folder: Path, change: Callable[[str, Stored], dict[str, Stored]]) -> None:
    """Replaces every tensor by those that `change` makes of it, and writes the index anew."""
    weight_map = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        tensors: dict[str, Stored] = {}
        for name, stored in read_shard(path).items():
            tensors |= change(name, stored)
        write_shard(path, tensors)
        weight_map |= dict.fromkeys(tensors, path.name)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def shard_missing(folder: Path) -> None:
    (folder / SHARD).unlink()


def shard_truncated(folder: Path) -> None:
    content = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(content[:-1000])


def shard_cut_in_its_header(folder: Path) -> None:
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:100])


def shard_too_long(folder: Path) -> None:
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes() + b"x")


def shard_is_lfs_pointer(folder: Path) -> None:
    (folder / SHARD).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 2562344\n")


def header_length_absurd(folder: Path) -> None:
    content = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(struct.pack("<Q", 2**63) + content[8:])


def header_not_json(folder: Path) -> None:
    content = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(content[:8] + b"\xff\xfe" + content[10:])


def edit_header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = (folder / SHARD).read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:start])
    change(header)
    text = json.dumps(header).encode()
    (folder / SHARD).write_bytes(struct.pack("<Q", len(text)) + text + content[start:])


def header_offsets_overlap(folder: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        first, second = [entry for name, entry in header.items() if name != "__metadata__"][:2]
        length = second["data_offsets"][1] - second["data_offsets"][0]
        second["data_offsets"] = [first["data_offsets"][0], first["data_offsets"][0] + length]

    edit_header(folder, change)


def header_shape_wrong(folder: Path) -> None:
    edit_header(folder, lambda header: header[WEIGHT].update(shape=[1, 1]))


def folder_empty(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()


def index_not_json(folder: Path) -> None:
    (folder / INDEX).write_text("{")


def index_names_absent_file(folder: Path) -> None:
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({WEIGHT: "model-00009-of-00009.safetensors"}))


def index_leaves_the_folder(folder: Path) -> None:
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({WEIGHT: "../other.safetensors"}))


def index_lacks_tensor(folder: Path) -> None:
    edit_json(folder / INDEX, lambda index: index["weight_map"].pop(WEIGHT))


def index_names_other_shard(folder: Path) -> None:
    other = "model-00001-of-00003.safetensors"
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({WEIGHT: other}))


def index_names_unknown_tensor(folder: Path) -> None:
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({"ghost.weight": SHARD}))


def tensor_missing(folder: Path) -> None:
    drop_tensor(folder, "layers.3.attn.q_norm.weight")


def tensor_and_scale_missing(folder: Path) -> None:
    drop_tensor(folder, WEIGHT)
    drop_tensor(folder, SCALE)


def tensor_extra(folder: Path) -> None:
    path = folder / SHARD
    write_shard(path, read_shard(path) | {"layers.3.attn.bias": Stored("F32", [2], bytes(8))})
    edit_json(folder / INDEX, lambda index: index["weight_map"].update({"layers.3.attn.bias": SHARD}))


def tensor_twice(folder: Path) -> None:
    path = folder / "model-00001-of-00003.safetensors"
    write_shard(path, read_shard(path) | {WEIGHT: read_shard(folder / SHARD)[WEIGHT]})


def tensor_misshapen(folder: Path) -> None:
    edit_tensor(folder, WEIGHT, lambda stored: replace(stored, shape=stored.shape[::-1]))


def tensor_mistyped(folder: Path) -> None:
    def narrow(stored: Stored) -> Stored:
        return Stored("BF16", stored.shape, stored.data[: len(stored.data) // 2])

    edit_tensor(folder, "layers.3.attn.attn_sink", narrow)


def scale_missing(folder: Path) -> None:
    drop_tensor(folder, SCALE)


def weight_missing(folder: Path) -> None:
    drop_tensor(folder, WEIGHT)


def scale_is_nan(folder: Path) -> None:
    """A scale byte 255; only a reader of the data can see it, `inspect` cannot."""
    edit_tensor(folder, SCALE, lambda stored: replace(stored, data=b"\xff" + stored.data[1:]))


def config_missing(folder: Path) -> None:
    (folder / "config.json").unlink()


def config_not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{'hidden_size': 256}")


def config_lacks_key(folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.pop("compress_rope_theta"))


def config_unknown_key(folder: Path) -> None:
    edit_config(folder, engram_layers=[1, 14])


def config_contradicts_itself(folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config["compress_ratios"].pop())


def config_contradicts_inference_config(folder: Path) -> None:
    (folder / "inference").mkdir()
    (folder / "inference" / "config.json").write_text(json.dumps({"dim": 512}))


def config_names_other_drafter(folder: Path) -> None:
    dspark = {"block_size": 5, "noise_token_id": 500, "target_layer_ids": [2, 3, 4], "markov_rank": 16}
    edit_config(
        folder, compress_ratios=[0, 0, 4, 128, 4, 0, 0, 0], **{f"dspark_{key}": value for key, value in dspark.items()}
    )


def drafter_lost(folder: Path) -> None:
    """What many exports do; it loads without a drafter."""
    rewrite(folder, lambda name, stored: {} if name.startswith("mtp.") else {name: stored})


def drafter_half_lost(folder: Path) -> None:
    rewrite(folder, lambda name, stored: {} if name.startswith("mtp.0.ffn.") else {name: stored})


# what happened -> words of the error, beside the folder's name
DAMAGES: dict[Damage, tuple[str, ...]] = {
    shard_missing: (SHARD, "is missing"),
    shard_truncated: (SHARD, "truncated"),
    shard_cut_in_its_header: (SHARD, "truncated"),
    shard_too_long: (SHARD, "longer than its header says"),
    shard_is_lfs_pointer: (SHARD, "git-lfs pointer"),
    header_length_absurd: (SHARD, "corrupt", "header"),
    header_not_json: (SHARD, "corrupt header", "not JSON"),
    header_offsets_overlap: (SHARD, "corrupt header", "overlaps"),
    header_shape_wrong: (SHARD, "corrupt header", WEIGHT),
    folder_empty: ("no safetensors file",),
    index_not_json: (INDEX, "not a safetensors index"),
    index_names_absent_file: ("model-00009-of-00009.safetensors", "is missing"),
    index_leaves_the_folder: (INDEX, "../other.safetensors"),
    index_lacks_tensor: (WEIGHT, "not in the index"),
    index_names_other_shard: (WEIGHT, "model-00001-of-00003.safetensors", "where the index puts it"),
    index_names_unknown_tensor: ("ghost.weight", "where the index puts it"),
    tensor_missing: ("layers.3.attn.q_norm.weight", "is missing"),
    tensor_and_scale_missing: (WEIGHT, "is missing"),
    tensor_extra: ("layers.3.attn.bias", "not a tensor of this model"),
    tensor_twice: (WEIGHT, "stored twice"),
    tensor_misshapen: (WEIGHT, "shape [256, 128] instead of [128, 256]"),
    tensor_mistyped: ("layers.3.attn.attn_sink", "BF16 instead of F32"),
    scale_missing: (SCALE, "is missing, but its weight is there"),
    weight_missing: (WEIGHT, "is missing"),
    config_missing: ("no config.json",),
    config_not_json: ("config.json", "not valid JSON"),
    config_lacks_key: ("config.json", "lacks the key 'compress_rope_theta'"),
    config_unknown_key: ("config.json", "unknown key 'engram_layers'"),
    config_contradicts_itself: ("config.json", "compress_ratios has 5 entries for 5 layers and 1 draft stages"),
    config_contradicts_inference_config: ("inference/config.json", "contradict each other", "hidden_size"),
    config_names_other_drafter: ("mtp by its tensors", "dspark by its config.json"),
    drafter_half_lost: ("mtp.0.ffn.gate.weight is missing",),
}
