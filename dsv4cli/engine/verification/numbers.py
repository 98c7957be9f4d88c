"""The check of log-probabilities: compares them with those of a trusted server. No torch.

A server that scores texts (`echo`) is compared text by text. For others, greedy answers are compared up to the
first different token.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles, stdev
from typing import Any

from dsv4cli.engine.verification.batching import prompts
from dsv4cli.engine.verification.calls import ApiCall
from dsv4cli.engine.verification.check import Check, Problem, Replies, fixed
from dsv4cli.engine.verification.checked_server import CheckedServer
from dsv4cli.engine.verification.number_texts import number_texts
from dsv4cli.engine.verification.reference import NUMBERS, ScoredText, ServerReference, scored_answer, scored_text
from dsv4cli.engine.verification.replies import unreadable

REASON = (
    "A wrong scale, expert or cache entry changes all answers a little, and no answer obviously. Only the numbers show "
    "it."
)
MEANING = "The model is not the one that was published: its answers are worse by an unknown amount."
ANSWERS, QUICK_TEXTS = 15, 2
ANSWER_TOKENS = 24
# the median difference that is still right, as a multiple of what rounding makes
FACTOR = 2.0
# a class is worse if its NLL rises by this many standard errors, and by this many nats per token
DEVIATIONS, LEAST_WORSE = 4.0, 0.01
# positions that are judged together
WINDOW = 16


def number_check(server: CheckedServer, reference: ServerReference | None, *, quick: bool) -> Check:
    """Return the check of log-probabilities. Without a reference, they are only recorded."""
    calls, skip = _calls(server, reference, quick), ""
    if not calls:
        skip = "the server returns no log-probabilities"
        if reference is not None and (server.echo or server.logprobs):
            skip = "the reference has no numbers that this server can return; record it on a server with echo"

    def judge(replies: Replies) -> Iterator[Problem]:
        yield from unreadable([call for call in calls.values() if call.path.endswith("chat/completions")], replies)
        if reference is not None:
            yield from _judge(calls, recorded(calls, replies), reference, replies)

    def figures(replies: Replies) -> Mapping[str, Any]:
        found = recorded(calls, replies)
        return _figures(found, reference) if found else {}

    return Check(NUMBERS, REASON, MEANING, [fixed([*calls.values()])] if calls else [], judge, skip, figures)


def _calls(server: CheckedServer, reference: ServerReference | None, quick: bool) -> dict[str, ApiCall]:
    """Return the requests by the name of their text or answer."""
    if server.echo and (reference is None or reference.texts):
        texts = {f"{kind}/{n}": text for kind, listed in number_texts().items() for n, text in enumerate(listed)}
        chosen = list(texts)[:: len(texts) // QUICK_TEXTS][:QUICK_TEXTS] if quick else list(texts)
        return {f"texts/{key}": server.raw(f"{NUMBERS}/{key}", texts[key], 1, echo=True, logprobs=1) for key in chosen}
    if server.logprobs and (reference is None or reference.answers):
        chosen_prompts = prompts()[: QUICK_TEXTS if quick else ANSWERS]
        return {
            f"answers/{n}": server.chat(f"{NUMBERS}/{n}", text, most=ANSWER_TOKENS, logprobs=True)
            for n, text in enumerate(chosen_prompts)
        }
    return {}


def recorded(calls: Mapping[str, ApiCall], replies: Replies) -> dict[str, ScoredText]:
    """Return the scored texts and answers, by their names."""
    found = {}
    for name, call in calls.items():
        one = scored_text(replies, call) if name.startswith("texts/") else scored_answer(replies, call)
        if one is not None and one.tokens:
            found[name] = one
    return found


@dataclass(frozen=True)
class NumberDifference:
    """How log-probabilities differ from the reference.

    Attributes:
        sizes: the absolute differences in nats, of all compared tokens in order, by text.
        classes: mean difference of the negative log-likelihood per token in nats, by class.
        significant: whether any class is worse by more than chance explains.
        middle: median of the absolute differences.
        worst: 99th percentile of the absolute differences.
    """

    sizes: Mapping[str, Sequence[float]]
    classes: Mapping[str, float]
    significant: bool
    middle: float
    worst: float


def compare_numbers(found: Mapping[str, ScoredText], reference: ServerReference) -> NumberDifference | None:
    """Return how scored texts differ from the reference; None if they have no text in common."""
    sizes, signed = dict[str, list[float]](), dict[str, list[float]]()
    for name, one in found.items():
        kind, _, key = name.partition("/")
        wanted = (reference.texts if kind == "texts" else reference.answers).get(key)
        if wanted is None:
            continue
        common = _common(one.tokens, wanted.tokens)
        pairs = list(zip(one.logprobs[:common], wanted.logprobs[:common], strict=True))
        sizes[name] = [abs(a - b) for a, b in pairs]
        signed.setdefault(key.partition("/")[0] if kind == "texts" else "answers", []).extend(b - a for a, b in pairs)
    flat = [size for listed in sizes.values() for size in listed]
    if len(flat) < 2:
        return None
    classes = {kind: fmean(listed) for kind, listed in signed.items() if listed}
    worse = [
        fmean(listed) > max(DEVIATIONS * stdev(listed) / len(listed) ** 0.5, LEAST_WORSE)
        for listed in signed.values()
        if len(listed) > 1
    ]
    return NumberDifference(sizes, classes, any(worse), median(flat), quantiles(flat, n=100)[-1])


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _figures(found: Mapping[str, ScoredText], reference: ServerReference | None) -> dict[str, Any]:
    nll = {name: round(-fmean(one.logprobs), 4) for name, one in _joined(found).items()}
    figures: dict[str, Any] = {f"NLL of {kind}": value for kind, value in nll.items()}
    difference = None if reference is None else compare_numbers(found, reference)
    if difference is not None:
        figures |= {f"NLL difference of {kind}": round(value, 4) for kind, value in difference.classes.items()}
        figures |= {"median difference": round(difference.middle, 5), "99th percentile": round(difference.worst, 5)}
    return figures


def _joined(found: Mapping[str, ScoredText]) -> dict[str, ScoredText]:
    """Return the scored texts, concatenated by class."""
    joined: dict[str, ScoredText] = {}
    for name, one in found.items():
        kind = name.split("/")[1] if name.startswith("texts/") else "answers"
        before = joined.get(kind, ScoredText([], []))
        joined[kind] = ScoredText([*before.tokens, *one.tokens], [*before.logprobs, *one.logprobs])
    return joined


def _judge(
    calls: Mapping[str, ApiCall], found: Mapping[str, ScoredText], reference: ServerReference, replies: Replies
) -> Iterator[Problem]:
    for name, call in calls.items():
        if name not in found:
            yield Problem("a text is not scored", [replies[call.key].summary], call)
    if not found:
        return
    difference = compare_numbers(found, reference)
    if difference is None:
        yield Problem("no text is tokenized as in the reference", [f"reference: {reference.model}"])
        return
    verdict = verdict_of(difference, reference.noise)
    if verdict == "right":
        return
    first = calls[max(difference.sizes, key=lambda name: median(difference.sizes[name] or [0.0]))]
    lines = [
        f"half of the log-probabilities differ by more than {difference.middle:.4f} nats; rounding explains "
        f"{FACTOR * reference.noise:.4f}",
        *(f"{kind}: NLL {value:+.4f} nats per token" for kind, value in difference.classes.items()),
    ]
    yield Problem(f"the numbers are not those of the reference ({reference.model}): {verdict}", lines, first)


def verdict_of(difference: NumberDifference, noise: float) -> str:
    """Return "right", or the kind of error that the differences point to.

    Args:
        noise: the median difference that rounding alone causes, in nats.
    """
    band = FACTOR * noise
    if difference.middle <= band and not difference.significant:
        return "right"
    start = _beginning([*difference.sizes.values()], band)
    if start > 0:
        return f"wrong, from position {start} on"
    if difference.significant:
        return "wrong, from the beginning on"
    return "another quantization, or a damaged tensor"


def _beginning(texts: Sequence[Sequence[float]], band: float) -> int:
    """Return the first position from which on all windows differ by more than the band; 0 if the first one does."""
    longest = max(map(len, texts), default=0)
    windows = []
    for start in range(0, longest, WINDOW):
        sizes = [size for text in texts for size in text[start : start + WINDOW]]
        if len(sizes) >= WINDOW:
            windows.append(median(sizes) > band)
    if not windows or not windows[-1]:
        return 0
    first = len(windows)
    while first and windows[first - 1]:
        first -= 1
    return first * WINDOW
