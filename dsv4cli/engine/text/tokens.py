"""The special tokens of DeepSeek-V4 as literal text, from the official tokenizer.json; standard library only.

The bar in them is U+FF5C and the low line U+2581. The prompt format is text made of these, so that whoever needs a
token writes its text and the tokenizer finds the id.
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
"""The quick-instruction tasks a message may name, each with the token that asks for it."""

REQUIRED = (BOS, EOS, USER, ASSISTANT, THINK_START, THINK_END, DSML)
"""What no prompt can be written without."""

SPECIAL = (BOS, EOS, PAD, *REQUIRED[2:], LATEST_REMINDER, EXTRACTED_URL, *TASKS.values())
"""Every token named here, BOS, EOS and PAD first as in the official vocabulary (ids 0, 1, 2)."""


class Given(str):
    """A part of a prompt that comes from outside: what looks like a special token in it is text."""

    __slots__ = ()
