"""``fp4 roofline``: a prediction whose inputs count, and which agrees with what was measured on an H200."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fp4
from benchmarks.roofline_check import check, decoder, site
from fp4.cli import app
from fp4.kernels.fp8 import fp8_spec
from fp4.kernels.target import Target
from fp4.kernels.tiles import tile_of
from fp4.roofline import AMAX_SHARES, GPUS, SHARES, Prediction, RooflineError, gpu, linears, predict
from fp4.runtime.spec import MXFP4

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
STEP = RESULTS / "gpu_step_h200.json"
SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 8))
batch = torch.zeros(4, 6, 64)
"""


def one(n: int, k: int, inputs: str = "b200", recipe: str = "nvfp4", exact: bool = True, **changes: float) -> Prediction:
    policy = fp4.recipe(recipe) if recipe == "bf16" else fp4.recipe(recipe, keep_heads=False, high_precision_tail=0.0)
    return predict([site("linear", n, k)], gpu(inputs).changed(**changes), recipe, policy, exact)


def test_the_kernels_speeds_are_those_of_the_committed_run() -> None:
    measured = json.loads((RESULTS / "gpu_kernels_h200.json").read_text())["speed"]["(16384, 4096)"]
    dims = ("", ", along dim 0")
    names = {k: [f"{k} {output}{dim}" for dim in dims for output in ("decoded", "packed")] for k in SHARES}
    names |= {k: [f"{k}{dim}" for dim in dims] for k in AMAX_SHARES}
    for kernel, shares in (SHARES | AMAX_SHARES).items():
        assert shares == pytest.approx([measured[n]["usual"]["of copy"] for n in names[kernel]], abs=0.0051), kernel


def test_a_plain_product_is_its_operations_over_the_peak() -> None:
    found = one(8192, 8192, recipe="bf16", bf16_efficiency=0.5, kernel_us=0)
    operations = 3 * 2 * 16384 * 8192 * 8192
    tiles = [128 * 32, 128 * 32, 64 * 32]
    full = sum(-(-t // 148) * 148 / t for t in tiles) / 3  # the last wave is not full
    assert found.total("bf16") == pytest.approx(operations / (2250e12 * 0.5) * full)
    assert found.total("fp4") == found.total("bf16")


def test_large_linears_gain_and_small_ones_lose() -> None:
    large, small = one(16384, 16384), one(512, 512)
    assert large.linears[0].gains
    assert not small.linears[0].gains
    assert large.total("fp4") < large.total("fp8") < large.total("bf16")


def test_every_input_matters() -> None:
    base = one(8192, 8192)
    for name, factor in (("bandwidth", 2), ("fp4", 2), ("fp4_efficiency", 1.5), ("quantize", 2), ("copy_efficiency", 1.1)):
        assert one(8192, 8192, **{name: getattr(base.inputs, name) * factor}).total("fp4") < base.total("fp4"), name
    assert one(8192, 8192, kernel_us=50).total("fp4") > base.total("fp4")
    assert one(8192, 8192, fp8=9000).total("fp8") < base.total("fp8")
    slow, quick = one(8192, 8192, rest=0.5), one(8192, 8192, rest=0.0)
    assert quick.step("bf16") / quick.step("fp4") > slow.step("bf16") / slow.step("fp4") > 1
    assert "bandwidth" not in gpu("b200").changed(bandwidth=7.0).assumed


def test_what_a_gpu_does_not_have_is_emulated_and_gains_nothing() -> None:
    for name, recipe in (("h200", "nvfp4"), ("b200", "fp8"), ("b200", "tetrajet2")):
        found = one(8192, 8192, name, recipe)
        assert all(how.startswith("emulated") for how in found.linears[0].how.values())
        assert not found.linears[0].gains
        in_fp32 = ["in FP32, slower than predicted" in how for how in found.linears[0].how.values()]
        assert in_fp32 == 3 * [recipe != "nvfp4"]


def test_mxfp4_in_fp8_where_there_is_no_fp4() -> None:
    exact, fp8 = (one(8192, 8192, "h200", "mxfp4_h16", e) for e in (True, False))
    assert fp8.linears[0].gains
    assert not exact.linears[0].gains
    assert set(fp8.linears[0].how.values()) == {"MXFP4 in FP8"}
    assert fp8.to_dict()["exact"] is False
    slower = one(8192, 8192, "h200", "mxfp4_h16", False, fp8_operand=0.4).total("fp4")
    moved = 6 * (0.5 + 1 / 32 + 1.0)  # two operands a GEMM, dY's and X's of 16384 x 8192, W's of half that
    per_byte = (5 / 6) * 16384 * 8192 / (4.8e12 * 0.87)
    assert slower - fp8.total("fp4") == pytest.approx(moved * per_byte * (1 / 0.4 - 1 / gpu("h200").fp8_operand), rel=1e-6)
    assert one(8192, 8192, "h200", "mxfp4_h16", False, fp8=4000).total("fp4") < fp8.total("fp4")
    # No other operand is exact in FP8, and no Blackwell needs it.
    for gpu_name, recipe in (("h200", "nvfp4"), ("h200", "mxfp8"), ("b200", "mxfp4_h16")):
        assert one(8192, 8192, gpu_name, recipe, False) == dataclasses.replace(one(8192, 8192, gpu_name, recipe), exact=False)


def test_fp8_in_blocks_where_there_is_no_fp4() -> None:
    found = one(8192, 8192, "h200", "fp8", False)
    assert set(found.linears[0].how.values()) == {"FP8"}
    assert found.linears[0].gains
    assert found.total("fp4") < one(8192, 8192, "h200", "fp8").total("fp4")
    assert one(8192, 8192, "h200", "fp8", False, fp8=4000).total("fp4") < found.total("fp4")
    # The scales of the four operands in 1x128 are transposed: four kernels more than MXFP8's six and three products.
    fixed = found.total("fp4") - one(8192, 8192, "h200", "fp8", False, kernel_us=0).total("fp4")
    assert fixed == pytest.approx((6 + 4 + 3) * 3e-6)
    # cuBLAS has block scales of E4M3 alone, and a Blackwell does as with exact=True.
    sites = [site("linear", 8192, 8192)]
    policy = fp4.recipe("fp8", gradient_format="e5m2", keep_heads=False, high_precision_tail=0.0)
    how = predict(sites, gpu("h200"), "fp8", policy, False).linears[0].how
    assert how["fprop"] == "FP8"
    assert how["dgrad"].startswith("emulated")
    assert one(8192, 8192, "b200", "fp8", False) == dataclasses.replace(one(8192, 8192, "b200", "fp8"), exact=False)


def test_kept_linears_are_bf16() -> None:
    sites = decoder()
    found = predict(sites, gpu("b200"))
    kept = {x.name for x in found.linears if set(x.how.values()) == {"BF16"}}
    assert {"lm_head", "blocks.15.down"} <= kept
    assert not {"blocks.0.q", "blocks.3.down"} & kept


def test_predictions_of_what_was_measured_on_an_h200() -> None:
    """Within 15 %, the exact MXFP4 step the farthest off."""
    found = [f for f in check(json.loads(STEP.read_text())) if "ratio" in f]
    assert len(found) >= 20
    for case in found:
        assert 0.87 < case["ratio"] < 1.15, case


def test_the_fp8_operand_s_speed_is_measured() -> None:
    speed = json.loads((RESULTS / "gpu_fp8_h200.json").read_text())["speed"]
    tile = tile_of(fp8_spec(MXFP4(), "e4m3"), Target("sm_90"))
    name = str((tile.rows, tile.units, tile.warps, tile.turns))
    shares = [
        row["share of copy, by tile, the usual first"][name]
        for row in speed
        if row.get("size") == [16384, 4096] and row.get("format") == "torch.float8_e4m3fn"
    ]
    assert shares == [pytest.approx(gpu("h200").fp8_operand, abs=0.005)]


def test_linears_of_a_model_are_found_without_running_it() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.out = nn.Linear(64, 128), nn.Linear(128, 64)
            self.out.weight.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.wide(self.out(self.wide(x)).relu()))

    found = linears(Shared(), torch.zeros(3, 5, 64))
    assert [(s.name, s.m, s.n, s.k, len(s.roles)) for s in found] == [("wide", 15, 128, 64, 3), ("out", 15, 64, 128, 2)] * 2


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["roofline", *map(str, arguments)])


def test_the_command_on_a_script(tmp_path: Path) -> None:
    script = tmp_path / "m.py"
    script.write_text(SCRIPT)
    done = run(script, "--set", "bandwidth=7.7", "--plot", tmp_path / "p.png")
    assert done.exit_code == 0, done.output
    assert "predicted, not measured" in done.output
    assert "bandwidth=7.7" in done.output
    assert "(assumed)" in done.output
    assert (tmp_path / "p.png").stat().st_size > 1000
    assert json.loads(run(script, "--json", "--gpu", "h200", "--no-exact").stdout)["exact"] is False
    found = json.loads(run(script, "--json", "--gpu", "h200").stdout)
    assert found["prediction"] is True
    assert [(x["m"], x["n"], x["k"]) for x in found["linears"]] == [(24, 32, 64), (24, 8, 32)]


def test_the_command_on_a_configuration(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_key_value_heads": 2, **sizes}))
    done = run(tmp_path, "--json", "--batch", 2, "--seq", 16)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert len(found["linears"]) == 15
    assert {x["m"] for x in found["linears"]} == {32}


def test_what_cannot_be(tmp_path: Path) -> None:
    script = tmp_path / "m.py"
    script.write_text(SCRIPT)
    (tmp_path / "none.py").write_text("import torch\nmodel, batch = torch.nn.ReLU(), torch.zeros(2)\n")
    for arguments, text in (
        ((script, "--gpu", "b100"), "write one of h200, b200"),
        ((script, "--set", "speed=3"), "no input 'speed'"),
        ((script, "--set", "bandwidth"), "write NAME=VALUE"),
        ((script, "--set", "bandwidth=-1"), "not negative"),
        ((script, "--set", "rest=1"), "share from 0 to under 1"),
        ((script, "--recipe", "nosuch"), "nosuch"),
        ((tmp_path / "none.py",), "no nn.Linear was called"),
        ((tmp_path / "nowhere",), "no config.json"),
    ):
        done = run(*arguments)
        assert done.exit_code == 2, done.output
        assert text in done.output
    with pytest.raises(RooflineError, match="b300"):
        gpu("b100")
    assert set(GPUS) == {"h200", "b200", "b300", "rtx5090"}
