"""Which files a part of a model takes."""

import pytest

from dsv4cli.engine.hub.files import Listing, RemoteFile
from dsv4cli.engine.hub.selection import KINDS, Selection, kind_of, parse_kinds, select_files
from dsv4cli.errors import CheckpointError, UsageError

# tensor -> file, as a checkpoint of three layers and a drafter spreads them
INDEX = {
    "embed.weight": "a.safetensors",
    "layers.0.attn.wq_a.weight": "a.safetensors",
    "layers.0.ffn.gate.weight": "b.safetensors",
    "layers.1.ffn.gate.weight": "b.safetensors",
    "layers.2.ffn.gate.weight": "c.safetensors",
    "mtp.0.e_proj.weight": "d.safetensors",
    "hc_head_fn": "e.safetensors",
}
NAMES = [*sorted(set(INDEX.values())), "config.json", "model.safetensors.index.json", "original/x.safetensors"]


def listing(names: list[str]) -> Listing:
    return Listing("org/name", None, "0" * 40, tuple(RemoteFile(name, 1, "0" * 40) for name in names))


def chosen(selection: Selection, names: list[str] = NAMES, index: dict[str, str] = INDEX) -> str:
    """The initials of the chosen weight files."""
    files = select_files(listing(names), selection, index)
    return "".join(file.name[0] for file in files if kind_of(file.name) == "weights")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("config.json", "config"),
        ("generation_config.json", "config"),
        ("hf_quant_config.json", "config"),
        ("inference/config.json", "config"),
        ("configuration_deepseek.py", "config"),
        ("model.safetensors.index.json", "index"),
        ("model-00001-of-00046.safetensors", "weights"),
        ("model0-mp4.safetensors", "weights"),
        ("tokenizer.json", "tokenizer"),
        ("tokenizer_config.json", "tokenizer"),
        ("chat_template.jinja", "tokenizer"),
        ("encoding/encoding_dsv4.py", "tokenizer"),
        ("README.md", "other"),
        ("inference/model.py", "other"),
        ("assets/config.json.png", "other"),
        ("model.gguf", "other"),
    ],
)
def test_the_kind_of_a_file(name, kind):
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("selection", "files"),
    [
        (Selection(), "abcdeo"),
        (Selection(range(1)), "abde"),
        (Selection(range(1), mtp=False), "abe"),
        (Selection(range(1, 3)), "abcde"),
        (Selection(range(2, 3), mtp=False), "ace"),
        (Selection(mtp=False), "abce"),
        (Selection(kinds=frozenset({"config"})), ""),
        (Selection(range(1), kinds=frozenset({"weights"})), "abde"),
    ],
)
def test_the_weights_of_a_part(selection, files):
    assert chosen(selection) == files


def test_small_files_come_with_layers_and_alone():
    assert {file.name for file in select_files(listing(NAMES), Selection(range(1)), INDEX)} >= {
        "config.json",
        NAMES[-2],
    }
    only = Selection(kinds=frozenset({"config", "index"}))
    assert [file.name for file in select_files(listing(NAMES), only, {})] == [
        "config.json",
        "model.safetensors.index.json",
    ]


@pytest.mark.parametrize(
    ("tensor", "taken"),
    [
        ("layers.3.attn.wkv.weight", True),
        ("layers.30.attn.wkv.weight", False),
        ("model.layers.3.self_attn.kv_proj.weight", True),
        ("model.layers.4.mlp.experts.gate_up_proj", False),
        ("model0-mp4/layers.3.attn.wkv.weight", True),
        ("model0-mp4/layers.4.attn.wkv.weight", False),
        ("mtp.0.attn.wkv.weight", False),
        ("model1-mp4/mtp.0.norm.weight", False),
        ("head.weight", True),
        ("lm_head.weight", True),
        ("model.embed_tokens.weight", True),
        ("layers." + "9" * 5000 + ".x", True),  # no layer that a model has
    ],
)
def test_a_tensor_of_every_layout(tensor, taken):
    assert Selection(range(2, 4), mtp=False).takes(tensor) is taken


@pytest.mark.parametrize(
    ("selection", "names", "index", "error", "words"),
    [
        (Selection(range(4)), NAMES, INDEX, UsageError, "no layer 3: org/name has 3"),
        (Selection(range(1)), NAMES, {}, UsageError, "can only be downloaded as a whole"),
        (Selection(mtp=False), NAMES[1:], INDEX, CheckpointError, "names a.safetensors, which the repository"),
        (Selection(range(1), kinds=frozenset({"index"})), NAMES, INDEX, UsageError, "leaves out"),
        (Selection(kinds=frozenset({"tokenizer"})), NAMES, INDEX, UsageError, "no files of the kind tokenizer"),
    ],
)
def test_refusals(selection, names, index, error, words):
    with pytest.raises(error, match=words):
        select_files(listing(names), selection, index)


def test_kinds_are_a_closed_list():
    assert parse_kinds("weights, config") == {"config", "weights"}
    assert Selection(kinds=parse_kinds(",".join(KINDS))).is_whole
    for text in ("", "configs", "config,,index"):
        with pytest.raises(UsageError, match="there is no kind"):
            parse_kinds(text)
