"""Metadata of a GGUF file: what it says about its model besides the tensors. No torch."""

from collections.abc import Mapping
from typing import Any

from dsv4cli.engine.checkpoint.gguf.header import ALIGNMENT
from dsv4cli.engine.checkpoint.gguf.naming import MATRIX_TYPES
from dsv4cli.engine.checkpoint.identify import FolderIdentity
from dsv4cli.engine.config.gguf import ARCHITECTURE, end_tokens, gguf_values
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.read import read_json
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.conversion.chat_templates import SETTINGS, own_template, read_file
from dsv4cli.engine.conversion.gguf.vocabulary import vocabulary
from dsv4cli.engine.system.regular_files import is_there
from dsv4cli.engine.text.chat_template import chat_template
from dsv4cli.errors import CheckpointError

TOKENIZER = "tokenizer.json"
NAMES = {"flash": "DeepSeek-V4-Flash", "pro": "DeepSeek-V4-Pro"}
# llama_ftype: what most of the weights are
FILE_TYPES = {"MXFP4": 38, "BF16": 32}
QUANTIZATION_VERSION = 2


def stem(source: FolderIdentity, formats: Formats) -> str:
    """Return the files' base name: the model's name and the type of its experts."""
    return f"{_name(source)}-{MATRIX_TYPES[formats.experts]}"


def gguf_metadata(
    source: FolderIdentity, config: ModelConfig, formats: Formats, texts: Mapping[str, str]
) -> dict[str, Any]:
    """Return every key of the first file.

    Args:
        config, formats: the output's configuration and storage formats.
        texts: files that the source's folder lacks.

    Raises CheckpointError without a tokenizer.json, which llama.cpp needs.
    """
    folder = source.checkpoint.folder
    text = texts.get(TOKENIZER) or read_file(folder / TOKENIZER)
    if text is None:
        raise CheckpointError(
            f"{folder} has no {TOKENIZER}, but a GGUF model contains its vocabulary",
            "copy the tokenizer.json of the release into the folder",
        )
    settings = read_json(folder / SETTINGS) if is_there(folder / SETTINGS) else {}
    template = own_template(folder) or chat_template(source.release)
    words = vocabulary(text, config.vocab_size, settings, template, str(folder / TOKENIZER))
    general = {
        "general.architecture": ARCHITECTURE,
        "general.type": "model",
        "general.name": _name(source),
        "general.alignment": ALIGNMENT,
        "general.file_type": FILE_TYPES[MATRIX_TYPES[formats.experts]],
        "general.quantization_version": QUANTIZATION_VERSION,
    }
    return general | gguf_values(config) | words | end_tokens(config)


def _name(source: FolderIdentity) -> str:
    usual = NAMES.get(source.size, "")
    if not usual:
        return "model"
    return usual + ("-0731" if source.release == "0731" else "")
