"""Blackwell's own conversions against their oracles, on a GPU that has them.

    python -m benchmarks.blackwell_rounding RESULT.json

First, which bits of its random word ``cvt.rs.satfinite.e2m1x4.f32`` uses for which of its four values, in which order, found
by words of a single bit: what runtime/native.py takes from the PTX ISA's text. Then kernels against ``reference.quantize``:
nearest rounding, and (sm_100, sm_103) the instruction's own draws. Under TRITON_INTERPRET=1 the same, less of it, on the model
of an sm_100a.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from fp4.kernels import quantize as kernels
from fp4.kernels.build import build
from fp4.kernels.helpers import HELPERS, used
from fp4.kernels.launch import PLANS
from fp4.kernels.target import INTERPRETER, Target, target_of
from fp4.runtime.native import BYTE_SHIFTS
from fp4.runtime.spec import MXFP4, NVFP4
from fp4.train.results import machine, versions
from tests.kernels.equality import differences
from tests.runtime.cases import DATA

NEAREST = (NVFP4(), NVFP4(block=(16, 16)), NVFP4(four_six=True), MXFP4(), MXFP4(scale_rule="quest"))
DRAWN = (NVFP4(rounding="stochastic"), MXFP4(rounding="stochastic", scale_rule="ceil"))
PROBE = """

@triton.jit
def kernel(x_ptr, word_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x, word = tl.load(x_ptr + i), tl.load(word_ptr + i).to(tl.uint32, bitcast=True)
    tl.store(y_ptr + i, e2m1x8_drawn(x, x, x, x, x, x, x, x, word, word))
"""


def convert(x: torch.Tensor, words: torch.Tensor, target: Target) -> torch.Tensor:
    """Codes of x (N,), N a power of two, in each of the four places: (N, 4), rounded by words (N,) int32."""
    helper = "model_e2m1x8_drawn" if target.models else "e2m1x8_drawn"
    functions = "\n\n\n".join(HELPERS[name] for name in used([helper]))
    y = torch.empty_like(words)
    build(f"import triton\nimport triton.language as tl\n\n\n{functions}\n{PROBE}")[(1,)](x, words, y, N=len(x))
    return torch.stack([(y >> (4 * place)) & 15 for place in range(4)], 1)


def places(target: Target, device: torch.device, low: float, high: float) -> list[list[int]]:
    """Of each of the four places: the bits of the word that it uses, most significant first."""
    words = (torch.ones(32, dtype=torch.int64) << torch.arange(32)).to(torch.int32).to(device)
    up = []
    for m in range(8):  # up where the random byte is at least 2^m
        x = torch.full((32,), low + (high - low) * (1 - 2.0**m / 256), device=device)
        still = convert(x, torch.zeros_like(words), target)
        up.append(convert(x, words, target) != still)
    found = []
    for place in range(4):
        weights = torch.stack([u[:, place] for u in up]).sum(0).tolist()  # bit 7 of a byte is up for all eight
        found.append([bit for _, bit in sorted((-w, bit) for bit, w in enumerate(weights) if w)])
    return found


def special(target: Target, device: torch.device) -> dict[str, list[int]]:
    """Codes of values that no random bits may change."""
    values = {"7": 7.0, "-inf": -torch.inf, "nan": torch.nan, "-0": -0.0, "3": 3.0, "-6": -6.0}
    words = torch.tensor([0, -1], dtype=torch.int32, device=device)
    return {name: convert(torch.full((2,), v, device=device), words, target).unique().tolist() for name, v in values.items()}


def run() -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = target_of(device)
    if target.name == INTERPRETER:
        target = Target(INTERPRETER, models="sm_100a")
        kernels.target_of = lambda device: target  # type: ignore[assignment]
        PLANS.clear()
    if not target.rounds_e2m1:
        raise SystemExit(f"{target.name} has no conversion to E2M1; run this on an sm_100, 103, 120 or 121")
    figures: dict[str, Any] = {"target": target.models or target.name, "modelled": bool(target.models)}
    if target.draws_e2m1:
        figures["expected"] = [[shift + 7 - i for i in range(8)] for shift in BYTE_SHIFTS]
        for name, low, high in (("normal", 1.0, 1.5), ("subnormal", 0.0, 0.5)):
            figures[f"bits, {name}"] = found = places(target, device, low, high)
            figures[f"as the model says, {name}"] = found == figures["expected"]
        figures["special"] = special(target, device)
    unequal, compared, seed = [], 0, torch.tensor([5], device=device)
    for drawn, quantizers in ((False, NEAREST), (True, DRAWN if target.draws_e2m1 else ())):
        for q in quantizers:
            for data, make in DATA.items() if not target.models else [("zero_parts", DATA["zero_parts"])]:
                compared += 1
                if found := differences(
                    make().to(device),
                    q,
                    None,
                    seed,
                    3,
                    oracle=torch.device("cpu"),
                    brief=bool(target.models),
                    native_draws=drawn,
                ):
                    unequal.append([str(q), data, drawn, found])
    return {**figures, "compared": compared, "unequal": unequal}


if __name__ == "__main__":
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = json.dumps({"machine": machine(where), "versions": versions(), **run()}, indent=1)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n")
