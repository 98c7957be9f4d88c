"""Reports of a verification: JSON, JUnit XML and Markdown. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from dsv4cli.engine.verification.calls import ApiCall
from dsv4cli.engine.verification.check import FAMILIES, CheckResult, Problem, verdict_of_run
from dsv4cli.engine.verification.checked_server import CheckedServer
from dsv4cli.harmless import harmless_line, shell_word

SCHEMA = "dsv4.verify/1"
# characters of a body that a command line may hold on common systems, with room for the rest
LONGEST_BODY = 100_000
FENCE = "````````"  # longer than any that evidence is likely to contain


def curl_of(url: str, call: ApiCall, keyed: bool) -> str:
    """Return a curl command that sends a call.

    Args:
        keyed: whether the server has an API key, which the command takes from $API_KEY.
    """
    words = ["curl", "-sS", shell_word(url + call.path)]
    if keyed:
        words += ["-H", '"Authorization: Bearer $API_KEY"']
    content = call.content
    if content is None:
        return " ".join(words)
    words += ["-H", "'Content-Type: application/json'"]
    text = content.decode(errors="replace")
    if len(text) > LONGEST_BODY:
        return " ".join([*words, "-d", f"@body.json  # {len(text):,} characters"])
    return " ".join([*words, "--data-binary", shell_word(text)])


def json_report(
    server: CheckedServer, results: Sequence[CheckResult], facts: Mapping[str, Any], keyed: bool
) -> dict[str, Any]:
    """Return the JSON document."""
    verdict = verdict_of_run(results)
    checks = [_record(server.url, result, keyed) for result in results]
    return {"schema": SCHEMA, "server": dict(server.record()), "verdict": verdict, **facts, "checks": checks}


def _record(url: str, result: CheckResult, keyed: bool) -> dict[str, Any]:
    check = result.check
    return {
        "name": check.name,
        "verdict": result.verdict,
        "requests": result.requests,
        "reason": check.reason,
        "meaning": check.meaning,
        "skipped": check.skip,
        "figures": dict(result.figures),
        "problems": [
            {
                "what": problem.what,
                "wrong": problem.wrong,
                "late": problem.late,
                "evidence": list(problem.evidence),
                "curl": None if problem.call is None else curl_of(url, problem.call, keyed),
            }
            for problem in result.problems
        ],
    }


def junit_report(server: CheckedServer, results: Sequence[CheckResult], keyed: bool) -> str:
    """Return JUnit XML: a test suite per family, a test case per check."""
    root = ElementTree.Element("testsuites", name="dsv4 verify")
    for family in FAMILIES:
        own = [result for result in results if result.check.family == family]
        if not own:
            continue
        failures = sum(result.verdict == "wrong" for result in own)
        errors = sum(result.verdict == "no answer" for result in own)
        skipped = sum(result.verdict == "skipped" for result in own)
        counts = {"tests": len(own), "failures": failures, "errors": errors, "skipped": skipped}
        suite = ElementTree.SubElement(root, "testsuite", {"name": family} | {k: str(v) for k, v in counts.items()})
        for result in own:
            case = ElementTree.SubElement(suite, "testcase", name=result.check.name, classname=f"dsv4.verify.{family}")
            if result.verdict in ("wrong", "no answer"):
                failed = result.verdict == "wrong"
                first = next(problem for problem in result.problems if (problem.wrong if failed else problem.late))
                text = "\n".join(_plain(server.url, result, keyed))
                kind = "failure" if failed else "error"
                ElementTree.SubElement(case, kind, message=harmless_line(first.what)).text = text
            elif result.verdict == "skipped":
                ElementTree.SubElement(case, "skipped", message=harmless_line(result.check.skip))
            elif result.problems:
                ElementTree.SubElement(case, "system-out").text = "\n".join(_plain(server.url, result, keyed))
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _plain(url: str, result: CheckResult, keyed: bool) -> Iterator[str]:
    for problem in result.problems:
        yield harmless_line(problem.what)
        yield from (f"  {harmless_line(line)}" for line in problem.evidence)
        if problem.call is not None:
            yield f"  {curl_of(url, problem.call, keyed)}"
    yield harmless_line(f"What it means: {result.check.meaning}")


def markdown_report(
    server: CheckedServer, results: Sequence[CheckResult], facts: Mapping[str, Any], keyed: bool
) -> str:
    """Return the report as Markdown. Its second line is a badge."""
    right = [result for result in results if result.verdict in ("right", "note")]
    checked = [result for result in results if result.verdict != "skipped"]
    state = f"{len(right)}/{len(checked)}"
    color = {"wrong": "red", "no answer": "lightgrey", "right": "brightgreen"}[verdict_of_run(results)]
    lines = [f"# {_cell(server.model)} on {_cell(server.url)}", ""]
    badge = f"https://img.shields.io/badge/dsv4_verify-{state.replace('/', '%2F')}-{color}"
    lines += [f"![dsv4 verify: {state} checks right]({badge})", ""]
    lines += [f"- {name}: {_cell(str(value))}" for name, value in {**server.record(), **facts}.items()]
    lines += ["", "The table lists the verdict of each check.", "", "| check | verdict | requests |", "|---|---|---:|"]
    lines += [f"| {result.check.name} | {result.verdict} | {result.requests} |" for result in results]
    for result in results:
        lines += _section(server.url, result, keyed)
    return "\n".join(lines) + "\n"


def _section(url: str, result: CheckResult, keyed: bool) -> Iterator[str]:
    check = result.check
    if result.figures:
        yield from ("", f"## {check.name}: figures", "")
        yield from (f"- {name}: {_cell(str(value))}" for name, value in result.figures.items())
    if not result.problems:
        return
    yield from ("", f"## {check.name}: {result.verdict}", "", check.reason, "", f"What it means: {check.meaning}")
    for problem in result.problems:
        yield from ("", f"**{_cell(problem.what)}**", "", FENCE, *(harmless_line(line) for line in problem.evidence))
        yield from _command(url, problem, keyed)
        yield FENCE


def _command(url: str, problem: Problem, keyed: bool) -> Iterator[str]:
    if problem.call is not None:
        yield curl_of(url, problem.call, keyed)


def _cell(text: str) -> str:
    escaped = harmless_line(text)
    for mark in "\\|<>*_[]`":
        escaped = escaped.replace(mark, f"\\{mark}")
    return escaped
