"""Headers, index and configuration changed at random, and by malice: `dsv4 inspect` answers within seconds, and never
with a traceback; what it says would load, the safetensors library reads as it was."""

import json
import os
import random
import resource
import signal
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.support import damage
from tests.support.program import Program
from tests.support.slow import slow_except

CASES, MORE_CASES = 8, 192
# seconds for one answer, and bytes beyond those that the process has
PATIENCE, ROOM = 5, 1 << 30
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
# JSON texts that stand where something else should
STRANGE = [
    "null", "true", "-1", "0", "1.5", "-0.0", "NaN", "Infinity", "1e999", "1e308", "2147483648", "9223372036854775808",
    "1" + "0" * 400, "1" + "0" * 5000, "[]", "{}", "[0, 0]", "[1, -1]", "[0, 1e308]", '[["a"], {"b": null}]', '""',
    *("[" * depth + "]" * depth for depth in (30, 600, 900, 930, 960, 2000)), "[" + "9007199254740993, " * 5000 + "1]",
    '"F4"', '"F128"', '"BF16"', '"F32"', '"bf16"', '"../x.safetensors"', '"\\u0000.safetensors"',
    '"\\ud800.safetensors"', '"' + "x" * 300 + '.safetensors"', '"model-00001-of-00003.safetensors"',
    '"model0-mp0.safetensors"',
]  # fmt: skip
NAMES = [
    "", "é\u202e\x1b[31m", "\ud800", "layers.٣.attn.wkv.weight", "model0-mp0/norm.weight", "model7-mp3/norm.weight",
    "model0-mp" + "9" * 5000 + "/norm.weight", "layers." + "9" * 5000 + ".x", "mtp.9.x.scale", "model.layers.0.x",
    "a" * 10_000, "__metadata__", "layers.0.ffn.gate.weight", "rope_parameters", "layer_types", "mlp_layer_types",
    "quantization_config", "expert_dtype", "dspark_block_size", "partial_rotary_factor", "model_type", "weight_map",
    "n_routed_experts", "vocab_size", "num_nextn_predict_layers",
]  # fmt: skip
HOLE = "<a place for JSON text>"


def containers(value: Any) -> Iterator[dict | list]:
    """The objects and lists in a JSON value that are not empty."""
    if isinstance(value, dict | list) and value:
        yield value
        for child in value.values() if isinstance(value, dict) else value:
            yield from containers(child)


def changed_value(draw: random.Random, text: bytes) -> bytes:
    """A value replaced, moved, dropped, or there under another key too."""
    root = json.loads(text)
    places = [*containers(root)]
    place = draw.choice([root, draw.choice(places), draw.choice(places)])
    key = draw.choice([*place]) if isinstance(place, dict) else draw.randrange(len(place))
    what = draw.randrange(5)
    if what == 0:
        del place[key]
    elif what == 1 and isinstance(place, dict):
        place[draw.choice(NAMES)] = draw.choice([place[key], HOLE])
    elif what == 2 and type(place[key]) is int:
        place[key] += draw.choice([-1, 1, 8, 10**6, 10**9, 10**12])
    else:
        place[key] = HOLE
    return json.dumps(root).replace(json.dumps(HOLE), draw.choice(STRANGE)).encode()


def doubled_key(draw: random.Random, text: bytes) -> bytes:
    """A key twice in the text, the second time perhaps with another value."""
    root = json.loads(text)
    place = draw.choice([root, draw.choice([place for place in containers(root) if isinstance(place, dict)])])
    key = draw.choice([*place])
    old = json.dumps({key: place[key]})[1:-1]
    new = draw.choice([old, f"{json.dumps(key)}: {draw.choice(STRANGE)}"])
    return json.dumps(root).replace(old, f"{old}, {new}", 1).encode()


def changed_bytes(draw: random.Random, text: bytes) -> bytes:
    at = draw.randrange(len(text))
    length = draw.choice([1, 1, 8, 1000])
    put = draw.choice([b"", draw.randbytes(length), b'"', b"}", b"\xff", bytes([text[at] ^ 1 << draw.randrange(8)])])
    return text[:at] + put + text[at + draw.choice([0, length]) :]


def cut(draw: random.Random, text: bytes) -> bytes:
    return text[: draw.choice([0, 1, draw.randrange(len(text))])]


CHANGES = [changed_value, changed_value, doubled_key, changed_bytes, cut]


def changed_file(draw: random.Random, name: str, file: "File") -> "File":
    """The text changed; of a shard, perhaps with another length of the header than its own, or another size of all."""
    text = draw.choice(CHANGES)(draw, file.text)
    if not name.endswith(".safetensors"):
        return File(b"", text)
    length = draw.choice([len(text)] * 8 + [len(file.text), draw.getrandbits(64), draw.randrange(10**6), 10**8])
    return File(struct.pack("<Q", length), text, max(0, file.data + draw.choice([0, 0, 0, 0, -1, 1, -file.data])))


@dataclass(frozen=True)
class File:
    """What stands before the text, the text, and how many bytes of zeros after it."""

    start: bytes
    text: bytes
    data: int = 0

    def write(self, path: Path) -> None:
        path.write_bytes(self.start + self.text)
        os.truncate(path, path.stat().st_size + self.data)


def sound_files() -> dict[str, File]:
    """The golden checkpoint without its weights, and with a second configuration."""
    folder = damage.GOLDEN / "tiny-flash"
    values = json.loads((folder / "config.json").read_text())
    inference = {"dim": values["hidden_size"], "rope_factor": values["rope_scaling"]["factor"]}
    files = {name: File(b"", (folder / name).read_bytes()) for name in (damage.INDEX, "config.json")}
    files["inference/config.json"] = File(b"", json.dumps(inference).encode())
    for shard in SHARDS:
        content = (folder / shard).read_bytes()
        start = 8 + struct.unpack("<Q", content[:8])[0]
        files[shard] = File(content[:8], content[8:start], len(content) - start)
    return files


def mutations(seed: int, files: Mapping[str, File]) -> dict[str, File | None]:
    """One to three files of a checkpoint as they become; None for one that is lost."""
    draw = random.Random(seed)
    names = draw.sample([*files], draw.choice([1, 1, 2, 3]))
    return {name: changed_file(draw, name, files[name]) if draw.random() > 0.05 else None for name in names}


@contextmanager
def bounded() -> Iterator[None]:
    """Ends what takes too long, or more memory than a header can need."""

    def too_long(*_: object) -> None:
        raise AssertionError(f"no answer after {PATIENCE} seconds")

    before, (soft, hard) = signal.signal(signal.SIGALRM, too_long), resource.getrlimit(resource.RLIMIT_AS)
    statm = Path("/proc/self/statm")
    limit = int(statm.read_text().split()[0]) * resource.getpagesize() + ROOM if statm.exists() else soft
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


FILES = sound_files()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("mutated")
    (place / "inference").mkdir()
    for name, file in FILES.items():
        file.write(place / name)
    return place


def answer(dsv4: Program, folder: Path, changed: Mapping[str, File | None]) -> tuple[int, str]:
    """What `inspect` says of a folder with some files changed: the code, and the problem or ''."""
    for name, file in changed.items():
        file.write(folder / name) if file else (folder / name).unlink()
    try:
        with bounded():
            table, document = dsv4("inspect", str(folder)), dsv4("inspect", str(folder), "--json")
        if not table.code:
            assert shapes(folder) == shapes(damage.GOLDEN / "tiny-flash")
    finally:
        for name in changed:
            FILES[name].write(folder / name)
    assert (table.code, table.err, document.err) == (document.code, "", "")
    problem = json.loads(document.out)["problem"]
    assert (problem is None, table.code) in [(True, 0), (False, 3)]
    return table.code, problem["message"] if problem else ""


def shapes(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """What the safetensors library finds in the shards."""
    found = {}
    for shard in SHARDS:
        with safe_open(folder / shard, "np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            found |= {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    return found


@pytest.mark.parametrize(
    "seed", [*range(CASES), *(pytest.param(CASES + more, marks=pytest.mark.slow) for more in range(MORE_CASES))]
)
def test_a_random_change_is_answered(dsv4, folder, seed):
    answer(dsv4, folder, mutations(seed, FILES))


def test_nothing_changed_would_load(dsv4, folder):
    assert answer(dsv4, folder, {}) == (0, "")


def edited(name: str, edit: Callable[[Any], object]) -> dict[str, File | None]:
    """One file with its JSON changed."""
    values = json.loads(FILES[name].text)
    edit(values)
    return with_text(name, json.dumps(values))


def with_text(name: str, text: str) -> dict[str, File | None]:
    start = struct.pack("<Q", len(text)) if name in SHARDS else b""
    return {name: replace(FILES[name], start=start, text=text.encode())}


def config(**values: Any) -> dict[str, File | None]:
    return edited("config.json", lambda config: config.update(values))


def index(tensor: str, file: str) -> dict[str, File | None]:
    return edited(damage.INDEX, lambda index: index["weight_map"].update({tensor: file}))


def header(tensor: str, **entry: Any) -> dict[str, File | None]:
    """The first shard with one more tensor before the others."""
    empty = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    return with_text(SHARDS[0], json.dumps({tensor: empty | entry} | json.loads(FILES[SHARDS[0]].text)))


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def doubled(name: str, place: str, text: str) -> dict[str, File | None]:
    """A file with some JSON put in before a place."""
    return with_text(name, FILES[name].text.decode().replace(place, text + place, 1))


MALICE = {
    "experts without end": (config(n_routed_experts=10**12), "more than any model has"),
    "layers without end": (config(num_hidden_layers=10**5, compress_ratios=[0] * (10**5 + 1)), "more than any model"),
    "a number that no float holds": (config(rope_theta=10**400), "rope_theta is 1000"),
    "a number without end": (config(hidden_size=1e308), "hidden_size is 1e+308"),
    "a share that no float holds": (config(partial_rotary_factor=1e308, head_dim=2**52), "contradict|unknown"),
    "a configuration too deep to be read": (with_text("config.json", "[" * 10**5), "not valid JSON"),
    "a configuration too deep to be shown": (config(rope_scaling=nested(900)), "nested more than 20 deep"),
    "an entry too deep to be shown": (header("x", shape=nested(900)), "the entry of x is "),
    "a file name that no disk takes": (index(damage.WEIGHT, "x" * 300 + ".safetensors"), "is missing"),
    "a file name with an end inside": (index(damage.WEIGHT, "x\0.safetensors"), "is missing"),
    "cut for no processes": (header("model0-mp0/norm.weight"), "an impossible number of GPUs"),
    "cut for countless processes": (header(f"model0-mp{'9' * 5000}/norm.weight"), "an impossible number of GPUs"),
    "a shape that takes hours to multiply": (header("x", shape=[2**60] * 10**5), "the entry of x is "),
    "a tensor twice": (doubled(SHARDS[0], '"embed.weight":', '"embed.weight": {}, '), "'embed.weight' appears twice"),
    "a shape twice": (doubled(SHARDS[0], '"shape":', '"shape": [1], '), "'shape' appears twice"),
    "a file twice": (doubled(damage.INDEX, '"embed.weight":', '"embed.weight": 1, '), "'embed.weight' appears twice"),
    "metadata that are no text": (doubled(SHARDS[0], '"embed.weight":', '"__metadata__": {"a": 1}, '), "__metadata__"),
    "a number that is none": (header("x", note=float("nan")), "not JSON"),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "words"), slow_except([*MALICE.values()][::2], MALICE.values()), ids=MALICE.keys())
def test_malice_is_named(dsv4, folder, changed, words):
    code, message = answer(dsv4, folder, changed)
    assert code == 3
    assert any(word in message for word in words.split("|"))
