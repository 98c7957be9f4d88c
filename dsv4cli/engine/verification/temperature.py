"""The check that the temperature has an effect: greedy at 0, different answers at 2. No torch."""

from collections.abc import Iterator, Sequence

from dsv4cli.engine.verification.calls import ApiCall
from dsv4cli.engine.verification.check import Check, Problem, Replies, fixed
from dsv4cli.engine.verification.checked_server import CheckedServer
from dsv4cli.engine.verification.compare import ROUNDING
from dsv4cli.engine.verification.replies import readable, unreadable

# many tokens are likely one after another: sampled answers hardly ever repeat, nor have the likeliest token everywhere
OPEN = "Write random words."
SEEDS, QUICK_SEEDS = (1, 2, 3, 4), (1, 2)
MOST = 16


def temperature_check(server: CheckedServer, *, quick: bool) -> Check:
    """Return the check."""
    seeds = QUICK_SEEDS if quick else SEEDS
    hot = [server.chat(f"replies.temperature/hot-{seed}", OPEN, most=MOST, temperature=2, seed=seed) for seed in seeds]
    cold = [
        server.chat(f"replies.temperature/cold-{n}", OPEN, most=MOST, logprobs=True) for n in range(len(seeds) // 2)
    ]

    def judge(replies: Replies) -> Iterator[Problem]:
        yield from unreadable([*hot, *cold], replies)
        yield from _judge_hot(hot, cold, replies)
        yield from _judge_cold(cold, replies)
        if len(_texts(cold, replies)) > 1 and not server.logprobs:
            shown = [repr(one) for one in _texts(cold, replies)]
            first, _ = next(readable(cold, replies))
            yield Problem("two answers at temperature 0 differ", shown, first, wrong=False)

    return Check(
        "replies.temperature",
        "Gateways drop sampling fields that they do not know, and servers replace them with their own defaults.",
        "Answers are random where they must be repeatable, or the same where variety is wanted.",
        [fixed([*hot, *cold])],
        judge,
    )


def _texts(calls: Sequence[ApiCall], replies: Replies) -> set[tuple[str, str | None]]:
    return {(answer.reasoning, answer.content) for _, answer in readable(calls, replies)}


def _judge_hot(hot: Sequence[ApiCall], cold: Sequence[ApiCall], replies: Replies) -> Iterator[Problem]:
    """Yield a problem if all answers at temperature 2 are the same.

    It is an error if they are also those at temperature 0. Otherwise they were sampled, from few tokens or by chance.
    """
    hots, colds, calls = _texts(hot, replies), _texts(cold, replies), [call for call, _ in readable(hot, replies)]
    if len(hots) == 1 and len(calls) > 1:
        greedy = bool(colds) and hots <= colds
        what = f"{len(calls)} answers at temperature 2 with different seeds are the same"
        shown = [f"at 2: {one!r}" for one in hots] + [f"at 0: {one!r}" for one in colds]
        yield Problem(
            f"{what}, and equal the answer at temperature 0" if greedy else what, shown, calls[0], wrong=greedy
        )


def _judge_cold(cold: Sequence[ApiCall], replies: Replies) -> Iterator[Problem]:
    for call, answer in readable(cold, replies):
        for token in answer.tokens:
            best = max(token.top.values(), default=token.logprob)
            if best - token.logprob > ROUNDING:
                shown = f"{token.text!r} has {token.logprob:.3f}, the likeliest token {best:.3f}"
                yield Problem("at temperature 0, a token is not the likeliest one", [shown], call)
                break
