"""Files of API keys: one key per line, with its name and its rate limits; no torch."""

from dataclasses import dataclass
from pathlib import Path

from dsv4cli.errors import UsageError

SHORTEST_KEY = 8
# characters of a name: it is in every log line
LONGEST_NAME = 64
# requests or tokens per minute: more is as good as no limit
MOST_PER_MINUTE = 10**12
LIMITS = ("requests", "tokens")
CREATE = "create one: openssl rand -hex 24"
FORM = "write one key per line, for example: KEY name=alice requests=60 tokens=100000"


@dataclass(frozen=True)
class ApiKey:
    """An API key and its limits.

    Attributes:
        name: what the log calls it.
        requests: requests per minute; None for no limit.
        tokens: tokens of prompts and answers per minute; None for no limit.
    """

    name: str
    secret: bytes
    requests: int | None = None
    tokens: int | None = None


def read_keys(file: Path) -> tuple[ApiKey, ...]:
    """Read API keys from a file. A line has a key, then `name=`, `requests=` and `tokens=`, which are optional.

    Empty lines and lines that start with # are skipped. A key without a name is called `key-N` after its line number.

    Raises:
        UsageError: the file cannot be read, is not UTF-8, has no keys, or has an invalid or repeated one.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read: {error.strerror}", "use a readable file with one key per line"
        ) from None
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not UTF-8", "use a file with one key per line") from None
    used = [(number, line.split()) for number, line in enumerate(lines, 1) if line.strip() and line.lstrip()[0] != "#"]
    keys = [_key(number, words, f"line {number} of {file}") for number, words in used]
    if not keys:
        remedy = CREATE if any(map(str.strip, lines)) else f"{CREATE} > {file}"
        raise UsageError(f"{file} contains no keys", remedy)
    _check_repeated(keys, [number for number, _ in used], file)
    return tuple(keys)


def _key(number: int, words: list[str], where: str) -> ApiKey:
    """Return the key of a line."""
    secret, *settings = words
    if len(secret) < SHORTEST_KEY or not secret.isascii() or not secret.isprintable():
        raise UsageError(f"{where}: a key must have at least {SHORTEST_KEY} printable ASCII characters", CREATE)
    found: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        # the text may be a part of a key, and is not shown
        if not equals or name not in ("name", *LIMITS) or name in found:
            what = f"{where} has something other than one each of name=, requests= and tokens= after its key"
            raise UsageError(what, f"{FORM}; {CREATE}")
        found[name] = value
    name = _name(found["name"], where) if "name" in found else f"key-{number}"
    requests, tokens = (_per_minute(found[one], f"{one}= in {where}") if one in found else None for one in LIMITS)
    return ApiKey(name, secret.encode(), requests, tokens)


def _name(value: str, where: str) -> str:
    if (
        not 0 < len(value) <= LONGEST_NAME
        or not value.isascii()
        or not value.replace("-", "").replace("_", "").isalnum()
    ):
        what = f"name= in {where} is not a name: it needs 1 to {LONGEST_NAME} letters, digits, - or _"
        raise UsageError(what, FORM)
    return value


def _per_minute(value: str, where: str) -> int:
    if not value.isascii() or not value.isdigit() or not 0 < int(value[:20]) <= MOST_PER_MINUTE:
        raise UsageError(f"{where} is not a number per minute of 1 or more", FORM)
    return int(value)


def _check_repeated(keys: list[ApiKey], numbers: list[int], file: Path) -> None:
    """Raise UsageError if two lines have the same key or the same name."""
    names = [key.name.encode() for key in keys]
    for what, values in (("key", [key.secret for key in keys]), ("name", names)):
        for place, value in enumerate(values):
            first = values.index(value)
            if first < place:
                lines = f"lines {numbers[first]} and {numbers[place]} of {file}"
                raise UsageError(f"{lines} have the same {what}", "change or remove one of them")
