"""How many tokens a sequence may have, and what is refused before a step is made of it; no torch."""

from collections.abc import Sequence

from dsv4cli.engine.config.capacity import MAX_SLOTS
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.runtime.request import ID, Request
from dsv4cli.engine.settings import Limits
from dsv4cli.engine.weights.reserve import FAR, Workload
from dsv4cli.errors import UsageError


def check_texts(texts: Sequence[list[int]], config: ModelConfig, limits: Limits) -> None:
    """Raises UsageError as `check_text`, for texts of which several are named by their number."""
    for number, ids in enumerate(texts):
        check_text(ids, config, limits, f"text {number}" if len(texts) > 1 else "the text")


def check_text(ids: list[int], config: ModelConfig, limits: Limits, name: str) -> None:
    """Raises UsageError for a text that has no token, an id outside the vocabulary, or more than the context holds."""
    _check_ids(ids, config, name)
    _check_length(len(ids), config, context_of(config, limits), name)


def max_new_tokens(prompt: list[int], config: ModelConfig, limits: Limits, which: str = "the prompt") -> int:
    """How many tokens the prompt may be answered with. Raises UsageError as `check_text`, and for a full context."""
    _check_ids(prompt, config, which)
    return _room_behind(len(prompt), config, limits, which)


def end_of(request: Request, config: ModelConfig) -> int:
    """The most tokens of a request's prompt and answer. Raises UsageError for what the model cannot take."""
    _check_ids([token for token, _ in request.sampling.logit_bias], config, "logit_bias")
    if not _knows_all(request, config):
        _check_ids(request.prompt, config, request.name)
    length = len(request.prompt)
    if request.scored:
        _check_length(length, config, context_of(config, request.limits), request.name)
        return length
    return length + _room_behind(length, config, request.limits, request.name)


def check_room(request: Request, room: int | None) -> None:
    """Raises UsageError for a request that has more tokens, with those of its answer, than the cache has room for."""
    if room is not None and request.end > room:
        answer = request.end - len(request.prompt)
        raise UsageError(
            f"{request.name} has {len(request.prompt):,} tokens and its answer may have {answer:,}: the cache has room "
            f"for {room:,}",
            "shorten it, lower --max-tokens or raise --cache-memory",
        )


def context_of(config: ModelConfig, limits: Limits) -> int:
    """The most tokens of a prompt and its answer."""
    return min(limits.max_context or config.max_position_embeddings, config.max_position_embeddings)


def workload_of(
    config: ModelConfig,
    limits: Limits,
    lengths: Sequence[int] | None,
    *,
    sequences: int = 1,
    drawn: bool = True,
    cache_memory: int | None = None,
) -> Workload:
    """What prompts of these lengths ask of a model, or, None where they are not known, so many conversations at once:
    of a server, if there are several. drawn: whether they are answered."""
    context, answer = context_of(config, limits), limits.max_tokens if drawn else 0
    if lengths is None:
        return Workload(min(context, FAR), sequences, limits.prefill_chunk, sequences > 1, cache_memory)
    longest = max((min(length + answer, context) for length in lengths), default=1)
    return Workload(longest, min(max(len(lengths), 1), MAX_SLOTS), limits.prefill_chunk)


def _room_behind(length: int, config: ModelConfig, limits: Limits, which: str) -> int:
    context = context_of(config, limits)
    _check_length(length, config, context - 1, which, " and an answer")
    return min(limits.max_tokens, context - length)


def _check_length(length: int, config: ModelConfig, most: int, which: str, more: str = "") -> None:
    """`most` tokens fit into a sequence, with `more` behind it."""
    if not length:
        raise UsageError(f"{which} has no tokens", "give at least one")
    if length > most:
        raise UsageError(
            f"{which} has {length:,} tokens: the context has room for {most:,}{more}",
            "shorten it" if most + 1 >= config.max_position_embeddings else "shorten it or raise --max-context",
        )


def _knows_all(request: Request, config: ModelConfig) -> bool:
    """Whether all ids are in the vocabulary; a long prompt takes no time."""
    import numpy as np  # what refuses a prompt needs neither this nor torch

    try:
        ids = np.frombuffer(bytes(request.pack()), ID)
    except OverflowError:
        return False
    return not len(ids) or bool(ids.min() >= 0 and ids.max() < config.vocab_size)


def _check_ids(ids: Sequence[int], config: ModelConfig, which: str) -> None:
    strange = next((token for token in ids if not 0 <= token < config.vocab_size), None)
    if strange is not None:
        raise UsageError(
            f"{which} has the token id {strange}, the model's vocabulary is 0 to {config.vocab_size - 1:,}",
            "use ids of the tokenizer.json that belongs to the model",
        )
