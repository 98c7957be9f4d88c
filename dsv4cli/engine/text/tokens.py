"""The special tokens of DeepSeek-V4 as literal text, from the official tokenizer.json; standard library only.

Their bar is U+FF5C and their low line U+2581. The prompt format is plain text that contains these; the tokenizer finds
their ids.
"""

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK_START = "<think>"
THINK_END = "</think>"
DSML = "｜DSML｜"
LATEST_REMINDER = "<｜latest_reminder｜>"
EXTRACTED_URL = "<｜extracted_url｜>"

TASKS: dict[str, str] = {
    "action": "<｜action｜>",
    "query": "<｜query｜>",
    "authority": "<｜authority｜>",
    "domain": "<｜domain｜>",
    "title": "<｜title｜>",
    "read_url": "<｜read_url｜>",
}
"""The quick-instruction tasks that a message may name, with their tokens."""

REQUIRED = (BOS, EOS, USER, ASSISTANT, THINK_START, THINK_END, DSML)
"""The tokens that every vocabulary must have."""

SPECIAL = (BOS, EOS, PAD, *REQUIRED[2:], LATEST_REMINDER, EXTRACTED_URL, *TASKS.values())
"""All tokens of this module; BOS, EOS and PAD come first, as in the official vocabulary (ids 0, 1, 2)."""


class Given(str):
    """A part of a prompt that comes from outside. Text in it that looks like a special token stays text."""

    __slots__ = ()
