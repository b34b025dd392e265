"""The choice of a tile: measured once, kept, read back, and never other than the usual one unless asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fp4.kernels import autotune
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.target import Target
from fp4.kernels.tiles import Tile, tile_of
from fp4.runtime.spec import FP8, NVFP4, Rotation
from tests.graphs import MLP, rewritten

SPEC, TARGET = KernelSpec(NVFP4()), Target("sm_90")


class Clock:
    """A timer that says what it is told, and how often it was asked."""

    def __init__(self, best: Tile | None = None, broken: bool = False) -> None:
        self.best, self.broken, self.asked = best, broken, list[Tile]()

    def __call__(self, tile: Tile) -> float:
        self.asked.append(tile)
        if self.broken:
            raise RuntimeError("out of resource: shared memory")
        return 1.0 if tile == self.best else 2.0


@pytest.fixture(autouse=True)
def _empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP4_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(autotune._switch, "on", False)
    autotune.forget()


def choose(clock: Clock, *, gpu: str = "H200", rows: int = 1000, width: int = 4096, spec: KernelSpec = SPEC) -> Tile:
    return autotune.fastest(spec, TARGET, gpu, rows, width, clock)


def test_the_fastest_is_measured_once_and_kept() -> None:
    best = autotune.candidates(SPEC, TARGET)[-1]
    assert best != tile_of(SPEC, TARGET)
    first, again, later = Clock(best), Clock(), Clock()
    assert choose(first) == best
    assert first.asked == autotune.candidates(SPEC, TARGET)
    assert choose(again, rows=513) == best  # the same class, from memory
    autotune.forget()
    assert choose(later) == best  # from disk
    assert again.asked == later.asked == []


@pytest.mark.parametrize(
    "other", [{"gpu": "A100"}, {"rows": 1025}, {"width": 100}, {"spec": KernelSpec(NVFP4(), input="fp32")}]
)
def test_another_gpu_shape_class_or_kernel_is_measured_anew(other: dict) -> None:
    choose(Clock())
    clock = Clock()
    choose(clock, **other)
    assert clock.asked


def test_another_triton_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    choose(Clock())
    autotune.forget()
    monkeypatch.setattr(triton, "__version__", "0.0")
    clock = Clock()
    choose(clock)
    assert clock.asked


@pytest.mark.parametrize("text", ["", "{", '{"tile": {"rows": 1}}', '{"key": 0, "tile": {"rows": 8, "units": 32, "warps": 4}}'])
def test_a_broken_file_is_written_anew(text: str, tmp_path: Path) -> None:
    choose(Clock())
    (file,) = (tmp_path / "tiles").iterdir()
    file.write_text(text)
    autotune.forget()
    best = autotune.candidates(SPEC, TARGET)[1]
    assert choose(Clock(best)) == best
    assert Tile(**json.loads(file.read_text())["tile"]) == best


def test_equal_times_and_failing_tiles_leave_the_usual_one() -> None:
    assert choose(Clock()) == tile_of(SPEC, TARGET)
    assert choose(Clock(broken=True), rows=1) == tile_of(SPEC, TARGET)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FP4_CACHE_DIR", str(tmp_path / "file"))
    clock = Clock()
    assert choose(clock) == choose(clock) == tile_of(SPEC, TARGET)
    assert len(clock.asked) == len(autotune.candidates(SPEC, TARGET))


@pytest.mark.parametrize(
    "spec",
    [SPEC, KernelSpec(FP8(block=(128, 128))), KernelSpec(NVFP4(), Rotation(256)), KernelSpec(NVFP4(), memory="columns")],
    ids=str,
)
def test_candidates_hold_whole_blocks(spec: KernelSpec) -> None:
    found = autotune.candidates(spec, TARGET)
    assert found[0] == tile_of(spec, TARGET)
    assert len(found) > 1
    rows, units = spec.least_tile
    assert all(tile.rows >= rows and tile.units >= units for tile in found)


def test_it_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FP4_AUTOTUNE", raising=False)
    assert not autotune.enabled()
    rewritten(MLP(), torch.randn(32, 64), autotune=False)
    assert not autotune.enabled()
    rewritten(MLP(), torch.randn(32, 64), autotune=True)
    assert autotune.enabled()
    monkeypatch.setitem(autotune._switch, "on", False)
    for value, on in (("0", False), ("", False), ("1", True)):
        monkeypatch.setenv("FP4_AUTOTUNE", value)
        assert autotune.enabled() == on
