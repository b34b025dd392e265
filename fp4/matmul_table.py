"""Which block-scaled matmuls a recipe needs on a target, and which of its GEMMs are emulated there: rows of ``fp4 kernels``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from fp4.compiler.policy import GemmPrecision
from fp4.kernels import matmul_compile
from fp4.kernels.inspection import Candidate
from fp4.kernels.matmul import usual
from fp4.kernels.matmul_spec import MatmulSpec, MatmulTile, format_of, no_instruction, tiles
from fp4.kernels.target import BLACKWELL, Target
from fp4.passes.recipes import describe

# Of the largest GPU of each: B200, B300, RTX 5090 (NVIDIA's architecture papers).
MULTIPROCESSORS = {100: 148, 103: 160, 120: 170}

Shape = tuple[int, int, int]


def products(recipes: Iterable[str]) -> Iterator[tuple[str, GemmPrecision]]:
    """Role and precision of every GEMM of the recipes that has a quantized operand, phases included."""
    for name in recipes:
        policy = describe(name).policy
        for precision in (policy.precision, *(phase.precision for _, phase in policy.phases)):
            for role, gemm in precision.gemms().items():
                if gemm is not None and gemm.quantized:
                    yield str(role), gemm


def matmul_specs(recipes: Iterable[str], target: Target) -> list[MatmulSpec]:
    """Every block-scaled matmul that the recipes' GEMMs need, each once: fprop with and without a bias, results in BF16."""
    found: dict[MatmulSpec, None] = {}
    for role, gemm in products(recipes):
        a, b = gemm.first.quantizer, gemm.second.quantizer
        if a is None or b is None or no_instruction(a, b, target):
            continue
        spec = MatmulSpec(str(format_of(a)), str(format_of(b)), alphas=a.has_tensor_scale + b.has_tensor_scale)
        found[spec] = None
        if role == "fprop":
            found[dataclasses.replace(spec, bias="bf16")] = None
    return list(found)


def emulated(recipes: Iterable[str], target: Target) -> list[str]:
    """The recipes' GEMMs that are decoded and multiplied in BF16 on a Blackwell target, with the reason, each once."""
    found: dict[str, None] = {}
    for role, gemm in products(recipes) if target.name in BLACKWELL else ():
        if reason := no_instruction(gemm.first.quantizer, gemm.second.quantizer, target):
            found[f"{role} of {gemm.first} by {gemm.second}: {reason}"] = None
    return list(found)


def matmuls(recipes: Iterable[str], target: Target, shapes: Sequence[Shape] = ()) -> list[Candidate]:
    """The matmuls with every tile of the target; with shapes (M, N, K), with the tiles usual for those alone."""
    found: dict[str, Candidate] = {}
    for spec in matmul_specs(recipes, target) if target.name in BLACKWELL else ():
        for used, tile in _tiled(spec, target, shapes):
            made = matmul_compile.candidate(used, target, tile)
            found[made.name] = made
    return list(found.values())


def _tiled(spec: MatmulSpec, target: Target, shapes: Sequence[Shape]) -> Iterator[tuple[MatmulSpec, MatmulTile]]:
    if not shapes:
        for used in (spec, spec.parts):
            yield from ((used, tile) for tile in tiles(used, target))
    for m, n, k in shapes:
        tile = usual(spec, target, m, n, k, MULTIPROCESSORS[target.capability])
        yield (spec.parts if tile.split > 1 else spec), dataclasses.replace(tile, split=1)
