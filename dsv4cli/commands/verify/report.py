"""What `dsv4 verify` prints and writes."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4cli.errors import Dsv4Error
from dsv4cli.output import Output, counted, duration_text

if TYPE_CHECKING:
    from dsv4cli.engine.verification.check import CheckResult
    from dsv4cli.engine.verification.checked_server import CheckedServer
    from dsv4cli.engine.verification.verify_run import VerifyRun

# lines of evidence of a problem on a terminal; --json and --report have all
MOST_EVIDENCE = 4
# problems of a check that are printed
MOST_PROBLEMS = 3


def print_report(output: Output, server: "CheckedServer", done: "VerifyRun", keyed: bool) -> None:
    """Print the verdicts, and what is wrong."""
    from dsv4cli.engine.verification.report import json_report

    output.table(
        [["check", "verdict", "requests"], *([one.check.name, one.verdict, f"{one.requests}"] for one in done.results)]
    )
    for result in done.results:
        if result.problems:
            _print_problems(output, server.url, result, keyed)
        for name, value in result.figures.items():
            output.line(f"{result.check.name}: {name} {value}")
    skipped = [result for result in done.results if result.verdict == "skipped"]
    for reason in dict.fromkeys(result.check.skip for result in skipped):
        names = ", ".join(result.check.name for result in skipped if result.check.skip == reason)
        output.warning(f"skipped {names}: {reason}")
    output.line(_sentence(server, done), strong=True)
    facts = run_facts(done)
    output.status(
        f"{counted(facts['requests'], 'request')} in {duration_text(facts['seconds'])}; "
        f"{facts['tokens_in']:,} tokens in, {facts['tokens_out']:,} out"
    )
    output.document(json_report(server, done.results, facts, keyed))


def _print_problems(output: Output, url: str, result: "CheckResult", keyed: bool) -> None:
    from dsv4cli.engine.verification.report import curl_of

    output.line()
    output.line(f"{result.check.name}: {result.verdict}", strong=True)
    for problem in result.problems[:MOST_PROBLEMS]:
        output.paragraph(problem.what, "  ")
        for line in problem.evidence[:MOST_EVIDENCE]:
            output.paragraph(line, "    ")
        if problem.call is not None:
            output.line(f"    {curl_of(url, problem.call, keyed)}")
    left = len(result.problems) - MOST_PROBLEMS
    if left > 0:
        output.line(f"  and {counted(left, 'more problem')}; --json lists all")
    output.paragraph(f"Why it is checked: {result.check.reason}", "  ")
    output.paragraph(f"What it means: {result.check.meaning}", "  ")
    output.line()


def _sentence(server: "CheckedServer", done: "VerifyRun") -> str:
    wrong = [result.check.name for result in done.results if result.verdict == "wrong"]
    late = [result.check.name for result in done.results if result.verdict == "no answer"]
    checked = sum(result.verdict != "skipped" for result in done.results)
    if wrong:
        failed = f"{len(wrong)} of {counted(checked, 'check')} failed: {', '.join(wrong)}"
        return f"{server.model} on {server.url} is wrong: {failed}"
    if late:
        missing = f"requests of {len(late)} of {counted(checked, 'check')} had no answer in time: {', '.join(late)}"
        remedy = "run again with a longer --timeout or a lower --concurrency"
        return f"{server.model} on {server.url} is not verified: {missing}; {remedy}"
    return f"{server.model} on {server.url} is right: {counted(checked, 'check')} passed"


def run_facts(done: "VerifyRun") -> dict[str, Any]:
    """Return the size of the run: requests, tokens as the server reports them, and seconds."""
    tokens_in, tokens_out = done.answered_tokens()
    return {
        "requests": sum(result.requests for result in done.results),
        "tokens_in": tokens_in,
        "tokens_out": tokens_out,
        "seconds": round(done.seconds, 1),
    }


def write_reports(
    output: Output, server: "CheckedServer", done: "VerifyRun", markdown: Path | None, junit: Path | None, keyed: bool
) -> None:
    """Write the files of --report and --junit. Raises Dsv4Error if one cannot be written."""
    from dsv4cli.engine.verification.report import junit_report, markdown_report

    texts = {
        markdown: markdown_report(server, done.results, run_facts(done), keyed),
        junit: junit_report(server, done.results, keyed),
    }
    for path, text in texts.items():
        if path is not None:
            try:
                path.write_text(text, encoding="utf-8", errors="replace")
            except OSError as error:
                raise Dsv4Error(f"{path} cannot be written: {error.strerror}", "choose another file") from None
            output.status(f"wrote {path}")
