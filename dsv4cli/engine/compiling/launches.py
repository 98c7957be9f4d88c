"""Records what Triton would compile for a launch, without launching, and compiles it into Triton's cache."""

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

# threads per warp, on every NVIDIA GPU
WARP = 32


@dataclass(frozen=True)
class Launch:
    """A kernel as specialized for a launch, in Triton's terms.

    Attributes:
        module, name: where to import the function from.
        key: Triton's key of this specialization of the function.
        signature: type of each argument.
        constants: values of constant arguments, by position.
        attributes: properties of other arguments, by position, such as divisibility by 16.
        options: number of warps, stages and the like.
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
        """A unique key of the launch."""
        return self.module, self.name, self.key

    @property
    def function(self) -> Any:
        """The kernel function."""
        return getattr(import_module(self.module), self.name)


class _Driver:
    """A stub of the driver with what Triton's compiler asks for."""

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
    """A Triton hook that records what would be compiled.

    Attributes:
        launches: all launches by identity.
        seen: identities of the launches since it was last cleared.
    """

    def __init__(self) -> None:
        self.launches: dict[tuple[str, str, str], Launch] = {}
        self.seen = set[tuple[str, str, str]]()
        self._kernels, self._last = list[Kernel](), ("", "", "")

    def __call__(self, *, key: str, fn: Any, compile: Mapping[str, Any], **details: Any) -> bool:
        """Record a launch. Returns True, so that Triton neither compiles nor launches."""
        identity = self._last = fn.module, fn.name, key
        self.seen.add(identity)
        if identity not in self.launches:
            options = json.loads(compile["specialization_data"])["options"]
            [attributes] = compile["configs"]
            self.launches[identity] = Launch(*identity, compile["signature"], compile["constants"], attributes, options)
        return True

    def run(self, kernel: Kernel, *arguments: Any, **options: Any) -> "_Recorded":
        """Replace Triton's run. The kernel caches the result for equal launches, which then skip Triton."""
        JITFunction.run(kernel, *arguments, **options)
        self._kernels.append(kernel)
        return _Recorded(self.seen, self._last)

    def forget(self) -> None:
        """Remove what kernels have cached from this recorder."""
        while self._kernels:
            self._kernels.pop().calls.clear()


class _Recorded(CompiledKernel):  # type: ignore[misc] # Triton has no types
    """Stands in for a compiled kernel, and records its launches."""

    function = packed_metadata = None

    def __init__(self, seen: set[tuple[str, str, str]], identity: tuple[str, str, str]) -> None:
        self._seen, self._identity = seen, identity

    def run(self, *given: object) -> None:
        self._seen.add(self._identity)


@contextmanager
def driven_by(card: Card) -> Iterator[None]:
    """Make Triton compile for this card in the block, in this process, whatever GPU is present."""
    from triton.runtime.driver import driver

    before = driver._active
    driver.set_active(_Driver(card))
    try:
        yield
    finally:
        driver._active = before


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record launches in the block, in this process, without compiling or launching."""
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
    """Compile a kernel into Triton's cache. Return False if it was there already. Requires `driven_by`.

    Raises what Triton raises.
    """
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
    """Return an estimate of the compile time, in arbitrary units.

    It is the characters of the kernel's source and of all that it calls, times the number of address arguments plus 1.
    """
    return sum(len(function.src) for function in called_by(launch.function)) * (1 + len(launch.attributes))


def load_launch(launch: Launch, device: int) -> None:
    """Load a kernel from Triton's cache onto this device, where launches find it. Raises what Triton raises."""
    kernels = launch.function.device_caches[device][0]
    if launch.key not in kernels:
        with torch.cuda.device(device):
            kernel = compiled(launch)
            _ = kernel.run  # accessing `run` loads the kernel
        kernels[launch.key] = kernel


def compiled(launch: Launch) -> Any:
    """Return a kernel from Triton's cache, compiling it if needed. Requires `driven_by`. Raises what Triton raises."""
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
    """Return whether Triton builds a C launcher for each kernel signature, and the driver library for it exists."""
    from triton.backends.nvidia import driver

    if not hasattr(driver, "make_launcher"):
        return False
    with suppress(AssertionError, OSError, CalledProcessError):  # what Triton raises if the library is not found
        return bool(driver.library_dirs())
    return False


def build_launcher(launch: Launch) -> None:
    """Build the launcher of a compiled kernel's signature into Triton's cache. Requires `driven_by`.

    If it fails, the launcher is built when the kernel is launched.
    """
    from triton import knobs
    from triton.backends.nvidia.driver import CudaLauncher

    before, knobs.build.impl = knobs.build.impl, knobs.build.impl or _build_quickly
    try:
        with suppress(Exception):  # a compiler can raise any exception
            kernel = compiled(launch)
            CudaLauncher(kernel.src, kernel.metadata)
    finally:
        knobs.build.impl = before


def _build_quickly(*given: Any) -> Any:
    """Build as Triton does, with -O1 after its -O3: it takes two thirds of the time, and launches are as fast."""
    from triton import knobs
    from triton.runtime.build import _build

    knobs.build.impl = None
    return _build(*given, ["-O1"])
