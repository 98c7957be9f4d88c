"""The Python API: `from dsv4cli import Model`. A thin layer over the engine; see `docs/reference/python.md`."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from types import TracebackType
from typing import Any, Literal, TypedDict, Unpack, get_args

import torch

from dsv4cli.engine.chat.answer import Answer, Pieces
from dsv4cli.engine.chat.conversation import conversation_capacity
from dsv4cli.engine.chat.dialogue import open_dialogue
from dsv4cli.engine.chat.shared_engine import SharedConversation, SharedEngine
from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.compiling.card import card_of
from dsv4cli.engine.compiling.compile_ahead import Compilation, found_memory
from dsv4cli.engine.compiling.demand import SAMPLING_KINDS, demand_of
from dsv4cli.engine.config.capacity import MAX_SLOTS
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.limits import context_of, workload_of
from dsv4cli.engine.runtime.score import Score, score
from dsv4cli.engine.settings import Drafting, Limits, check_device, parse_drafting, require
from dsv4cli.engine.system.backend import Backend, resolve_backend, use
from dsv4cli.engine.system.device import resolve_device
from dsv4cli.engine.text.prompt import Message, check_messages, check_tools, with_tools
from dsv4cli.engine.text.reply import name_calls
from dsv4cli.engine.weights.load import load_model
from dsv4cli.engine.weights.placement import MemoryLimits
from dsv4cli.engine.weights.reserve import Workload
from dsv4cli.errors import UsageError

__all__ = ["Model", "Reply", "Score"]

Dtype = Literal["auto", "float32"]
Messages = str | Sequence[Mapping[str, Any]]


class Options(TypedDict, total=False):
    """Keyword arguments that `Model.chat` and `Model.stream` accept after the messages."""

    tools: Sequence[Mapping[str, Any]] | None
    think: str
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    seed: int | None
    max_tokens: int
    stop: str | Sequence[str]


class Reply(Iterator[str]):
    """An answer while it is generated. Iterating yields its text in pieces, without reasoning and tool calls.

    Attributes:
        message: The whole answer in the OpenAI API's format, once it is complete: `role`, `content`, and
            `reasoning_content` and `tool_calls`, which are empty if there are none.
        finish_reason: "stop", "length" or "tool_calls"; None until the answer is complete.
    """

    def __init__(self, steps: Generator[tuple[Answer, Pieces], None, None], index: int) -> None:
        """index: Position of this message in the conversation."""
        self._steps, self._index = steps, index
        self._answer: Answer | None = None

    def __next__(self) -> str:
        for answer, pieces in self._steps:
            self._answer = answer
            text = "".join(piece for kind, piece in pieces if kind == "content")
            if text:
                return text
        raise StopIteration

    def close(self) -> None:
        """Stop generating. Deleting the reply does the same."""
        self._steps.close()

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"] | None:
        """Why the answer ended; None until it is complete."""
        return self._answer.finish if self._answer else None

    @property
    def repairs(self) -> list[str]:
        """What was repaired in the answer's markup or left out, in words. Raises UsageError if it is not complete."""
        return self._ended().message()[1]

    @property
    def message(self) -> Message:
        """The answer, to append to the conversation. Raises UsageError if it is not complete."""
        message = self._ended().message()[0]
        name_calls(message, self._index)
        return message

    def _ended(self) -> Answer:
        if self._answer is None or self._answer.finish is None:
            raise UsageError("the answer is not complete yet", "iterate to the end first, or use Model.chat")
        return self._answer


class Model:
    """A loaded model. It can be used from several threads."""

    def __init__(
        self,
        model: str = "nano",
        *,
        device: str = "auto",
        dtype: Dtype = "auto",
        exact: bool = False,
        backend: Backend = "auto",
        max_context: int | None = None,
        gpu_memory: int | None = None,
        draft: Literal["auto", "off"] | int = "auto",
        parallel: int = 1,
    ) -> None:
        """Load a model.

        Args:
            model: What `--model` accepts: a folder, `flash`, `org/name`, `nano`, `random:tiny`. A repository must be in
                the Hugging Face cache.
            gpu_memory: Maximum GPU memory for weights, in bytes.
            parallel: How many calls are answered at once, in one batch; further calls wait. 1 to 64.
            device, dtype, exact, backend, max_context, draft: As the options of `dsv4 run` with these names.

        Raises:
            Dsv4Error: If the model cannot be found or loaded.
        """
        check_device(device)
        require(dtype in get_args(Dtype), "dtype", dtype, f"use one of {', '.join(get_args(Dtype))}")
        require(backend in get_args(Backend), "backend", backend, f"use one of {', '.join(get_args(Backend))}")
        require(gpu_memory is None or gpu_memory > 0, "gpu_memory", gpu_memory, "use more than 0 bytes")
        require(1 <= parallel <= MAX_SLOTS, "parallel", parallel, f"use a number from 1 to {MAX_SLOTS}")
        drafting = parse_drafting(str(draft))
        self._source, self._device = resolve_model(model), resolve_device(device)
        self._kernels, self._max_context = resolve_backend(backend, self._device), max_context
        numerics = Numerics.reference(exact) if dtype == "auto" else Numerics.plain(getattr(torch, dtype), exact)
        self._dialogue = cache(lambda think: open_dialogue(self._source, think))
        self._dialogue("off")  # a model without a tokenizer is refused before its weights are read
        limits, config = Limits(max_context=max_context), self._source.identity.config
        memory, load = MemoryLimits(gpu=gpu_memory), replace(workload_of(config, limits, None), batch=parallel)
        with use(self._kernels), self._compiled(numerics, limits, drafting, memory, load):
            loaded = load_model(
                self._source, numerics, device=self._device, limits=memory, drafting=drafting, load=load
            )
        capacity = conversation_capacity(context_of(config, limits), parallel)
        with use(self._kernels):
            self._shared: SharedEngine | None = SharedEngine(Engine(loaded, capacity, self._device, drafting=drafting))

    @contextmanager
    def _compiled(
        self, numerics: Numerics, limits: Limits, drafting: Drafting, memory: MemoryLimits, load: Workload
    ) -> Iterator[None]:
        """Compile the kernels of conversations on a GPU during the block, then wait for those still missing."""
        if self._kernels != "triton":
            yield
            return
        identity = self._source.identity
        samplings = [self._source.sampling, *SAMPLING_KINDS]
        free = found_memory(self._device, memory)
        demand = demand_of(
            identity.config, identity.formats, numerics, limits, samplings, drafting, None, sequences=load.batch,
            memory=free, gguf_types=identity.gguf_types,
        )  # fmt: skip
        demand = replace(demand, load=load)
        with Compilation(demand, card_of(self._device), torch.cuda.current_device()) as ahead:
            yield
            ahead.wait(lambda counts: None)

    def chat(self, messages: Messages, **options: Unpack[Options]) -> Message:
        """Return the answer to a conversation, as a message to append to it. Accepts the options of `stream`."""
        reply = self.stream(messages, **options)
        for _ in reply:
            pass
        return reply.message

    def stream(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        think: str = "off",
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        max_tokens: int = 4096,
        stop: str | Sequence[str] = (),
    ) -> Reply:
        """Return the answer as it comes. A text is one message of the user.

        A turn prefills only what an earlier one has not. Several answers may run at once, also in one thread; see
        `parallel`. An answer of which no more is wanted holds its place until `Reply.close`.

        Raises:
            UsageError: If the messages are not a conversation, or fill the context.
        """
        shared = self._open()
        given = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(map(dict, messages))
        checked = check_messages(given)
        if tools is not None:
            checked = with_tools(checked, check_tools(list(map(dict, tools))))
        limits = Limits(max_tokens, self._max_context, stops=(stop,) if isinstance(stop, str) else tuple(stop))
        conversation = SharedConversation(shared, self._dialogue(think), limits, self._device)
        more = {
            "top_k": top_k, "min_p": min_p, "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty, "repetition_penalty": repetition_penalty,
        }  # fmt: skip
        steps = conversation.reply(checked, self._source.sampling.chosen(temperature, top_p, seed, more))
        return Reply(self._computed(steps), len(given))

    def score(self, text: str | Sequence[int], *, logprobs: int = 0) -> Score:
        """Return the log-probabilities of a text or of token ids.

        Returns:
            A Score: `ids`; `logprobs` of each token given the tokens before it (None for the first); `perplexity`; and
            `top`, the `logprobs` most likely next tokens after each token.
        """
        shared = self._open()
        ids = self._dialogue("off").tokenizer.encode(text) if isinstance(text, str) else list(text)
        limits = Limits(max_context=self._max_context, logprobs=logprobs)
        with shared.alone(), self._here():
            return next(score(shared.model, [ids], limits, self._device))

    def close(self) -> None:
        """Free the memory. Calling it again has no effect."""
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.close()

    def __enter__(self) -> "Model":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> SharedEngine:
        if self._shared is None:
            raise UsageError("this model has been closed", "create another Model")
        return self._shared

    @contextmanager
    def _here(self) -> Iterator[None]:
        """Use this model's backend and device in the current thread: both are settings of a thread."""
        with use(self._kernels), torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            yield

    def _computed(self, reply: Generator[tuple[Answer, Pieces], None, None]) -> Generator[tuple[Answer, Pieces]]:
        """Yield a reply's steps. Each step uses this model's backend, whatever the caller computes between steps."""
        with closing(reply):
            while True:
                with self._here():
                    step = next(reply, None)
                if step is None:
                    return
                yield step
