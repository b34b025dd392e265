"""From source text to a Triton kernel: a file in a cache folder, imported; and its launches."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4.runtime.allocate import maker
from fp4.runtime.files import write_whole
from fp4.runtime.rng import MASK

# No product and sum contracted into one rounding, and no denormal flushed by the device library's ceil and floor.
COMPILE_OPTIONS = {"enable_fp_fusion": False, "enable_reflect_ftz": False}
DIRECT = ("3.6.", "3.7.")  # Triton's versions whose compiled kernels are run without its own look-ups
SIGN = 1 << 31


def require_triton() -> None:
    """Raises ImportError, saying what to install, where Triton is missing."""
    if importlib.util.find_spec("triton") is None:
        raise ImportError("fp4.kernels needs Triton, which is not installed; write: pip install 'triton>=3.6'")


def cache_folder() -> Path:
    """Where sources are kept: $FP4_CACHE_DIR, or ~/.cache/fp4."""
    return Path(os.environ.get("FP4_CACHE_DIR") or Path.home() / ".cache" / "fp4") / "kernels"


@cache
def build(text: str) -> Any:
    """The function `kernel` of a source, a ``triton.JITFunction``. One file and one import for equal texts.

    Triton reads a function's source from its file, so there must be one.
    """
    require_triton()
    name = f"fp4_kernel_{hashlib.sha256(text.encode()).hexdigest()[:20]}"
    path = cache_folder() / f"{name}.py"
    if not path.exists():
        write_whole(path, text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module.kernel


class Output(NamedTuple):
    """A tensor that a launch allocates. seen: the dtype as which the kernel sees it, where it is not its own."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    seen: torch.dtype | None = None
    zero: bool = False

    def maker(self, device: torch.device) -> Callable[[], Tensor]:
        """Makes one at each call."""
        if self.zero:
            return partial(torch.zeros, self.shape, dtype=self.dtype, device=device)
        return maker(self.shape, self.dtype, device)


class Tiles(NamedTuple):
    """number: of an operand's. turns: of a program, where nothing is known of the GPU."""

    number: int
    turns: int

    def programs(self, resident: int = 0) -> int:
        """How many programs take them: with `resident`, those that a GPU runs at once, so many rounds of all of these."""
        if not resident:
            return -(-self.number // self.turns)
        return min(self.number, resident * max(1, round(self.number / (self.turns * resident))))


class Bound:
    """A Triton kernel with all its arguments but tensors and draw sites, which a call gives.

    Triton looks its arguments over at every launch: integers that are 1 or a multiple of 16, pointers that are aligned. Here
    integers do not change, so equal alignments find the compiled kernel at once, and tensors are passed as addresses: they
    must lie on `device`. tensors, sites: names of a call's arguments, in their order; a name that the kernel has not is left
    out. grid: programs, or tiles that they share. numbers: the other arguments. seen: the dtype as which the kernel sees a
    contiguous tensor, where it is not its own. options: of the compilation.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...] | Tiles,
        device: torch.device,
        tensors: Sequence[str],
        sites: Sequence[str],
        numbers: Mapping[str, Any],
        seen: Mapping[str, torch.dtype],
        **options: Any,
    ) -> None:
        self.kernel, self.tiles = kernel, grid if isinstance(grid, Tiles) else None
        self.grid = (grid.programs(), 1, 1) if isinstance(grid, Tiles) else (*grid, 1, 1)[:3]
        self.index = device.index if device.type == "cuda" else None
        self.seen = [seen.get(name) for name in tensors]
        self.numbers = tuple(numbers.values())
        self.options = {**options, **COMPILE_OPTIONS}
        given = [*tensors, *sites, *numbers]
        self.order = itemgetter(*(given.index(name) for name in kernel.arg_names))
        self.compiled: dict[tuple[int, ...], _Compiled] = {}

    def __call__(self, tensors: Sequence[Tensor], sites: tuple[int, ...] = ()) -> Any:
        """Launch on the device's current stream; returns the compiled kernel, None under the interpreter.

        sites: of 32 bits; their bits are passed as an int32.
        """
        if self.index is not None and self.index != torch._C._cuda_getDevice():
            with torch.cuda.device(self.index):
                return self(tensors, sites)
        words = int32(sites)
        places = [t.data_ptr() for t in tensors]
        alignments = tuple([place & 15 for place in places])
        found = self.compiled.get(alignments)
        if found is None:
            return self.first(tensors, words, alignments)
        found.launch(self.grid, self.order((*places, *words, *self.numbers)))
        return found.kernel

    def first(self, tensors: Sequence[Tensor], words: Sequence[int], alignments: tuple[int, ...]) -> Any:
        """A launch by way of Triton, which compiles."""
        typed = [t if seen is None else t.view(-1).view(seen) for t, seen in zip(tensors, self.seen, strict=True)]
        arguments = zip(self.kernel.arg_names, self.order((*typed, *words, *self.numbers)), strict=True)
        kernel = self.kernel[self.grid](**dict(arguments), **self.options)
        if kernel is not None and kernel.n_spills and self.options.pop("maxnreg", None):  # another assembler's limit
            return self.first(tensors, words, alignments)
        if kernel is not None:  # the interpreter compiles nothing
            self.compiled[alignments] = compiled = _Compiled(kernel, self.index or 0)
            if self.tiles is not None and self.index is not None:
                self.grid = (self.tiles.programs(compiled.resident()), 1, 1)
        return kernel


@cache
def int32(words: tuple[int, ...]) -> tuple[int, ...]:
    """The integers whose 32 bits are the words'."""
    return tuple(((word & MASK) ^ SIGN) - SIGN for word in words)


class _Compiled:
    """A ``triton.compiler.CompiledKernel`` and what it asks Triton for at each launch."""

    def __init__(self, kernel: Any, index: int) -> None:
        import triton

        self.kernel, self.index = kernel, index
        self.hooks = triton.knobs.runtime
        self.direct = triton.__version__.startswith(DIRECT)
        self.stream = triton.runtime.driver.active.get_current_stream
        self.run, self.function, self.metadata = kernel.run, kernel.function, kernel.packed_metadata

    def resident(self) -> int:
        """Programs that the GPU runs at once, 0 where the driver does not say."""
        try:
            occupancy = ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveBlocksPerMultiprocessor
        except OSError:
            return 0
        found, threads = ctypes.c_int(), 32 * self.kernel.metadata.num_warps
        shared = ctypes.c_size_t(self.kernel.metadata.shared)
        failed = occupancy(ctypes.byref(found), ctypes.c_void_p(self.function), threads, shared)
        return 0 if failed else found.value * torch.cuda.get_device_properties(self.index).multi_processor_count

    def launch(self, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        """On the current stream. What ``kernel[grid](*arguments)`` does for a profiler's hooks, it does where there are any."""
        hooks = self.hooks
        if not self.direct or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            self.kernel[grid](*arguments)
        else:
            self.run(*grid, self.stream(self.index), self.function, self.metadata, None, None, None, *arguments)
