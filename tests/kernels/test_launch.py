"""A plan is made once for operands of a kind, and a kernel bound once for their alignments, whatever draw sites and values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from benchmarks.launch_host import Driver, Launcher
from fp4.kernels import autotune, build, launch, requantize
from fp4.kernels import quantize as kernels
from fp4.kernels.build import COMPILE_OPTIONS, Bound, Output, Tiles
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.launch import Plan, planned
from fp4.kernels.target import Target
from fp4.kernels.tiles import Tile, fitted, tile_of
from fp4.runtime.spec import MXFP4, NVFP4, Rotation, SpecError

CPU = torch.device("cpu")
BF16 = torch.bfloat16


class Compiled:
    """What Triton's CompiledKernel is to a launch; notes whether it was run directly."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, calls: list[tuple[Any, ...]], n_spills: int = 0) -> None:
        self.calls, self.n_spills = calls, n_spills

    def run(self, *given: Any) -> None:
        self.calls.append(("run", *given))

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *values: self.calls.append(("getitem", grid, *values))


class Kernel:
    """What Triton's JITFunction is to a launch."""

    arg_names = ("x_ptr", "y_ptr", "rows", "site", "N")

    def __init__(self) -> None:
        self.bindings: list[dict[str, Any]] = []
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def bind(**arguments: Any) -> Compiled:
            self.bindings.append(arguments)
            return Compiled(self.calls)

        return bind


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU: kernels are compiled for sm_90, their launches do nothing; plans are this test's own."""
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(kernels, "target_of", lambda device: Target("sm_90"))
    monkeypatch.setattr(launch, "PLANS", {})


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What reaches Triton's launcher: grid, stream, function, metadata, launch metadata, hooks, arguments."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Launcher, "__call__", lambda self, *given: found.append(given))
    return found


def bound(kernel: Any) -> Bound:
    return Bound(
        kernel, (3,), CPU, ["x_ptr", "y_ptr", "unused_ptr"], ["site"], {"rows": 16, "N": 8}, {"y_ptr": torch.int32}, num_warps=2
    )


def test_alignments_are_bound_once() -> None:
    kernel, x, y = Kernel(), torch.zeros(64), torch.zeros(8, 8)
    one = bound(kernel)
    one([x, y, x], (1,))
    (given,) = kernel.bindings
    assert given.pop("x_ptr") is x
    seen = given.pop("y_ptr")
    assert (seen.dtype, seen.shape, seen.data_ptr()) == (torch.int32, (64,), y.data_ptr())
    assert given == {"rows": 16, "site": 1, "N": 8, "num_warps": 2, **COMPILE_OPTIONS}
    assert kernel.calls == []
    other = torch.ones(64)
    one([other, y, x], (7,))  # another tensor as aligned, another site
    assert len(kernel.bindings) == 1
    addresses = other.data_ptr(), y.data_ptr()
    assert kernel.calls == [("run", 3, 1, 1, 0, "function", "metadata", None, None, None, *addresses, 16, 7, 8)]
    one([x[1:], y, x], (1,))  # four bytes on: not aligned
    assert len(kernel.bindings) == 2
    assert len(kernel.calls) == 1


def test_registers_are_not_capped_where_a_thread_would_spill() -> None:
    """What fits one version of the assembler may not fit another."""

    class Spilling(Kernel):
        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            def bind(**arguments: Any) -> Compiled:
                self.bindings.append(arguments)
                return Compiled(self.calls, n_spills=8 if "maxnreg" in arguments else 0)

            return bind

    kernel, x = Spilling(), torch.zeros(64)
    one = Bound(kernel, (3,), CPU, ["x_ptr", "y_ptr"], ["site"], {"rows": 16, "N": 8}, {}, num_warps=2, maxnreg=88)
    for _ in range(2):
        one([x, x], (1,))
    assert [binding.get("maxnreg") for binding in kernel.bindings] == [88, None]
    assert len(kernel.calls) == 1


def test_a_matrix_is_taken_for_one_of_whole_tiles() -> None:
    spec, h128 = KernelSpec(NVFP4()), Rotation(128, bf16=False)

    def taken(spec: KernelSpec, rows: int, columns: int, stride: int | None = None, **more: int) -> tuple[int, int]:
        numbers = {"rows": rows, "columns": columns, "stride_r": columns if stride is None else stride, **more}
        found = launch.flat(spec, numbers, columns)
        assert found["stride_r"] == found["columns"] or found is numbers
        return found["rows"], found["columns"]

    assert taken(spec, 4096, 11008) == (11008, 4096)
    assert taken(KernelSpec(NVFP4(), h128), 4096, 11008) == (11008, 4096)
    assert taken(KernelSpec(NVFP4(outer=128)), 64, 11008) == (172, 4096)
    left: tuple[tuple[KernelSpec, int, int, int | None, dict[str, int]], ...] = (
        (spec, 16384, 4096, None, {}),  # its tiles are whole
        (spec, 4096, 11008, 11016, {}),  # rows do not follow one another
        (spec, 3, 11008, None, {}),  # its elements are no multiple of 4096
        (spec, 4096, 11008, None, {"kept_columns": 11000}),
        (KernelSpec(NVFP4(block=(16, 16))), 4096, 11008, None, {}),
        (KernelSpec(NVFP4(), memory="columns"), 4096, 11008, None, {}),
        (KernelSpec(NVFP4(), scale_layout="swizzled"), 4096, 11008, None, {}),
        (KernelSpec(NVFP4(rounding="stochastic"), located=True), 4096, 11008, None, {}),
        (KernelSpec(NVFP4(), h128), 4096, 11072, None, {}),  # rotations across rows
    )
    for other, rows, columns, stride, more in left:
        assert taken(other, rows, columns, stride, **more) == (rows, columns), other


def test_masks_are_left_out_of_whole_tiles_alone() -> None:
    spec, tile = KernelSpec(NVFP4()), Tile(4, 32)

    def whole(rows: int, columns: int, width: int | None = None, **more: int) -> bool:
        return launch.whole(spec, tile, (rows, width or columns), {"columns": columns, **more})

    assert whole(8, 1024)
    assert whole(8, 1024, kept_columns=1024)
    assert not whole(8, 1024, kept_columns=1000)
    assert not whole(8, 1000, 1024)  # padded for a rotation
    assert not any(whole(rows, columns) for rows, columns in ((6, 1024), (8, 1000), (8, 768), (0, 1024), (8, 0)))


def test_a_site_is_an_int32_of_its_bits() -> None:
    """Of another sign or width it would be another kernel."""
    kernel, x = Kernel(), torch.zeros(64)
    one = bound(kernel)
    for site in (3, 2**31, 2**32 - 1, 2**32 + 3):
        one([x, x, x], (site,))
    assert kernel.bindings[0]["site"] == 3
    assert [call[-2] for call in kernel.calls] == [-(2**31), -1, 3]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_with_a_hook_triton_launches(hook: str) -> None:
    """A profiler's hooks get the metadata that Triton makes for them."""
    kernel, x, chain = Kernel(), torch.zeros(64), getattr(triton.knobs.runtime, hook)
    one = bound(kernel)
    one([x, x, x], (1,))
    chain.add(print)
    try:
        one([x, x, x], (1,))
    finally:
        chain.remove(print)
    one([x, x, x], (1,))
    assert [call[0] for call in kernel.calls] == ["getitem", "run"]
    assert kernel.calls[0][1:] == ((3, 1, 1), x.data_ptr(), x.data_ptr(), 16, 1, 8)


def test_the_device_is_made_current_and_its_stream_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1], raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(Driver, "get_current_stream", lambda self, index: (current[-1], index))
    kernel, x = Kernel(), torch.zeros(64)
    for index in (0, 1):
        one = Bound(kernel, (3,), torch.device("cuda", index), ["x_ptr", "y_ptr"], ["site"], {"rows": 16, "N": 8}, {})
        for _ in range(2):
            one([x, x], (1,))
    assert [call[4] for call in kernel.calls] == [(0, 0), (1, 1)]
    assert current == [0]


def test_another_triton_launches_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "DIRECT", ("3.5.",))
    kernel, x = Kernel(), torch.zeros(64)
    one = bound(kernel)
    for _ in range(2):
        one([x, x, x], (1,))
    assert [call[0] for call in kernel.calls] == ["getitem"]


@pytest.mark.parametrize(
    ("tiles", "resident", "programs"),
    [(8192, 0, 1024), (8192, 924, 924), (22016, 1188, 5 * 1188), (700, 1188, 700), (9, 0, 2), (4 * 8 * 100 + 8 * 51, 100, 500)],
)
def test_programs_share_the_tiles_evenly(tiles: int, resident: int, programs: int) -> None:
    """Rounds of all that a GPU runs at once, so many that a program has about the tile's turns."""
    assert Tiles(tiles, 8 if tiles != 22016 else 4).programs(resident) == programs


def test_the_grid_follows_what_the_compiled_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build._Compiled, "resident", lambda self: 5)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    kernel, x = Kernel(), torch.zeros(64)
    one = Bound(kernel, Tiles(64, 4), torch.device("cuda", 0), ["x_ptr", "y_ptr"], ["site"], {"rows": 16, "N": 8}, {})
    assert one.grid == (16, 1, 1)
    for _ in range(2):
        one([x, x], (1,))
    assert [call[1:4] for call in kernel.calls] == [(15, 1, 1)]


@pytest.mark.parametrize(("status", "resident"), [(0, 7 * 132), (1, 0), (None, 0)])
def test_the_driver_says_how_many_programs_run_at_once(
    monkeypatch: pytest.MonkeyPatch, status: int | None, resident: int
) -> None:
    """status: what the driver returns; None where there is none to ask."""
    asked: list[tuple[Any, ...]] = []

    def occupancy(found: Any, function: Any, threads: int, shared: Any) -> int | None:
        asked.append((function.value, threads, shared.value))
        found._obj.value = 7
        return status

    def library(name: str) -> Any:
        if status is None:
            raise OSError(name)
        return SimpleNamespace(cuOccupancyMaxActiveBlocksPerMultiprocessor=occupancy)

    monkeypatch.setattr(build.ctypes, "CDLL", library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(multi_processor_count=132))
    compiled = Compiled([])
    compiled.function, compiled.metadata = 5, SimpleNamespace(num_warps=4, shared=1024)  # type: ignore[assignment, attr-defined]
    assert build._Compiled(compiled, 0).resident() == resident
    assert asked == ([] if status is None else [(5, 128, 1024)])


def test_the_interpreter_compiles_nothing() -> None:
    class Interpreted(Kernel):
        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda **arguments: self.bindings.append(arguments)

    kernel, x = Interpreted(), torch.zeros(1)
    one = bound(kernel)
    for _ in range(2):
        one([x, x, x], (0,))
    assert len(kernel.bindings) == 2


def test_a_launch_passes_addresses_and_sites_in_the_kernel_s_order(launches: list[tuple[Any, ...]]) -> None:
    """The direct launch passes what Triton's own does, tensors by address."""
    q, seed, one = NVFP4(rounding="stochastic"), torch.tensor([5]), torch.ones(())
    x = torch.zeros(48, 64, dtype=BF16)
    given: dict[str, Any] = {"rotation": Rotation(16, signs="fresh"), "seed": seed, "amax": one}
    first = kernels.quantize(x, q, site=3, signs_site=4, **given)
    second = kernels.quantize(x, q, site=5, signs_site=6, **given)
    assert len(launches) == 2
    for call, site, result in zip(launches, (3, 5), (first, second), strict=True):
        grid, arguments = call[:3], call[9:]
        assert grid == (launches[0][0], 1, 1)
        plain = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in arguments]
        assert {t.data_ptr() for t in (x, seed, one, *result)} <= set(plain)
        assert {48, 64, site, site + 1} <= set(plain)
    assert launches[0][3:6] == launches[1][3:6]
    assert [(r.shape, r.dtype, r.stride()) for r in first] == [(r.shape, r.dtype, r.stride()) for r in second]


def test_kinds_of_operands_have_their_own_plans() -> None:
    """Whatever a kernel depends on: each of these is another plan, and the same again is none."""
    q, seed = NVFP4(rounding="stochastic"), torch.tensor([5])
    base = torch.zeros(64, 64, dtype=BF16)
    operands = [
        base,
        base[:48],
        base[:, :48],  # other columns, and rows that do not lie together
        base.t(),
        base[:1, :],
        base[:1].expand(64, 64),
        base.float(),
        base[::2],
    ]
    for number, x in enumerate(operands):
        for _ in range(2):
            kernels.fake_quantize(x, q, amax=torch.ones(()), seed=seed)
        assert len(launch.PLANS) == number + 1
    changes: list[dict[str, Any]] = [
        {"q": NVFP4()}, {"rotation": Rotation(16)}, {"dtype": torch.float32}, {"scaled": True},
        {"seed": torch.tensor([5, 64, 0])},
    ]  # fmt: skip
    for number, change in enumerate(changes):
        for _ in range(2):
            kernels.fake_quantize(base, **{"q": q, "seed": seed, **change})
        assert len(launch.PLANS) == len(operands) + number + 1


def test_devices_have_their_own_plans() -> None:
    made = []

    def kind(tensors: Any, *about: Any) -> Any:
        made.append(tensors[0].device)
        return torch.Generator()

    for device in ("cpu", "meta", "cpu"):
        planned(kind, "manual_seed", (torch.empty(2, device=device),), (), (1,))
    assert [d.type for d in made] == ["cpu", "meta"]


def test_plans_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of dynamic shapes each is a kind."""
    monkeypatch.setattr(launch, "MOST_PLANS", 4)
    for rows in range(11):
        kernels.amax(torch.zeros(rows + 1, 16, dtype=BF16))
        assert len(launch.PLANS) <= 4


def test_an_unaligned_operand_is_compiled_for(launches: list[tuple[Any, ...]]) -> None:
    memory = torch.zeros(64 * 64 + 1, dtype=BF16)
    for x in (memory[:-1].view(64, 64), memory[1:].view(64, 64), memory[:-1].view(64, 64)):
        kernels.amax(x)
    assert len(launch.PLANS) == 1
    kernels_run = [call[5] for call in launches]  # by their metadata
    assert kernels_run[0] is kernels_run[2]
    assert kernels_run[0] is not kernels_run[1]
    kept = next(iter(launch.PLANS.values()))
    assert len(kept.bound.compiled) == 2


def test_what_lies_elsewhere_is_moved_or_refused() -> None:
    x, meta = torch.zeros(16, 16, dtype=BF16), torch.device("meta")
    plan: Plan = kernels.Run((x,), NVFP4(rounding="stochastic"), None, 1).decoded(BF16, False)
    read = plan.read((x,), torch.ones(1, dtype=torch.float64), torch.tensor([1]), 0)
    assert read[1].dtype == torch.float32
    codes, scales = torch.zeros(16, 8, dtype=torch.uint8), torch.zeros(16, 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="codes on cpu, what decodes them on"):
        requantize.decode(requantize.Packed(codes, scales.to(meta), None, NVFP4(), 16), BF16)


def test_a_mistake_is_one_at_every_call() -> None:
    x = torch.zeros(16, 32, dtype=BF16)
    for _ in range(2):
        kernels.quantize(x, MXFP4())
        with pytest.raises(SpecError, match="pass seed"):
            kernels.quantize(x, NVFP4(rounding="stochastic"))
        with pytest.raises(ValueError, match="flatten it"):
            kernels.quantize(x.view(-1), NVFP4())
        with pytest.raises(TypeError, match=r"x\.float\(\)"):
            kernels.quantize(x.double(), NVFP4())


def test_outputs_are_anew_at_every_call() -> None:
    make = Output("y_ptr", (3,), torch.float32, zero=True).maker(CPU)
    first, second = make(), make()
    assert first.tolist() == [0.0] * 3
    assert first.data_ptr() != second.data_ptr()


def test_autotuning_forgets_the_plans_that_have_their_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(autotune._switch, "on", False)
    kernels.amax(torch.zeros(16, 16))
    assert launch.PLANS
    autotune.switch_on()
    assert not launch.PLANS


@pytest.mark.parametrize(("columns", "units"), [(4096, 128), (11008, 16), (2752, 16), (384, 16), (2048, 128), (160, 16)])
def test_a_tile_is_flatter_where_a_row_would_not_fill_it(columns: int, units: int) -> None:
    """As many elements and warps; 11008 columns are 5.375 tiles of 2048, and 43 of 256."""
    spec, target = KernelSpec(NVFP4(), Rotation(16)), Target("sm_90")
    usual, tile = tile_of(spec, target), fitted(spec, target, columns // 16)
    assert tile.units == units
    assert (tile.rows * tile.units, tile.warps, tile.turns) == (usual.rows * usual.units, usual.warps, usual.turns)


def test_a_tile_is_as_wide_as_a_rotation() -> None:
    spec = KernelSpec(NVFP4(), Rotation(256, bf16=False))
    assert fitted(spec, Target("sm_90"), 16 * 3).units >= spec.rotation_units
    columns = KernelSpec(NVFP4(), memory="columns")
    assert fitted(columns, Target("sm_90"), 3) == tile_of(columns, Target("sm_90"))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2, 0)], ids=str)
def test_an_output_is_a_plain_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made, plain = Output("y_ptr", shape, dtype).maker(CPU)(), torch.empty(shape, dtype=dtype)
    assert (made.shape, made.stride(), made.dtype, made.device) == (plain.shape, plain.stride(), dtype, plain.device)


def test_an_output_lies_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's allocation is the current device's: for another, it is torch's."""
    asked: list[Any] = []
    current = [1]
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", lambda *given: asked.append(given), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    real = torch.empty

    def empty(*given: Any, **named: Any) -> Any:
        return real(*given, **named) if named["device"] == "meta" else "torch's"

    monkeypatch.setattr(torch, "empty", empty)
    make = Output("y_ptr", (4, 6), torch.uint8).maker(torch.device("cuda", 1))
    make()
    assert asked == [((4, 6), (6, 1), torch.uint8)]
    current[0] = 0
    assert str(make()) == "torch's"
    assert len(asked) == 1
