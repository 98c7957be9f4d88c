"""Fields that would change an answer in a way that the server does not support. They are refused, not ignored."""

from collections.abc import Mapping, Sequence
from typing import Any

from dsv4cli.engine.server.fields import Fields
from dsv4cli.engine.server.refusals import bad_field

NO_AUDIO = "the answer is text only"
NO_SEARCH = "this server searches nothing"
NO_SERVERS = "this server connects to no MCP servers: pass their tools in tools"
# the values with which a field changes nothing, besides null, and why others are refused
NEUTRAL: Mapping[str, tuple[Sequence[Any], str]] = {
    "modalities": ((["text"], []), NO_AUDIO),
    "audio": ((), NO_AUDIO),
    "web_search_options": ((), NO_SEARCH),
    "mcp_servers": (([],), NO_SERVERS),
    "best_of": ((1,), "not supported: ask for several answers with n, and choose among them"),
    "use_beam_search": ((False,), "not supported: answers are sampled"),
    "min_tokens": ((0,), "not supported, except with ignore_eos: true"),
    "stop_token_ids": (([],), "not supported: use stop"),
    "bad_words": (([],), "not supported: use logit_bias"),
    "allowed_token_ids": (([],), "not supported: use logit_bias or structured_outputs"),
    "guided_whitespace_pattern": ((), "not supported: use a regex or a grammar"),
}


def refuse_unsupported(fields: Fields, same: Mapping[str, Any] | None = None) -> None:
    """Raise `Refusal` for a field with a value that the server would have to ignore.

    Args:
        same: further values that change nothing, by field.
    """
    for name, (values, reason) in NEUTRAL.items():
        value = fields.value(name)
        if value is None or value in values or (same is not None and name in same and value == same[name]):
            continue
        raise bad_field(fields.name(name), reason)
