"""The ops' functions for a GPU, here under the interpreter, equal the ops elsewhere: no argument is passed on wrongly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp4.kernels import ops
from fp4.kernels.direct import direct
from tests.runtime.cases import gaussian

SEED = torch.tensor([5])
DRAWN, ROTATED, SIGNS = "nvfp4[rounding=stochastic]", "hadamard[signs=fixed]", "hadamard[size=32,signs=fresh,bf16=no]"
SITES = (3, 7, False)  # of the rounding, of the signs; native_draws
BF16 = torch.bfloat16
QUEST = "mxfp4[scale_rule=quest]"


def packed(transposed: bool) -> tuple[Any, ...]:
    codes, scales, factor = torch.ops.fp4.rotate_quantize(gaussian(64, 48), None, "nvfp4", "", None, 0, 0, False)
    return codes, scales, factor, "nvfp4", 48, BF16, *([transposed] if transposed else [])


def arguments() -> dict[str, tuple[Any, ...]]:
    x = gaussian(32, 64)
    transposed = packed(True)
    mask = torch.ops.fp4.quantize_masked(x, None, QUEST, SIGNS, SEED, *SITES)[3]
    return {
        "rotate_quantize": (x, None, DRAWN, ROTATED, SEED, *SITES, True),
        "fake_quantize": (x, torch.tensor(4.0), DRAWN, SIGNS, SEED, *SITES, BF16),
        "fake_quantize, factor": (x, None, DRAWN, "", SEED, *SITES, BF16, torch.tensor(0.3)),
        "rotated_amax": (x.t(), SIGNS, SEED, 7),
        "decode": packed(False),
        "requantize": (*transposed, None, DRAWN, SIGNS, SEED, *SITES),
        "fake_requantize": (*transposed, None, "nvfp4[outer=128]", ROTATED, SEED, *SITES, torch.float32),
        "quantize_masked": (x, None, QUEST, SIGNS, SEED, *SITES),
        "unrotate_masked": (gaussian(32, 64).float(), mask, SIGNS, SEED, 7, 60, BF16),
    }


CASES = [*ops.KERNELS, "fake_quantize, factor"]


@pytest.mark.parametrize("case", CASES)
def test_a_gpu_s_function_is_the_op(case: str) -> None:
    name, given = case.partition(",")[0], arguments()[case]
    same(ops.KERNELS[name](*given), getattr(torch.ops.fp4, name)(*given))


@pytest.mark.parametrize("case", CASES)
def test_a_direct_call_is_the_op_at_every_call(case: str) -> None:
    """Its plan is the first call's; tensors of other values, elsewhere in memory, and other draws follow."""
    name, given = case.partition(",")[0], arguments()[case]
    called, seed = direct(name), next((i for i, g in enumerate(given) if g is SEED), None)
    for _ in range(3):
        same(called(*given), getattr(torch.ops.fp4, name)(*given))
        given = tuple(
            g.flip(0).contiguous() if isinstance(g, torch.Tensor) and g.dim() == 2 and g.is_contiguous() else g for g in given
        )
        if seed is not None:
            given = (*given[:seed], given[seed] + 1, *given[seed + 1 :])


def same(found: Any, wanted: Any) -> None:
    found, wanted = ([r] if isinstance(r, torch.Tensor) else list(r) for r in (found, wanted))
    assert [(f.shape, f.dtype) for f in found] == [(w.shape, w.dtype) for w in wanted]
    for f, w in zip(found, wanted, strict=True):
        assert torch.equal(f.reshape(-1).view(torch.uint8), w.contiguous().reshape(-1).view(torch.uint8))
