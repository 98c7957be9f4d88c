"""The vocabulary of a GGUF model as a tokenizer.json. No torch.

Sources: ggml's docs/gguf.md; llama.cpp, conversion/base.py (token types) and src/llama-vocab.cpp (pre-tokenizers).
"""

import json
from collections.abc import Mapping
from typing import Any

from dsv4cli.engine.config.gguf import TOKENS
from dsv4cli.errors import CheckpointError

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
TYPES, MERGES, PRE, WHOLE = (
    "tokenizer.ggml.token_type", "tokenizer.ggml.merges", "tokenizer.ggml.pre", "tokenizer.huggingface.json",
)  # fmt: skip
# pre-tokenizer patterns of the releases; llama.cpp names them after the first model that used them
DEEPSEEK_PATTERNS = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
DEEPSEEK = "joyai-llm"
READ_AS_DEEPSEEK = (DEEPSEEK, "deepseek-v3")
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
REMEDY = "use another file of the model, or the release: `dsv4 download flash`"


def has_vocabulary(metadata: Mapping[str, Any]) -> bool:
    """Return whether a GGUF model contains a vocabulary of DeepSeek-V4."""
    return isinstance(metadata.get(WHOLE), str) or (metadata.get(PRE) in READ_AS_DEEPSEEK and TOKENS in metadata)


def tokenizer_text(metadata: Mapping[str, Any], where: str) -> str | None:
    """Return the tokenizer.json of a GGUF model: the embedded one, or one built from its tokens and merges.

    None if it has neither, or uses another pre-tokenizer than DeepSeek-V4. `where` names the model in errors. Raises
    CheckpointError for tokens, types or merges that are damaged.
    """
    if isinstance(metadata.get(WHOLE), str):
        return str(metadata[WHOLE])
    if not has_vocabulary(metadata):
        return None
    names, types, merges = (metadata.get(key) for key in (TOKENS, TYPES, MERGES))
    sound = {
        TOKENS: isinstance(names, list) and all(isinstance(name, str) for name in names),
        TYPES: isinstance(types, list) and isinstance(names, list) and len(types) == len(names),
        MERGES: isinstance(merges, list) and all(isinstance(one, str) and one.count(" ") == 1 for one in merges),
    }
    damaged = [key for key, is_sound in sound.items() if not is_sound]
    if damaged:
        raise CheckpointError(f"{where}: {damaged[0]} is missing or damaged", REMEDY)
    assert names is not None
    assert types is not None
    assert merges is not None
    vocab = {name: id for id, (name, kind) in enumerate(zip(names, types, strict=True)) if kind == NORMAL}
    added = [
        {"id": id, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": kind == CONTROL}
        for id, (name, kind) in enumerate(zip(names, types, strict=True)) if kind in (CONTROL, USER_DEFINED)
    ]  # fmt: skip
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in DEEPSEEK_PATTERNS
    ]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, BYTE_LEVEL]},
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": vocab, "merges": [merge.split(" ") for merge in merges]},
    }
    return json.dumps(content, ensure_ascii=False)
