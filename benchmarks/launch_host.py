"""Host time of a call of the kernels, part by part: what a training step of small layers is bound by.

    python -m benchmarks.launch_host

A tiny operand, so nothing else is measured. A call of an op is its dispatch and a call of our function; that is allocations,
Triton's launcher, and our Python, the rest. Without a GPU kernels are compiled for sm_90, and the launcher and the driver do
nothing.
"""

from __future__ import annotations

import contextlib
import time
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from benchmarks.common import write
from fp4.kernels import ops, requantize
from fp4.kernels import quantize as kernels
from fp4.kernels.direct import direct
from fp4.kernels.launch import PLANS
from fp4.kernels.target import Target
from fp4.runtime.spec import NVFP4, Rotation

CALLS, TURNS = 300, 15
NO_DEVICE = 99  # Triton keeps what it compiled by device: no real one may find this
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


class Launcher:
    """Triton's launcher, without the launch."""

    def __init__(self, src: Any, metadata: Any) -> None: ...

    def __call__(self, *given: Any) -> None: ...


class Driver:
    """Triton's driver, as far as compiling and launching ask it."""

    launcher_cls = Launcher
    utils = types.SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448, "multiprocessor_count": 132},
        load_binary=lambda *given: (None, 0, 32, 0, 1024),
    )

    def get_current_device(self) -> int:
        return NO_DEVICE

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Where there is no GPU: CPU tensors are launched over as an H200's would be, and the ops are the kernels."""
    if ON_GPU:
        yield
        return
    from triton.runtime import driver

    for name, function in ops.KERNELS.items():
        ops.LIBRARY.impl(name, function, "CPU")
    target = mock.patch.object(kernels, "target_of", return_value=Target("sm_90"))
    with mock.patch.object(driver, "_active", Driver()), target:
        yield


def microseconds(call: Callable[[], Any]) -> float:
    """Of one call: the least of several turns, for the machine has other work too."""
    call()
    found = []
    for _ in range(TURNS):
        if ON_GPU:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - start) / CALLS * 1e6)
    return round(min(found), 2)


def calls() -> dict[str, Callable[[], Any]]:
    x = torch.randn(32, 64, device=DEVICE, dtype=torch.bfloat16)
    one, seed = torch.ones((), device=DEVICE), torch.tensor([7], device=DEVICE)
    nearest, drawn, h16 = NVFP4(), NVFP4(rounding="stochastic"), Rotation(16)
    codes, scales, factor = kernels.quantize(x, nearest, amax=one)
    packed = requantize.Packed(codes, scales, factor, nearest, 64)
    op, called = torch.ops.fp4, direct("rotate_quantize")
    bf16 = torch.bfloat16
    (plan,) = PLANS.values()
    outputs = [make() for make in plan.makers]
    bound = plan.bound
    (compiled,) = bound.compiled.values()
    places = [t.data_ptr() for t in (x, one, *outputs)]
    arguments = bound.order((*places, 0, 0, *bound.numbers))
    return {
        "op rotate_quantize": lambda: op.rotate_quantize.default(x, one, "nvfp4", "", None, 0, 0, False),
        "past the dispatcher": lambda: called(x, one, "nvfp4", "", None, 0, 0, False),
        "its function": lambda: kernels.quantize(x, nearest, amax=one),
        "its allocations": lambda: [make() for make in plan.makers],
        "its launcher": lambda: compiled.launch(bound.grid, arguments),
        "op fake_quantize, drawn": lambda: op.fake_quantize.default(
            x, one, "nvfp4[rounding=stochastic]", "hadamard", seed, 3, 3, False, bf16
        ),
        "op decode": lambda: op.decode.default(codes, scales, factor, "nvfp4", 64, bf16),
        "quantize, amax computed": lambda: kernels.quantize(x, nearest),
        "fake_quantize, drawn": lambda: kernels.fake_quantize(x, drawn, rotation=h16, amax=one, seed=seed, site=3),
        "requantize": lambda: requantize.requantize(packed, nearest, amax=one),
    }


def main() -> None:
    with stand_ins(), torch.no_grad():
        figures = {name: microseconds(call) for name, call in calls().items()}
    gpu = torch.cuda.get_device_name() if ON_GPU else "none: stand-ins"
    write("launch_host_gpu" if ON_GPU else "launch_host", {"launches on": gpu, "us a call": figures})


if __name__ == "__main__":
    main()
