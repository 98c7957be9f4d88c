"""Limits on sequence length, and checks of a request before it takes part in a step. No torch."""

from collections.abc import Sequence

from dsv4cli.engine.config.capacity import MAX_SLOTS
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.runtime.request import ID, Request
from dsv4cli.engine.settings import Limits
from dsv4cli.engine.weights.reserve import FAR, Workload
from dsv4cli.errors import UsageError


def check_texts(texts: Sequence[list[int]], config: ModelConfig, limits: Limits) -> None:
    """Check texts to score. Raises UsageError as `check_text`; if there are several, it names the text by its
    number.
    """
    for number, ids in enumerate(texts):
        check_text(ids, config, limits, f"text {number}" if len(texts) > 1 else "the text")


def check_text(ids: list[int], config: ModelConfig, limits: Limits, name: str) -> None:
    """Raise UsageError if a text has no token, a token id outside the vocabulary, or more tokens than the context."""
    _check_ids(ids, config, name)
    _check_length(len(ids), config, context_of(config, limits), name)


def max_new_tokens(prompt: list[int], config: ModelConfig, limits: Limits, which: str = "the prompt") -> int:
    """Return the largest number of completion tokens for a prompt. Raises UsageError as `check_text`, or if none
    fits.
    """
    _check_ids(prompt, config, which)
    return _answer_limit(len(prompt), config, limits, which)


def end_of(request: Request, config: ModelConfig) -> int:
    """Return the largest length of prompt and completion. Raises UsageError for a request that the model cannot
    take.
    """
    _check_ids([token for token, _ in request.sampling.logit_bias], config, "logit_bias")
    if not _knows_all(request, config):
        _check_ids(request.prompt, config, request.name)
    length = len(request.prompt)
    if request.scored:
        _check_length(length, config, context_of(config, request.limits), request.name)
        return length
    return length + _answer_limit(length, config, request.limits, request.name)


def check_cache_limit(request: Request, max_request_tokens: int | None) -> None:
    """Raise UsageError if a request's prompt and completion exceed the KV cache."""
    if max_request_tokens is not None and request.end > max_request_tokens:
        answer = request.end - len(request.prompt)
        raise UsageError(
            f"{request.name} has {len(request.prompt):,} tokens and its answer may have {answer:,}: the cache holds "
            f"{max_request_tokens:,}",
            "shorten it, lower --max-tokens or raise --cache-memory",
        )


def context_of(config: ModelConfig, limits: Limits) -> int:
    """Return the context limit: the maximum number of tokens of a prompt and its completion."""
    return min(limits.max_context or config.max_position_embeddings, config.max_position_embeddings)


def workload_of(
    config: ModelConfig,
    limits: Limits,
    lengths: Sequence[int] | None,
    *,
    sequences: int = 1,
    sampled: bool = True,
    cache_memory: int | None = None,
) -> Workload:
    """Return the workload that prompts of these lengths make, for the memory plan.

    Args:
        sampled: whether the prompts are answered.
    """
    context, answer = context_of(config, limits), limits.max_tokens if sampled else 0
    if lengths is None:
        return Workload(min(context, FAR), sequences, limits.prefill_chunk, sequences > 1, cache_memory)
    longest = max((min(length + answer, context) for length in lengths), default=1)
    return Workload(longest, min(max(len(lengths), 1), MAX_SLOTS), limits.prefill_chunk)


def _answer_limit(length: int, config: ModelConfig, limits: Limits, which: str) -> int:
    context = context_of(config, limits)
    _check_length(length, config, context - 1, which, answer=1)
    return min(limits.max_tokens, context - length)


def _check_length(length: int, config: ModelConfig, most: int, which: str, answer: int = 0) -> None:
    """Raise UsageError if a sequence is longer than `most` tokens. answer: tokens reserved for the answer."""
    if not length:
        raise UsageError(f"{which} has no tokens", "use at least one token")
    if length > most:
        including = ", including the answer" if answer else ""
        raise UsageError(
            f"{which} has {length:,} tokens: the context limit is {most + answer:,} tokens{including}",
            "shorten it" if most + 1 >= config.max_position_embeddings else "shorten it or raise --max-context",
        )


def _knows_all(request: Request, config: ModelConfig) -> bool:
    """Return whether all ids are in the vocabulary. Fast for long prompts."""
    import numpy as np  # imported here: the checks that reject a prompt need neither numpy nor torch

    try:
        ids = np.frombuffer(bytes(request.pack()), ID)
    except OverflowError:
        return False
    return not len(ids) or bool(ids.min() >= 0 and ids.max() < config.vocab_size)


def _check_ids(ids: Sequence[int], config: ModelConfig, which: str) -> None:
    strange = next((token for token in ids if not 0 <= token < config.vocab_size), None)
    if strange is not None:
        raise UsageError(
            f"{which} has the token id {strange}, but the model's vocabulary is 0 to {config.vocab_size - 1:,}",
            "use ids of the tokenizer.json that belongs to the model",
        )
