"""Whose words launches share: one workspace's, clear after a launch that did not end, and never another's."""

from contextlib import contextmanager, nullcontext, suppress
from threading import Barrier, Thread

import pytest
import torch

from dsv4cli.kernels import norm
from dsv4cli.kernels.dispatch import choose, use
from dsv4cli.kernels.gemm import linear
from dsv4cli.kernels.hyper_connections import Connection, connect_pre
from dsv4cli.kernels.routing import route
from dsv4cli.kernels.stored_matrix import StoredMatrix
from dsv4cli.kernels.workspace import Workspace, words

CPU = torch.device("cpu")


@contextmanager
def aborted(workspace):
    """A step that something ends."""
    with suppress(KeyboardInterrupt), workspace.current():
        yield
        raise KeyboardInterrupt


def together(*jobs):
    """Runs each job in a thread of its own, all at once, and raises what any of them raises."""
    errors = []

    def run(job):
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - it is raised below
            errors.append(error)

    threads = [Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_a_workspace_has_words_of_its_own():
    first, second = Workspace(), Workspace()
    found = []
    for one in (first, second, first):
        with one.current():
            found.append(words(CPU, 2, 3))
    assert found[0] is found[2]
    assert found[0] is not found[1]
    assert (found[0].shape, found[0].dtype, bool(found[0].any())) == ((2, 3), torch.int32, False)
    with first.current():
        assert words(CPU, 3, 2) is not found[0]


def test_without_a_workspace_nothing_is_shared():
    assert words(CPU, 4) is not words(CPU, 4)


def test_the_inner_workspace_counts_until_it_ends():
    outer, inner = Workspace(), Workspace()
    with outer.current():
        found = words(CPU, 4)
        with outer.current(), inner.current():
            assert words(CPU, 4) is not found
        assert words(CPU, 4) is found


def test_another_thread_does_not_see_the_workspace():
    workspace, seen = Workspace(), []
    with workspace.current():
        together(lambda: seen.append(words(CPU, 4)))
        assert seen[0] is not words(CPU, 4)


def test_what_an_aborted_step_leaves_is_cleared_where_it_lies():
    workspace = Workspace()
    with aborted(workspace):
        left = words(CPU, 4).fill_(7)
    with workspace.current():
        assert words(CPU, 4) is left
        assert not left.any()
        left.fill_(7)
        with workspace.current():  # inside a step nothing is cleared
            assert left.all()


def test_a_step_that_ends_costs_no_clearing():
    workspace = Workspace()
    with workspace.current():
        words(CPU, 4).fill_(7)
    with workspace.current():
        assert words(CPU, 4).all()


@pytest.mark.usefixtures("triton_backend")
def test_an_aborted_launch_leaves_the_next_numbers_right():
    """A tile of two programs: its sum is stored by the one that counts the other."""
    x, weight = torch.randint(-8, 9, (17, 1024)).bfloat16(), torch.randint(-8, 9, (64, 1024)).bfloat16()
    exact = (x.double() @ weight.double().T).to(torch.bfloat16)
    mine, other = Workspace(), Workspace()
    with mine.current():
        assert torch.equal(linear(x, StoredMatrix(weight)), exact)
    with aborted(mine):
        linear(x, StoredMatrix(weight))
        for left in mine._words.values():
            left.fill_(1)
    for workspace in (other, mine, mine):
        with workspace.current():
            assert torch.equal(linear(x, StoredMatrix(weight)), exact)
    assert mine._words


@pytest.mark.usefixtures("triton_backend")
def test_threads_choose_their_backends_for_themselves():
    meet, found, x = Barrier(2), {}, torch.ones(2, 4)  # a thread of its own has another default device

    def choosing(name, choice):
        with choice:
            meet.wait(10)  # both have chosen
            found[name] = choose(x.cpu() if name == "new" else x, norm.ref)
            meet.wait(10)

    together(lambda: choosing("triton", use("triton")), lambda: choosing("torch", use("torch")))
    together(lambda: choosing("new", nullcontext()), lambda: choosing("triton again", use("triton")))
    kernel = choose(x, norm.ref)
    assert kernel is not norm.ref
    assert found == {"triton": kernel, "torch": norm.ref, "new": norm.ref, "triton again": kernel}


def few_tokens(seed):
    """What the families that share words compute of a token or two, from numbers of this seed."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator, device="cuda")

    x, streams = randn(2, 4096).bfloat16(), randn(2, 4, 4096).bfloat16()
    router, bias, weight = randn(256, 4096).bfloat16(), randn(256), randn(512, 4096).bfloat16()
    connection = Connection(randn(24, 4 * 4096) / 128, torch.ones(3, device="cuda"), randn(24), 20, 1e-6, 1e-6)
    return lambda: [
        *route(x, router, bias, 6, 1.5),
        *connect_pre(streams, connection),
        linear(x, StoredMatrix(weight)),
    ]


@pytest.mark.gpu
def test_two_threads_with_a_stream_each_compute_as_alone():
    jobs = [few_tokens(seed) for seed in (1, 2)]
    expected = [job() for job in jobs]  # compiles
    torch.cuda.synchronize()
    wrong, meet = [torch.zeros((), device="cuda") for _ in jobs], Barrier(2)
    torch.cuda.synchronize()

    def computing(number):
        workspace = Workspace()
        meet.wait(10)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(500):
                with workspace.current():
                    found = jobs[number]()
                for ours, alone in zip(found, expected[number], strict=True):
                    wrong[number] += (ours != alone).any()
            torch.cuda.current_stream().synchronize()

    together(lambda: computing(0), lambda: computing(1))
    assert [int(count) for count in wrong] == [0, 0]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_words_are_not_made_while_a_graph_is_captured():
    """Their zeros would be written when the graph runs, and not before."""
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(AssertionError, match="has run before"), Workspace().current(), torch.cuda.graph(graph):
        words(torch.device("cuda", torch.cuda.current_device()), 4)
