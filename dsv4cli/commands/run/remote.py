"""`dsv4 run --url`: answers of a server to one prompt, or to a file of prompts."""

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, NamedTuple

from dsv4cli.commands.run.many import (
    AnswerBatch,
    Source,
    WantedAnswer,
    all_there,
    answer_sink,
    leave_out,
    missing_answers,
    seeded,
)
from dsv4cli.commands.run.show import show_answer, stream_answer
from dsv4cli.commands.server_options import OpenServer
from dsv4cli.errors import AnswerLost, ServerError
from dsv4cli.output import Output, counted, duration_text

if TYPE_CHECKING:
    from dsv4cli.engine.chat.answer import Pieces
    from dsv4cli.engine.chat.api_client import ApiClient, RequestRejected
    from dsv4cli.engine.chat.remote_answer import RemoteAnswer
    from dsv4cli.engine.settings import Sampling
    from dsv4cli.engine.text.prompt import Message
    from dsv4cli.engine.text.questions import Question

# parameters of `dsv4 run` that need the model's tokens
TOKEN_OPTIONS = ("score", "only_show", "logprobs")
# keys of a request that do not identify its prompt and settings
_NOT_IDENTIFYING = {"seed", "stream", "stream_options"}


class RemoteRequest(NamedTuple):
    """A request to a server, and the sampling parameters in it."""

    sampling: "Sampling"
    body: dict[str, Any]


class RemoteRun(NamedTuple):
    """A server, and how to ask it.

    Attributes:
        concurrency: maximum number of concurrent requests.
    """

    out: Output
    server: OpenServer
    concurrency: int

    def answer_one(self, messages: "list[Message]") -> None:
        """Stream the answer to one conversation, or print it as one JSON document."""
        conversation, sampling, start = self.server.conversation, self.server.sampling, perf_counter()
        answer = stream_answer(self.out, self._steps(messages))
        if answer.finish == "length":
            self.out.hint(f"the answer was cut off {self._limit(answer)}")
        seconds = duration_text(perf_counter() - start)
        self.out.status(f"{counted(answer.sampled, 'token')} in {seconds}; seed {sampling.seed}")
        head = {"schema": "dsv4.run/1", "model": conversation.model, "url": self.server.url}
        self.out.document(head | answer.record() | {"seed": sampling.seed})

    def _steps(self, messages: "list[Message]") -> "Iterator[tuple[int, RemoteAnswer, Pieces]]":
        """Yield the growing answer. A request that fails before the answer begins is repeated."""
        from dsv4cli.engine.chat.remote_pool import Backoff

        backoff = Backoff()
        while True:
            try:
                for answer, pieces in self.server.conversation.reply(messages, self.server.sampling):
                    yield 0, answer, pieces
                return
            except AnswerLost as error:
                raise ServerError(error.message, "run the command again; see also the server's log") from None
            except ServerError as error:
                pause = backoff.pause(error)
                if pause is None:
                    raise
                self.out.status(f"{error.message}; trying again in {pause:g} s")
            sleep(pause)

    def _limit(self, answer: "RemoteAnswer") -> str:
        most = self.server.conversation.limits.max_tokens
        if answer.sampled >= most:
            return f"after {counted(most, 'token')}; raise --max-tokens"
        return "at the end of the server's context; shorten the prompt"

    def answer_samples(self, messages: "list[Message]", wanted: int) -> None:
        """Print several answers to one conversation in order, or as one JSON document."""
        from dsv4cli.engine.text.questions import sample_of

        conversation = self.server.conversation
        samplings = [sample_of(self.server.sampling, nth) for nth in range(wanted)]
        bodies = [conversation.body(messages, one, conversation.limits) for one in samplings]
        done: dict[int, RemoteAnswer] = {}
        shown = 0
        for number, found in self._answers(bodies):
            if isinstance(found, ServerError):
                raise found
            done[number] = found
            while shown in done:
                if shown:
                    self.out.line()
                self.out.status(f"answer {shown + 1} of {wanted}, seed {samplings[shown].seed}")
                show_answer(self.out, done[shown])
                shown += 1
        records = [done[nth].record() | {"seed": one.seed} for nth, one in enumerate(samplings)]
        head = {"schema": "dsv4.run/1", "model": conversation.model, "url": self.server.url}
        self.out.document(head | {"answers": records})

    def answer_many(self, source: Source) -> None:
        """Generate the answers to a file of prompts as JSON lines, as `answer_many` of a local model does."""
        many, start, skipped = self._read(source), perf_counter(), 0
        done, tokens = many.total - len(many.answers), 0
        with answer_sink(self.out, many) as take, self.out.counting("answers") as show:
            show(done, many.total, "")
            for number, found in self._answers([one.request.body for one in many.answers]):
                one, done = many.answers[number], done + 1
                if isinstance(found, ServerError):
                    self._leave_out(found, one.question, source)
                    skipped += 1
                    take(one, None)
                else:
                    tokens += found.sampled
                    take(one, one.head() | found.record() | {"seed": one.request.sampling.seed})
                show(done, many.total, f"{tokens / (perf_counter() - start):,.0f} tokens/s")
        if not many.answers:
            self.out.status(all_there(many))
            return
        new, seconds = len(many.answers) - skipped, duration_text(perf_counter() - start)
        self.out.status(f"{counted(new, 'answer')}, {counted(tokens, 'token')} in {seconds}; seed {many.seed}")
        if many.total > len(many.answers):
            self.out.status(f"{many.out} already had {counted(many.total - len(many.answers), 'answer')}")

    def _answers(self, bodies: list[dict[str, Any]]) -> "Iterator[tuple[int, RemoteAnswer | RequestRejected]]":
        from dsv4cli.engine.chat.remote_pool import RemotePool, ask

        tasks: list[Callable[[ApiClient], RemoteAnswer]] = [partial(ask, body=body) for body in bodies]
        pool: RemotePool[RemoteAnswer] = RemotePool(self.server.connect, self.concurrency, self.out.status)
        return pool.carry_out(tasks)

    def _leave_out(self, error: ServerError, question: "Question", source: Source) -> None:
        """Warn of a line that the server rejects, with --skip-bad. Otherwise raise the error with the line's number."""
        from dsv4cli.engine.text.inputs import name_of

        line = f"{name_of(source.path)}, line {question.line}"
        if not source.skip_bad:
            raise ServerError(f"{line}: {error.message}", "correct the line, or skip it with --skip-bad")
        self.out.warning(f"{line} is skipped: {error.message}")

    def _read(self, source: Source) -> AnswerBatch:
        """Return the answers that are still missing. Raises UsageError that names every invalid line."""
        from dsv4cli.engine.chat.answer_file import AnswerFile
        from dsv4cli.engine.text.questions import read_questions

        questions, bad = read_questions(source.path, source.system, source.part)
        leave_out(self.out, source, bad, any_good=bool(questions))
        if source.out is None:
            answers = self._wanted(source, questions, self.server.sampling)
            return AnswerBatch(answers, len(answers), self.server.sampling.seed, None)
        file = AnswerFile(source.out)
        try:
            defaults = seeded(file, source, questions, self.server.sampling)
            answers = self._wanted(source, questions, defaults)
            return AnswerBatch(missing_answers(file, answers), len(answers), defaults.seed, source.out)
        finally:
            file.close()

    def _wanted(self, source: Source, questions: "list[Question]", defaults: Any) -> list[WantedAnswer]:
        conversation, answers = self.server.conversation, []
        for question in questions:
            count, limits = question.samples or source.samples, question.limits(conversation.limits)
            for nth in range(count):
                sampling = question.sampling(defaults, nth)
                body = conversation.body(question.messages, sampling, limits)
                kept = {key: value for key, value in body.items() if key not in _NOT_IDENTIFYING}
                digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]
                request = RemoteRequest(sampling, body)
                answers.append(WantedAnswer(question, nth if count > 1 else None, request, digest))
        return answers
