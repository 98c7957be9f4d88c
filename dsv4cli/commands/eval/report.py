"""Report of `dsv4 eval`: the score of each task, and how two models differ."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dsv4cli.commands.eval.asking import ModelResults
from dsv4cli.output import Output, counted, duration_text

if TYPE_CHECKING:
    from dsv4cli.engine.evaluation.pairing import Pairing, PairingVerdict
    from dsv4cli.engine.evaluation.statistics import Mean
    from dsv4cli.engine.evaluation.summary import ScoreSummary

HEADER = ["task", "items", "correct", "wrong", "cut", "score"]
# changed answers and failures listed on a terminal; --json and --out have all
MOST_LISTED = 20


def report(out: Output, results: ModelResults, others: ModelResults | None) -> "PairingVerdict | None":
    """Print the results, and the comparison with the other model's, if any. Return the verdict of that comparison."""
    from dsv4cli.engine.evaluation.pairing import pair
    from dsv4cli.engine.evaluation.summary import by_task, summary_of

    whole, tasks = summary_of(results.outcomes), by_task(results.outcomes)
    pairing = None if others is None else pair(results.outcomes, others.outcomes)
    rows = [_row(name or "other", one) for name, one in tasks.items()] if len(tasks) > 1 else []
    out.table([HEADER, *rows, _row("all" if rows else results.questions.name, whole)], numbers=True)
    for line in _remarks(whole):
        out.line(line)
    if pairing is not None and others is not None:
        out.line()
        for line in _against(results, others, pairing):
            out.line(line)
    _report_notes(out, results, whole)
    found = _record(results, whole, tasks)
    if pairing is not None and others is not None:
        found |= {"against": {"model": others.header["model"]} | pairing.record()}
    out.document(found)
    return None if pairing is None else pairing.verdict


def _row(name: str, one: "ScoreSummary") -> list[str]:
    counts = [one.items, *(one.rulings[ruling] for ruling in ("correct", "wrong", "cut"))]
    return [name, *(f"{count:,}" for count in counts), _percent(one.score)]


def _percent(mean: "Mean") -> str:
    if mean.value is None:
        return "–"
    # all correct or all wrong: no standard error can be estimated
    error = f" ± {100 * mean.stderr:.1f}" if mean.stderr else ""
    return f"{100 * mean.value:.1f}{error} %"


def _remarks(one: "ScoreSummary") -> Iterator[str]:
    cut, right = one.rulings["cut"], one.rulings["correct"]
    if cut and one.judged:
        least, most = (100 * count / (one.judged + cut) for count in (right, right + cut))
        yield (
            f"the score excludes {counted(cut, 'answer')} cut off at the limit; with {'it' if cut == 1 else 'them'} "
            f"it would be between {least:.1f} and {most:.1f} %"
        )
    elif cut:
        yield f"there is no score: {counted(cut, 'answer')} {'was' if cut == 1 else 'were'} cut off at the limit"
    if one.rulings["unjudged"]:
        yield f"{counted(one.rulings['unjudged'], 'answer')} could not be judged: no rule applies"
    if one.continuations:
        own = f"{one.common_prefix / one.continuations:.1f} of {one.continuation_tokens / one.continuations:.1f}"
        yield (
            f"continuations: NLL {_plus_minus(one.nll)} nats per token; the model's first token is right in "
            f"{one.first_token:,} of {one.continuations:,}; it reproduces the first {own} tokens on average"
        )


def _plus_minus(mean: "Mean", sign: str = "") -> str:
    if mean.value is None:
        return "–"
    digits = f"{mean.value:{sign}.4g}"
    return digits if mean.stderr is None else f"{digits} ± {mean.stderr:.2g}"


def _against(results: ModelResults, others: ModelResults, found: "Pairing") -> Iterator[str]:
    from dsv4cli.engine.evaluation.pairing import ROUNDING
    from dsv4cli.engine.evaluation.results import differing_settings
    from dsv4cli.engine.evaluation.statistics import MIN_PAIRS

    own, other = results.header["model"], others.header["model"]
    yield f"{own} against {other}{differing_settings(others.header, results.header)}"
    if found.compared:
        yield (
            f"answers: {found.gained:,} gained, {found.lost:,} lost, of {found.compared:,}; "
            f"{_points(found.difference)}, p = {found.answers_p:.2g}"
        )
    if found.nll_items:
        few = f"no verdict, because fewer than {MIN_PAIRS} items differ"
        yield (
            f"NLL: {_plus_minus(found.nll_difference, '+')} nats per token, "
            f"{few if found.nll_p is None else f'p = {found.nll_p:.2g}'}; "
            f"{found.numbers:,} of {found.nll_items:,} differ by more than {ROUNDING:g}, at most by {found.largest:.2g}"
        )
    for one, before in found.changed[:MOST_LISTED]:
        yield f"  {one.id}: {before.ruling} {before.given[:60]!r} → {one.ruling} {one.given[:60]!r}"
    if len(found.changed) > MOST_LISTED:
        yield f"  and {counted(len(found.changed) - MOST_LISTED, 'more changed answer')}; --json lists all"
    yield _sentence(own, other, found.verdict)


def _points(mean: "Mean") -> str:
    if mean.value is None or mean.stderr is None:
        return "–"
    return f"{100 * mean.value:+.1f} ± {100 * mean.stderr:.1f} points"


def _sentence(own: str, other: str, verdict: "PairingVerdict") -> str:
    return {
        "same": f"{own} and {other} have the same answers and the same numbers",
        "different": f"{own} and {other} differ, but neither is significantly better",
        "worse": f"{own} is significantly worse than {other}",
        "better": f"{own} is significantly better than {other}",
    }[verdict]


def _report_notes(out: Output, results: ModelResults, whole: "ScoreSummary") -> None:
    notes = [one for one in results.outcomes if one.note]
    for one in notes[:MOST_LISTED]:
        out.warning(f"{one.id}: {one.note}")
    if whole.rulings["cut"]:
        out.hint("answers were cut off at their limit; raise --max-tokens or --max-context")
    if results.asked:
        those = "" if results.asked == whole.items else "all "
        out.status(
            f"{counted(results.asked, 'question')} in {duration_text(results.seconds)}; "
            f"{counted(whole.tokens, 'token')} of {those}answers and texts, {whole.prompt_tokens:,} of {those}prompts"
        )


def _record(results: ModelResults, whole: "ScoreSummary", tasks: "dict[str, ScoreSummary]") -> dict[str, Any]:
    named = {key: results.header[key] for key in ("model", "questions", "form", "settings")}
    cost = {"asked": results.asked, "seconds": results.seconds}
    cost |= {"tokens": whole.tokens, "prompt_tokens": whole.prompt_tokens}
    return (
        {"schema": "dsv4.eval/1"}
        | named
        | whole.record()
        | cost
        | {"tasks": {name: one.record() for name, one in tasks.items()}}
    )
