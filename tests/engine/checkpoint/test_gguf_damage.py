"""Damaged GGUF files: every one is refused by a sentence, or is sound; no traceback, no hang, little memory."""

import tracemalloc

import pytest

from dsv4cli.engine.checkpoint.coverage import check_coverage
from dsv4cli.engine.checkpoint.gguf.files import read_model
from dsv4cli.engine.checkpoint.gguf.header import read_gguf
from dsv4cli.engine.checkpoint.gguf.model import recognise_gguf
from dsv4cli.engine.checkpoint.matrix import stored_matrices
from dsv4cli.engine.checkpoint.opening import open_stored
from dsv4cli.engine.config.gguf import parse_gguf
from dsv4cli.engine.text.gguf_vocabulary import tokenizer_text
from dsv4cli.errors import CheckpointError, Dsv4Error
from tests.support.gguf_models import DS4, write_nano
from tests.support.gguf_mutations import mutated
from tests.support.slow import slow

WRONG = (
    "",
    "x",
    b"\xff".decode("latin-1"),
    -1,
    0,
    2**32 - 1,
    2**63,
    float("nan"),
    float("inf"),
    True,
    [],
    ["a"],
    [0.5],
    [2**31],
)
LIMIT = 128 * 2**20


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path, _ = write_nano(tmp_path_factory.mktemp("gguf"), DS4)
    return path, path.read_bytes(), read_gguf(path)


def opened(path):
    """Does what every command does with a file, and reads a part of its tensors."""
    identity = recognise_gguf(path)
    tokenizer_text(identity.metadata, str(path))
    check_coverage(identity.checkpoint, identity.stored_table).raise_if_incomplete()
    with open_stored(identity) as model:
        for _, matrix in list(stored_matrices(model))[::30]:
            matrix.piece(slice(0, min(matrix.shape[0], 4)))


def refusal(step, *arguments) -> str:
    """Return the sentence with which a step refuses its arguments, '' if it does not."""
    try:
        step(*arguments)
    except Dsv4Error as error:
        return error.message
    return ""


@pytest.mark.parametrize("seeds", [range(12), *slow(range(12, 212))])
def test_mutations_are_refused_by_a_sentence(made, tmp_path, seeds):
    _, content, header = made
    path, sentences = tmp_path / "m.gguf", []
    for seed in seeds:
        path.write_bytes(mutated(content, header.tensors[0].begin, seed))
        tracemalloc.start()
        sentences.append(refusal(opened, path))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < LIMIT, seed
    refused = [sentence for sentence in sentences if sentence]
    assert all(str(path) in sentence and len(sentence) < 2000 for sentence in refused)
    # the others are sound, apart from a letter of a text or a bit of a value
    assert len(refused) > 0.8 * len(seeds)


@pytest.mark.parametrize("seeds", [range(4), *slow(range(4, 100))])
def test_mutations_of_a_file_with_a_drafter_are_refused_by_a_sentence(tmp_path, seeds):
    path, _ = write_nano(tmp_path, DS4, drafter="nextn")
    content, header = path.read_bytes(), read_gguf(path)
    for seed in seeds:
        path.write_bytes(mutated(content, header.tensors[0].begin, seed))
        sentence = refusal(opened, path)
        assert not sentence or (str(path) in sentence and len(sentence) < 2000)


def test_metadata_of_another_kind_is_refused_by_a_sentence(made):
    _, _, header = made
    for key in header.metadata:
        if key.startswith(("deepseek4.", "general.architecture", "dsv4.")) or key.endswith("_token_id"):
            for value in WRONG:
                sentence = refusal(parse_gguf, header.metadata | {key: value}, "file")
                assert not sentence or "file" in sentence


@pytest.mark.parametrize("key", ["tokens", "merges", "token_type", "pre"])
def test_a_vocabulary_of_another_kind_is_refused(made, key):
    _, _, header = made
    metadata = {name: value for name, value in header.metadata.items() if "huggingface" not in name}
    metadata["tokenizer.ggml.pre"] = "joyai-llm"
    assert not refusal(tokenizer_text, metadata, "file")
    for value in (*WRONG, [1, 2], [None], [["a"]], [True], ["a b c", "d"]):
        changed = metadata | {f"tokenizer.ggml.{key}": value}
        sentence = refusal(tokenizer_text, changed, "file")
        # a vocabulary without merges is possible
        sound = key == "merges" and value == []
        assert sentence.startswith("file: tokenizer.ggml.") or sound or tokenizer_text(changed, "file") is None


def test_parts_that_do_not_belong_together(tmp_path):
    first, _ = write_nano(tmp_path / "a", DS4, parts=3)
    model = read_model(first)
    assert len(read_gguf(first).tensors) == 0
    assert len(model.checkpoint.tensors) == 126
    # part 2 links to part 3
    second, third = (first.with_name(f"nano-0000{number}-of-00003.gguf") for number in (2, 3))
    kept = second.read_bytes()
    second.unlink()
    second.symlink_to(third)
    with pytest.raises(CheckpointError, match="has part number 3, but its name says 2"):
        read_model(first)
    second.unlink()
    second.write_bytes(kept)
    for name, sentence in {
        "nano-00004-of-00003.gguf": "is named part 4 of 3",
        "n-00000-of-00000.gguf": "part 0 of 0",
    }.items():
        path = tmp_path / "a" / name
        path.write_bytes(kept)
        with pytest.raises(CheckpointError, match=sentence):
            read_model(path)
    # two of the three parts
    for number in (1, 2):
        (tmp_path / "a" / f"nano-0000{number}-of-00003.gguf").rename(tmp_path / "a" / f"b-0000{number}-of-00002.gguf")
    with pytest.raises(CheckpointError, match="is one of 3 parts, but its name says 2"):
        read_model(tmp_path / "a" / "b-00001-of-00002.gguf")


def test_a_part_of_another_model_is_noticed_by_the_number_of_tensors(tmp_path):
    first, _ = write_nano(tmp_path, DS4, parts=3)
    stated, other = (b"split.tensors.count\5\0\0\0" + bytes([count]) for count in (126, 125))
    text = first.read_bytes()
    assert stated in text
    first.write_bytes(text.replace(stated, other))
    with pytest.raises(CheckpointError, match="states 125 tensors in all parts, but they hold 126"):
        read_model(first)
