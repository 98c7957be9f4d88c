"""Converts a tokenizer.json to GGUF keys; `engine/text/gguf_vocabulary.py` converts them back. No torch.

Sources: ggml's docs/gguf.md; llama.cpp, conversion/base.py (token types) and src/llama-vocab.cpp (names of
pre-tokenizers).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsv4cli.engine.config.gguf import TOKENS
from dsv4cli.engine.text.gguf_vocabulary import (
    CONTROL,
    DEEPSEEK,
    DEEPSEEK_PATTERNS,
    MERGES,
    NORMAL,
    PRE,
    TYPES,
    UNUSED,
    USER_DEFINED,
    WHOLE,
)
from dsv4cli.errors import CheckpointError

TEMPLATE = "tokenizer.chat_template"
REMEDY = "copy the tokenizer.json of the release into the folder"
OTHER = "default"


def vocabulary(text: str, size: int, settings: Mapping[str, Any], template: str, where: str) -> dict[str, Any]:
    """Return the keys of a vocabulary for a model of `size` tokens, including tokenizer.json itself.

    Args:
        text: the content of tokenizer.json.
        settings: the content of tokenizer_config.json.
        template: the chat template.

    Raises CheckpointError for a file that is not byte-level BPE, or has more tokens than the model.
    """
    found = _read(text, where)
    if max(found.names, default=0) >= size:
        raise CheckpointError(f"{where} has the token id {max(found.names)}, but the model has {size:,} tokens", REMEDY)
    ids = {name: id for id, name in found.names.items()}
    pad = settings.get("pad_token")
    pad = pad.get("content") if isinstance(pad, Mapping) else pad
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        PRE: DEEPSEEK if found.patterns == DEEPSEEK_PATTERNS else OTHER,
        TOKENS: [found.names.get(id, f"[PAD{id}]") for id in range(size)],
        TYPES: [found.types.get(id, UNUSED) for id in range(size)],
        MERGES: found.merges,
        "tokenizer.ggml.add_bos_token": bool(settings.get("add_bos_token")),
        TEMPLATE: template,
        WHOLE: text,
    }
    if isinstance(pad, str) and pad in ids:
        values["tokenizer.ggml.padding_token_id"] = ids[pad]
    return values


@dataclass(frozen=True)
class _TokenizerFile:
    """The content of a tokenizer.json.

    Attributes:
        names, types: name and type of each token, by id.
        patterns: the pre-tokenizer's patterns, in order.
    """

    names: Mapping[int, str]
    types: Mapping[int, int]
    merges: list[str]
    patterns: tuple[str, ...]


def _read(text: str, where: str) -> _TokenizerFile:
    try:
        content = json.loads(text)
        model, added = content["model"], content.get("added_tokens") or ()
        names: dict[int, str] = {id: name for name, id in model["vocab"].items()}
        names |= {entry["id"]: entry["content"] for entry in added}
        types = dict.fromkeys(names, NORMAL)
        types |= {entry["id"]: CONTROL if _is_special(entry) else USER_DEFINED for entry in added}
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        found = _TokenizerFile(names, types, merges, _patterns(content))
        sound = model["type"] == "BPE" and isinstance(model["merges"], list)
        sound = sound and all(type(id) is int and id >= 0 for id in names)
        "".join((*names.values(), *merges)).encode()  # text, and no half of a character
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise CheckpointError(f"{where} is not a tokenizer.json with a byte-level BPE vocabulary", REMEDY)
    return found


def _patterns(content: Mapping[str, Any]) -> tuple[str, ...]:
    outer = content.get("pre_tokenizer") or {}
    steps = outer.get("pretokenizers", ())
    return tuple(step["pattern"]["Regex"] for step in steps if "Regex" in step.get("pattern", {}))


def _is_special(entry: Mapping[str, Any]) -> bool:
    # the releases mark some of the tokens of the prompt format as ordinary text
    return bool(entry["special"]) or (entry["content"].startswith("<｜") and entry["content"].endswith("｜>"))
