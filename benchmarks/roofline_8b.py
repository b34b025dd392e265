"""What `fp4 roofline` predicts for the linears of Llama 3 8B, 16384 tokens a step, on Blackwell GPUs, and on an
H200 with MXFP4 multiplied in FP8 (exact=False). Nothing is measured.

``python -m benchmarks.roofline_8b`` writes results/roofline_8b.json and docs/plots/roofline.png (B200, nvfp4).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common import write
from benchmarks.roofline_check import site
from fp4.compiler.policy import LinearSite
from fp4.roofline import gpu, predict
from fp4.roofline_cli import draw, groups

LAYERS, HIDDEN, KV, MLP, VOCABULARY = 32, 4096, 1024, 14336, 128256
PLOT = Path(__file__).parents[1] / "docs" / "plots" / "roofline.png"


def llama() -> list[LinearSite]:
    attention = [("q_proj", HIDDEN, HIDDEN), ("k_proj", KV, HIDDEN), ("v_proj", KV, HIDDEN), ("o_proj", HIDDEN, HIDDEN)]
    mlp = [("gate_proj", MLP, HIDDEN), ("up_proj", MLP, HIDDEN), ("down_proj", HIDDEN, MLP)]
    block = [(f"self_attn.{name}", n, k) for name, n, k in attention] + [(f"mlp.{name}", n, k) for name, n, k in mlp]
    found = [(f"layers.{i}.{name}", n, k) for i in range(LAYERS) for name, n, k in block] + [("lm_head", VOCABULARY, HIDDEN)]
    return [site(name, n, k, i, len(found)) for i, (name, n, k) in enumerate(found)]


def gains(found: Any) -> dict[str, float]:
    """How many times as fast as in BF16 each kind of linear that the recipe quantizes is."""
    kinds = groups(found).items()
    return {f"{key[0]} {key[2]}x{key[3]}": x[0].bf16 / x[0].fp4 for key, x in kinds if set(x[0].how.values()) != {"BF16"}}


def main() -> None:
    sites, rows = llama(), []
    cases = [(name, recipe, True) for name in ("b200", "b300", "rtx5090") for recipe in ("nvfp4", "quartet2", "mxfp4_h16")]
    cases += [("h200", "mxfp4_h16", exact) for exact in (True, False)]
    for name, recipe, exact in cases:
        found = predict(sites, gpu(name), recipe, exact=exact)
        free = predict(sites, gpu(name).changed(quantize=1e9, fp8_operand=1e9), recipe, exact=exact)
        plain = found.step("bf16")
        rows.append(
            {
                "gpu": name,
                "recipe": recipe,
                "exact": exact,
                "inputs": found.to_dict()["inputs"],
                "step_ms": {p: 1e3 * found.step(p) for p in ("bf16", "fp8", "fp4")},
                "step_gain": {p: plain / found.step(p) for p in ("fp8", "fp4")},
                "step_gain_if_quantizing_were_free": plain / free.step("fp4"),
                "linear_gain": gains(found),
            }
        )
    draw(predict(sites, gpu("b200"), "nvfp4"), str(PLOT))
    write("roofline_8b", {"prediction": True, "tokens": 16384, "predicted": rows})


if __name__ == "__main__":
    main()
