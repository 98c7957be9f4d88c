"""The chat template of each release: the prompt format of `encode_messages` as a Jinja template, for other programs.

The template is `chat_template.jinja`, next to this file, with the texts of the format filled in.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from dsv4cli.engine.config.presets import Release
from dsv4cli.engine.text import prompt_text as texts
from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.prompt import EFFORT_WORDS, effort_text, level_of

_SOURCE = Path(__file__).with_suffix(".jinja")
_PLACE = re.compile("@([A-Z_]+)@")


@cache
def chat_template(release: Release) -> str:
    """Return the text of chat_template.jinja for a release. GGUF files have it as `tokenizer.chat_template`."""
    efforts = {word: effort_text(release, level_of(word, release)) for word in EFFORT_WORDS}
    tools_head, _, tools_tail = texts.tools_parts([])
    values = {
        "RELEASE": {"v4": "of April 2026", "0731": "0731"}[release],
        "WORDS": ", ".join(("none", *EFFORT_WORDS)),
        "DSML": _literal(tokens.DSML),
        "EFFORTS": _mapping(efforts),
        "TASKS": _mapping(tokens.TASKS),
        "TOOLS_HEAD": _literal(tools_head),
        "TOOLS_TAIL": _literal(tools_tail),
        "FORMAT_HEAD": _literal(texts.format_parts({})[0]),
    }
    values |= {name: _literal(getattr(tokens, name)) for name in _TOKENS}
    return _PLACE.sub(lambda place: values[place[1]], _SOURCE.read_text(encoding="utf-8"))


_TOKENS = ("BOS", "EOS", "USER", "ASSISTANT", "THINK_START", "THINK_END", "LATEST_REMINDER")


def _mapping(values: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{_literal(name)}: {_literal(text)}" for name, text in values.items()) + "}"


def _literal(text: str) -> str:
    """Return a string literal of Jinja, with escapes that every Jinja engine supports."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"
