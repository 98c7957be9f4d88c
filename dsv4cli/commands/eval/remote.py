"""`dsv4 eval --url`: the same questions and rulings, with the answers of a server."""

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from dsv4cli.commands.eval.asking import (
    EvalOptions,
    ModelResults,
    described,
    questions_of,
    results_sink,
    stored_results,
)
from dsv4cli.commands.server_options import OpenServer
from dsv4cli.errors import UsageError
from dsv4cli.options import ModelOptions
from dsv4cli.output import Output, counted

if TYPE_CHECKING:
    from dsv4cli.engine.evaluation.items import EvalSet
    from dsv4cli.engine.evaluation.remote_items import RemoteItem, Response


class RemoteEval(NamedTuple):
    """A server, and how to evaluate one of its models.

    Attributes:
        concurrency: maximum number of concurrent requests.
    """

    out: Output
    server: OpenServer
    options: ModelOptions
    concurrency: int

    def results(self, given: EvalOptions, stored: str | None) -> tuple[ModelResults, ModelResults | None]:
        """Ask the questions, and return the results and the stored ones to compare with, if any."""
        from dsv4cli.engine.evaluation.results import ResultsFile

        questions = questions_of(given)
        header = self._header(questions, given)
        items = [item for item in self._items(questions, given.by_answer) if given.part.has(item.index)]
        if given.out is not None:
            ResultsFile(given.out, header).close()  # fails here rather than after the first answers
        others = None if stored is None else stored_results(Path(stored), questions)
        self.out.status(described(questions, given.part))
        results = ModelResults(questions, header)
        self._ask(items, given.out, results)
        return results, others

    def _items(self, questions: "EvalSet", by_answer: bool) -> "list[RemoteItem]":
        from dsv4cli.engine.evaluation.remote_items import remote_item

        items, bad = [], []
        for index, item in enumerate(questions.items):
            try:
                items.append(remote_item(index, item, self.server.conversation, self.server.sampling, by_answer))
            except UsageError as error:
                bad.append((item.id, error))
        if bad:
            details = [f"{id_}: {error.message}" for id_, error in bad]
            message = f"{counted(len(bad), 'question')} of {questions.name} cannot be asked"
            raise UsageError(message, bad[0][1].remedy, details)
        return items

    def _header(self, questions: "EvalSet", given: EvalOptions) -> dict[str, Any]:
        """Return the header of the results. The URL is not part of it: a server may move."""
        from dsv4cli.engine.evaluation.judge import RULES
        from dsv4cli.engine.evaluation.results import header_of_model

        sampling, model = self.server.sampling, self.server.conversation.model
        settings = {
            "think": self.options.think,
            "choices": "answer" if given.by_answer else "likelihood",
            **{name: getattr(sampling, name) for name in sorted(sampling.given)},
            "seed": sampling.seed,
            "max_tokens": self.options.max_tokens,
            "stop": list(self.options.stop or ()),
            "rules": RULES,
        }
        return header_of_model(model, f"server:{model}", questions, settings)

    def _ask(self, items: "list[RemoteItem]", out: Path | None, results: ModelResults) -> None:
        from dsv4cli.engine.chat.remote_pool import RemotePool
        from dsv4cli.engine.evaluation.remote_items import remote_outcomes

        start = perf_counter()
        with results_sink(self.out, out, results.header, len(items)) as (known, take):
            missing = [one for one in items if one.index not in known]
            results.asked = len(missing)
            with self.out.counting("questions") as show:
                show(len(known), len(items), "")
                pool: RemotePool[Response] = RemotePool(self.server.connect, self.concurrency, self.out.status)
                for outcome in remote_outcomes(pool, missing):
                    known[outcome.index] = outcome
                    take(outcome)
                    show(len(known), len(items), "")
        results.seconds = perf_counter() - start
        results.outcomes = [known[one.index] for one in items]
        if len(missing) < len(items):
            self.out.status(f"{out} already had {counted(len(items) - len(missing), 'result')}")
