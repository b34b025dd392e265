"""The matmul rows of ``fp4 kernels``: listed for what a recipe needs, without compiling them."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import fp4
from fp4.cli import app
from fp4.kernels.target import Target
from fp4.matmul_table import emulated, matmul_specs, matmuls

B200 = Target("sm_100a")


def test_a_recipe_needs_the_matmuls_of_its_formats() -> None:
    specs = matmul_specs(["nvfp4"], B200)
    assert {(s.a, s.b, s.alphas) for s in specs} == {("nvfp4", "nvfp4", 2)}
    assert [s.bias for s in specs] == [None, "bf16"]
    assert {s.a for s in matmul_specs(["mxfp8"], B200)} == {"mxfp8_e4m3"}
    names = [c.name for c in matmuls(fp4.recipes(), B200)]
    assert len(names) == len(set(names))
    assert any("partial sums" in n for n in names)


def test_shapes_choose_tiles_and_split_a_long_contraction() -> None:
    big, small = ([c.name for c in matmuls(["nvfp4"], B200, [shape])] for shape in ((16384, 4096, 4096), (512, 512, 65536)))
    assert len(big) == 2
    assert all("128x256x256" in n and "partial" not in n for n in big)
    assert all("partial sums" in n for n in small)


def test_what_no_tensor_core_has_is_named() -> None:
    assert matmuls(["fp8"], B200) == []
    assert all("FP32 block scales" in line for line in emulated(["fp8"], B200))
    assert len(emulated(["tetrajet2"], B200)) == 3
    assert emulated(["nvfp4"], B200) == []
    assert emulated(["nvfp4"], Target("sm_90")) == []
    assert "Triton 3.7" in emulated(["nvfp4"], Target("sm_121a"))[0]


@pytest.mark.parametrize("shapes", ["16384x4096", "axbxc", "0x16x16"])
def test_shapes_that_are_none(shapes: str) -> None:
    done = CliRunner().invoke(app, ["kernels", "--shapes", shapes])
    assert (done.exit_code, "write M x N x K" in done.output) == (2, True)
