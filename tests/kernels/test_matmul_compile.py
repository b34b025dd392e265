"""Matmul kernels compiled here, with no GPU, for every target with block-scaled tensor cores; and ones that must not pass."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from fp4.kernels.inspection import Compiled
from fp4.kernels.matmul_compile import compile_matmul, faults
from fp4.kernels.matmul_spec import Instruction, MatmulSpec, MatmulTile, instruction, no_instruction, tiles
from fp4.kernels.target import Target
from fp4.runtime.spec import FP8, MXFP4, MXFP8, NVFP4, Quantizer, SpecError

TARGETS = [Target("sm_100a"), Target("sm_103a"), Target("sm_120a")]
B200 = TARGETS[0]
NVFP4_SPEC, MXFP4_SPEC = MatmulSpec("nvfp4", "nvfp4"), MatmulSpec("mxfp4", "mxfp4")
WGRAD = MatmulSpec("nvfp4", "nvfp4", output="fp32", accumulate=True)
PAIRS = [("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("mxfp8_e4m3", "mxfp8_e4m3"), ("mxfp8_e4m3", "mxfp8_e5m2")]
MIXED = [("mxfp8_e5m2", "mxfp8_e4m3"), ("mxfp8_e4m3", "mxfp4"), ("mxfp4", "mxfp8_e4m3")]

compiled = cache(compile_matmul)


def check(spec: MatmulSpec, target: Target, tile: MatmulTile) -> None:
    assert faults(compiled(spec, target, tile), spec, target, tile) == []


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("spec", [NVFP4_SPEC, MXFP4_SPEC, WGRAD], ids=str)
def test_the_usual_tile(spec: MatmulSpec, target: Target) -> None:
    check(spec, target, tiles(spec, target)[0])


def test_mixed_operands() -> None:
    spec = MatmulSpec("mxfp8_e4m3", "mxfp4")
    check(spec, B200, tiles(spec, B200)[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "target"),
    [(p, t) for t in TARGETS for p in (PAIRS[:2] if t.name == "sm_103a" else PAIRS + MIXED)],
    ids=lambda x: x.name if isinstance(x, Target) else " x ".join(x),
)
def test_every_tile(pair: tuple[str, str], target: Target) -> None:
    """Of NVFP4 and MXFP4, also where a product is summed in parts; the first and the last of other pairs."""
    spec = MatmulSpec(*pair, bias="bf16")
    if isinstance(instruction(*pair, target), Instruction):
        for kind in (spec, spec.parts) if pair in PAIRS[:2] else (spec,):
            found = tiles(kind, target)
            for tile in found if pair in PAIRS[:2] else {found[0], found[-1]}:
                check(kind, target, tile)
    else:
        assert pair in MIXED[1:]


# Kernels that must not pass.


def found(spec: MatmulSpec, tile: MatmulTile, target: Target = B200) -> str:
    return "; ".join(faults(compiled(spec, target, tile), spec, target, tile))


def test_a_kernel_that_is_empty() -> None:
    """Two accumulators of 256 columns leave no tensor memory for the scales: Triton 3.7 makes a kernel of nothing of it."""
    text = found(NVFP4_SPEC, MatmulTile(256, 256, 256, 3, 8))
    assert "it has no MMA" in text
    assert "it stores nothing" in text
    assert "columns of tensor memory; there are 512" in text


def test_a_kernel_that_lost_its_mma() -> None:
    """Compiled for Hopper the same source is decoded and multiplied in BF16."""
    tile = tiles(MXFP4_SPEC, Target("sm_90"))[0]
    text = "; ".join(faults(compiled(MXFP4_SPEC, Target("sm_90"), tile), MXFP4_SPEC, B200, tile))
    assert "in the SASS; it multiplies by HGMMA" in text


def test_a_kernel_with_another_block_size() -> None:
    tile = tiles(MXFP4_SPEC, B200)[3]
    text = "; ".join(faults(compiled(MXFP4_SPEC, B200, tile), NVFP4_SPEC, B200, tile))
    assert "no UTCOMMA" in text


def test_a_kernel_that_spills() -> None:
    assert "local loads and stores" in found(WGRAD, MatmulTile(128, 256, 256, 3, 4, piece=256))


def test_a_kernel_beyond_shared_memory() -> None:
    assert "sm_100a has 232448" in found(NVFP4_SPEC, MatmulTile(128, 256, 256, 6, piece=32))


def test_a_kernel_with_a_wrong_count() -> None:
    tile = tiles(MXFP4_SPEC, B200)[3]
    kernel = compiled(MXFP4_SPEC, B200, tile)
    name = next(n for n in kernel.instructions if n.startswith("UTCOMMA"))
    for count in (kernel.instructions[name] - 1, 0):
        fewer: Compiled = replace(kernel, instructions=kernel.instructions | {name: count})
        assert "in the SASS" in "; ".join(faults(fewer, MXFP4_SPEC, B200, tile))
    assert "needs 6" in "; ".join(faults(kernel, MXFP4_SPEC, B200, replace(tile, k=384)))


def test_a_kernel_whose_warps_are_not_specialized() -> None:
    tile = tiles(MXFP4_SPEC, B200)[3]
    assert "its warps are not specialized" in faults(
        compiled(MXFP4_SPEC, B200, tile), MXFP4_SPEC, B200, replace(tile, specialized=True)
    )


@pytest.mark.parametrize(
    ("a", "b", "target", "reason"),
    [
        (FP8(), FP8(), "sm_100a", "FP32 block scales"),
        (NVFP4(outer=128), NVFP4(), "sm_100a", "every 128 contracted columns"),
        (NVFP4(block=(1, 32)), NVFP4(), "sm_100a", "E4M3 scales of 16 columns"),
        (NVFP4(scale="e5m2"), NVFP4(), "sm_100a", "E4M3 scales of 16 columns"),
        (NVFP4(), None, "sm_100a", "high precision"),
        (NVFP4(), MXFP4(), "sm_100a", "one kind of block scale"),
        (MXFP8(), MXFP4(), "sm_120a", "in BF16"),
        (NVFP4(), NVFP4(), "sm_90", "no block-scaled tensor cores"),
        (NVFP4(), NVFP4(), "sm_121a", "Triton 3.7"),
        (NVFP4(block=(16, 16)), NVFP4(rounding="ms_eden"), "sm_103a", ""),
        (MXFP8(format="e5m2"), MXFP4(scale_rule="quest"), "sm_100a", ""),
    ],
    ids=str,
)
def test_why_a_gemm_has_no_instruction(a: Quantizer, b: Quantizer | None, target: str, reason: str) -> None:
    got = no_instruction(a, b, Target(target))
    assert reason in got
    assert bool(got) == bool(reason)


def test_specifications_that_cannot_be() -> None:
    for given, text in (
        ({"a": "nvfp4", "b": "mxfp4"}, "one kind of block scale"),
        ({"a": "fp8", "b": "fp8"}, "matmul operand 'fp8'"),
        ({"a": "mxfp4", "b": "mxfp4", "accumulate": True}, "output='fp32'"),
        ({"a": "mxfp4", "b": "mxfp4", "alphas": 3}, "alphas=3"),
        ({"a": "mxfp4", "b": "mxfp4", "output": "fp32", "partial": True}, "no epilogue"),
        ({"a": "mxfp4", "b": "mxfp4", "bias": "e4m3"}, "bias='e4m3'"),
    ):
        with pytest.raises(SpecError, match=text):
            MatmulSpec(**given)
