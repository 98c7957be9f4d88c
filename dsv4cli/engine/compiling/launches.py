"""What Triton compiles for a launch: recorded where nothing is launched, and compiled into Triton's own cache."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from subprocess import CalledProcessError
from typing import Any

import torch
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from dsv4cli.kernels.card import Card
from dsv4cli.kernels.launch import Kernel, called_by

# threads of a warp, on every NVIDIA GPU
WARP = 32


@dataclass(frozen=True)
class Launch:
    """A kernel as one launch needs it, by Triton's names.

    module, name: of the function. key: what tells it from others of the function. signature: the type of each argument.
    constants, attributes: of arguments, by their place: the values of those that are constants, and what is known of
    others (whether they are divisible by 16). options: warps, stages and the like.
    """

    module: str
    name: str
    key: str
    signature: Mapping[str, Any]
    constants: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], Any]
    options: Mapping[str, Any]

    @property
    def identity(self) -> tuple[str, str, str]:
        """What tells it from every other."""
        return self.module, self.name, self.key

    @property
    def function(self) -> Any:
        """The kernel itself."""
        return getattr(import_module(self.module), self.name)


class _Driver:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, card: Card) -> None:
        from triton.backends.compiler import GPUTarget

        major, minor = card.capability
        self._target = GPUTarget("cuda", 10 * major + minor, WARP)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


class Recorder:
    """Triton's hook before it compiles: keeps what would be compiled. launches: by what tells them apart. seen: of
    these, what was launched since it was cleared."""

    def __init__(self) -> None:
        self.launches: dict[tuple[str, str, str], Launch] = {}
        self.seen = set[tuple[str, str, str]]()
        self._kernels, self._last = list[Kernel](), ("", "", "")

    def __call__(self, *, key: str, fn: Any, compile: Mapping[str, Any], **details: Any) -> bool:
        """That it returns True keeps Triton from compiling, and from launching."""
        identity = self._last = fn.module, fn.name, key
        self.seen.add(identity)
        if identity not in self.launches:
            options = json.loads(compile["specialization_data"])["options"]
            [attributes] = compile["configs"]
            self.launches[identity] = Launch(*identity, compile["signature"], compile["constants"], attributes, options)
        return True

    def run(self, kernel: Kernel, *arguments: Any, **options: Any) -> "_Recorded":
        """In place of Triton's: what the kernel keeps for launches like this one, which need not go Triton's way."""
        JITFunction.run(kernel, *arguments, **options)
        self._kernels.append(kernel)
        return _Recorded(self.seen, self._last)

    def forget(self) -> None:
        """What kernels have kept of this."""
        while self._kernels:
            self._kernels.pop().calls.clear()


class _Recorded(CompiledKernel):  # type: ignore[misc] # Triton has no types
    """Stands for a kernel that would be compiled; launched, it is seen."""

    function = packed_metadata = None

    def __init__(self, seen: set[tuple[str, str, str]], identity: tuple[str, str, str]) -> None:
        self._seen, self._identity = seen, identity

    def run(self, *given: object) -> None:
        self._seen.add(self._identity)


@contextmanager
def driven_by(card: Card) -> Iterator[None]:
    """Inside, in this process, Triton compiles for this card, whatever is there."""
    from triton.runtime.driver import driver

    before = driver._active
    driver.set_active(_Driver(card))
    try:
        yield
    finally:
        driver._active = before


@contextmanager
def recording() -> Iterator[Recorder]:
    """Inside, in this process, launches are recorded and nothing is compiled or launched."""
    from triton import knobs

    before, recorder = knobs.runtime.jit_cache_hook, Recorder()
    knobs.runtime.jit_cache_hook = recorder
    Kernel.run = lambda kernel, *arguments, **options: recorder.run(kernel, *arguments, **options)
    try:
        yield recorder
    finally:
        knobs.runtime.jit_cache_hook = before
        del Kernel.run
        recorder.forget()


def compile_launch(launch: Launch) -> bool:
    """Compiles into Triton's cache, inside `driven_by`; whether it was not there. Raises what Triton raises."""
    from triton import knobs

    found = list[bool]()
    before = knobs.compilation.listener
    knobs.compilation.listener = lambda *, cache_hit, **details: found.append(cache_hit)
    try:
        compiled(launch)
    finally:
        knobs.compilation.listener = before
    return not found[-1]


def work_of(launch: Launch) -> int:
    """What mostly takes longer to compile the larger it is: characters of a kernel's source and of all that it calls,
    for each address that it is given."""
    return sum(len(function.src) for function in called_by(launch.function)) * (1 + len(launch.attributes))


def load_launch(launch: Launch, device: int) -> None:
    """Loads a kernel from Triton's cache to where it is found when it is launched on this device. Raises what Triton
    raises."""
    kernels = launch.function.device_caches[device][0]
    if launch.key not in kernels:
        with torch.cuda.device(device):
            kernel = compiled(launch)
            _ = kernel.run  # it is loaded when it is asked how it is run
        kernels[launch.key] = kernel


def compiled(launch: Launch) -> Any:
    """The kernel, from Triton's cache or compiled into it, inside `driven_by`. Raises what Triton raises."""
    from triton.compiler import ASTSource, compile, make_backend
    from triton.runtime.driver import driver

    target = driver.active.get_current_target()
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in launch.options.items()}
    source_of: Any = ASTSource
    if launch.function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        source_of = GluonASTSource
    source = source_of(launch.function, dict(launch.signature), dict(launch.constants), dict(launch.attributes))
    return compile(source, target=target, options=make_backend(target).parse_options(options).__dict__)


def builds_launchers() -> bool:
    """Whether this Triton has a C compiler build a launcher for each signature of a kernel, and this machine has the
    driver's library, which that is linked with."""
    from triton.backends.nvidia import driver

    if not hasattr(driver, "make_launcher"):
        return False
    with suppress(AssertionError, OSError, CalledProcessError):  # what Triton raises where it is not found
        return bool(driver.library_dirs())
    return False


def build_launcher(launch: Launch) -> None:
    """Into Triton's cache, inside `driven_by`, of a kernel that is there: for all with its signature. One that cannot
    be built here is built where the kernel is launched."""
    from triton import knobs
    from triton.backends.nvidia.driver import CudaLauncher

    before, knobs.build.impl = knobs.build.impl, knobs.build.impl or _build_quickly
    try:
        with suppress(Exception):  # a compiler raises anything
            kernel = compiled(launch)
            CudaLauncher(kernel.src, kernel.metadata)
    finally:
        knobs.build.impl = before


def _build_quickly(*given: Any) -> Any:
    """As Triton has the C compiler build, with -O1 after its -O3: two thirds of the time, launches take as long."""
    from triton import knobs
    from triton.runtime.build import _build

    knobs.build.impl = None
    return _build(*given, ["-O1"])
