"""Reference files of `--record` and `--against`: log-probabilities of texts, and called functions. No torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsv4cli.engine.verification.calls import CHAT, ApiCall
from dsv4cli.engine.verification.check import Replies
from dsv4cli.engine.verification.checked_server import CheckedServer
from dsv4cli.engine.verification.replies import readable
from dsv4cli.errors import UsageError

SCHEMA = "dsv4.verify-reference/1"
NANO = "nano"
# the checks whose answers are recorded
NUMBERS, TOOLS = "numbers.logprobs", "tools.answers"
_BUILT_IN = Path(__file__).with_name("nano-reference.json")
REMEDY = "create one: dsv4 verify URL --record FILE.json"
# digits of a log-probability that are kept: far below any rounding
DIGITS = 5
# Sums of FP8 products in another order move half of the log-probabilities by more than this many nats. Measured on
# nano: 0.0035 (norm weights perturbed by 1e-6), which its reference says; the rest is a margin for larger models.
NOISE = 0.01


@dataclass(frozen=True)
class ScoredText:
    """The tokens of a text or an answer, with their log-probabilities."""

    tokens: Sequence[str]
    logprobs: Sequence[float]


@dataclass(frozen=True)
class ServerReference:
    """What a trusted server answered.

    Attributes:
        model: its name for the model.
        texts: scored texts, by class and number, such as `english/0`.
        answers: scored answers to prompts at temperature 0, for servers that score no texts.
        calls: the names of the functions called, by tool scenario.
        noise: the median difference of log-probabilities, in nats, that rounding causes between two correct servers.
    """

    model: str
    texts: Mapping[str, ScoredText]
    answers: Mapping[str, ScoredText]
    calls: Mapping[str, Sequence[str]]
    noise: float = NOISE

    def write(self, path: Path) -> None:
        """Write the file. Raises OSError."""
        parts = {name: {key: asdict(one) for key, one in getattr(self, name).items()} for name in ("texts", "answers")}
        for listed in parts.values():
            for one in listed.values():
                one["logprobs"] = [round(value, DIGITS) for value in one["logprobs"]]
        value = {"schema": SCHEMA, "model": self.model, "noise": self.noise, **parts, "calls": dict(self.calls)}
        path.write_text(json.dumps(value, ensure_ascii=False) + "\n", encoding="utf-8")


def reference_of(server: CheckedServer, calls: Sequence[ApiCall], replies: Replies) -> ServerReference:
    """Build a reference from the answers of a run.

    Args:
        calls: the calls of the run.
    """
    texts, answers = dict[str, ScoredText](), dict[str, ScoredText]()
    names = dict[str, list[str]]()
    for call in calls:
        family, _, key = call.key.partition("/")
        if family == NUMBERS:
            one = scored_text(replies, call) if call.path != CHAT else scored_answer(replies, call)
            if one is not None:
                (answers if call.path == CHAT else texts)[key] = one
        elif family == TOOLS:
            names |= {one.key: [use.name for use in answer.calls] for one, answer in readable([call], replies)}
    return ServerReference(server.model, texts, answers, names)


def scored_text(replies: Replies, call: ApiCall) -> ScoredText | None:
    """Return the tokens of a text that was scored with `echo`; None if the response has none."""
    try:
        found = (replies[call.key].document or {})["choices"][0]["logprobs"]
        # the first token has no log-probability, and the last one was generated
        pairs = list(zip(found["tokens"], found["token_logprobs"], strict=True))[1:-1]
        return ScoredText([text for text, _ in pairs], [float(value) for _, value in pairs])
    except (LookupError, TypeError, ValueError):
        return None


def scored_answer(replies: Replies, call: ApiCall) -> ScoredText | None:
    """Return the tokens of a chat answer; None if it cannot be read."""
    for _, answer in readable([call], replies):
        return ScoredText([token.text for token in answer.tokens], [token.logprob for token in answer.tokens])
    return None


def read_reference(name: str) -> ServerReference:
    """Return the reference in a file, or the built-in one of nano. Raises UsageError if it is not one."""
    path = _BUILT_IN if name == NANO and not Path(name).exists() else Path(name)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["schema"] != SCHEMA:
            raise ValueError(value["schema"])
        texts, answers = (_scored(value[part]) for part in ("texts", "answers"))
        calls = {key: list(one) for key, one in value["calls"].items()}
        return ServerReference(str(value["model"]), texts, answers, calls, float(value["noise"]))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", REMEDY) from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise UsageError(f"{path} is not a reference of dsv4 verify", REMEDY) from None


def _scored(value: Mapping[str, Any]) -> dict[str, ScoredText]:
    found = {
        key: ScoredText(one["tokens"], [float(number) for number in one["logprobs"]]) for key, one in value.items()
    }
    if any(len(one.tokens) != len(one.logprobs) for one in found.values()):
        raise ValueError("a text has another number of log-probabilities than tokens")
    return found
