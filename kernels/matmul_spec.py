"""What one block-scaled matmul kernel does, which tensor core instruction that is on a target, and in which tiles it comes."""

from __future__ import annotations

from dataclasses import dataclass

from fp4.kernels.target import INTERPRETER, Target
from fp4.runtime.spec import FP8, MXFP4, MXFP8, NVFP4, Quantizer, SpecError

OUTPUTS = ("bf16", "fp16", "fp32")
TENSOR_MEMORY_COLUMNS = 512


@dataclass(frozen=True)
class Format:
    """An operand as tensor cores read it: element format, block scale format, columns a scale."""

    element: str
    scale: str
    block: int

    @property
    def per_byte(self) -> int:
        """Elements a byte."""
        return 2 if self.element == "e2m1" else 1


FORMATS = {
    "nvfp4": Format("e2m1", "e4m3", 16),
    "mxfp4": Format("e2m1", "e8m0", 32),
    "mxfp8_e4m3": Format("e4m3", "e8m0", 32),
    "mxfp8_e5m2": Format("e5m2", "e8m0", 32),
}


def format_of(q: Quantizer | None) -> str | None:
    """The name of the format a quantizer writes; None where no tensor core reads it."""
    if isinstance(q, NVFP4):
        return "nvfp4" if q.scale == "e4m3" and q.block[1] == 16 and not q.outer else None
    if isinstance(q, MXFP4):
        return "mxfp4"
    if isinstance(q, MXFP8):
        return f"mxfp8_{q.format}"
    return None


def no_format(q: Quantizer | None) -> str:
    """Why no block-scaled tensor core reads what the quantizer writes; empty where one does."""
    if format_of(q) is not None:
        return ""
    if q is None:
        return "an operand in high precision: block-scaled tensor cores take two quantized operands"
    if isinstance(q, FP8):
        return f"{q} has FP32 block scales; tensor cores take E4M3 or E8M0 ones"
    assert isinstance(q, NVFP4)
    if q.outer:
        return f"{q}: an FP32 scale for every {q.outer} contracted columns is no factor of the whole product"
    return f"{q}: tensor cores take E2M1 with E4M3 scales of 16 columns, or with E8M0 scales of 32"


@dataclass(frozen=True)
class Instruction:
    """A block-scaled tensor core instruction: pattern of its PTX, pattern of its SASS opcode, elements contracted by one.

    rows, columns: of the product of one instruction; rows 0 where one thread block issues it for 128 rows (tensor memory).
    """

    ptx: str
    sass: str
    k: int
    rows: int = 0
    columns: int = 256


# PTX ISA, tcgen05.mma and mma.sync with .block_scale; SASS as ptxas of CUDA 12.9 names it. On sm_103 the opcode says the block.
_TENSOR_MEMORY = {
    "nvfp4": Instruction(r"tcgen05\.mma\S*kind::mxf4nvf4\.block_scale\.scale_vec::4X", r"UTCOMMA\.(4X|BLOCK16)", 64),
    "mxfp4": Instruction(r"tcgen05\.mma\S*kind::mxf4\.block_scale\.scale_vec::2X", r"UTCOMMA(\.2X|\.BLOCK32)?$", 64),
    "mxfp8": Instruction(r"tcgen05\.mma\S*kind::mxf8f6f4\.block_scale\.scale_vec::1X", r"UTCQMMA", 32),
}


def instruction(a: str, b: str, target: Target) -> Instruction | str:
    """The instruction that multiplies operands of two formats (names in FORMATS) on a target, or why there is none."""
    fa, fb = FORMATS[a], FORMATS[b]
    if (fa.scale, fa.block) != (fb.scale, fb.block):
        return f"no tensor core multiplies {a} by {b}: both operands need one kind of block scale"
    capability = target.capability
    kind = a if a == b and fa.element == "e2m1" else "mxfp8"
    if capability in (100, 103):
        return _TENSOR_MEMORY[kind]
    if capability == 121:
        return "Triton 3.7 has no block-scaled MMA for sm_121a"
    if capability != 120:
        return f"{target.name} has no block-scaled tensor cores; sm_100a, sm_103a and sm_120a have"
    if kind != "mxfp8":
        scale, vector, name = ("ue4m3", "4X", "UE4M3.4X") if a == "nvfp4" else ("ue8m0", "2X", "E8")
        ptx = rf"mma\.sync\S*m16n8k64\S*kind::mxf4nvf4\.block_scale\.scale_vec::{vector}\S*e2m1\.e2m1\S*{scale}"
        return Instruction(ptx, rf"OMMA\S*E2M1\.E2M1\.{name}", 64, 16, 8)
    if fa.per_byte != fb.per_byte:
        return f"Triton 3.7 multiplies {a} by {b} in BF16 on {target.name}"
    ptx = rf"mma\.sync\S*m16n8k32\S*kind::mxf8f6f4\.block_scale\.scale_vec::1X\S*{fa.element}\.{fb.element}\S*ue8m0"
    return Instruction(ptx, rf"QMMA\S*{fa.element.upper()}\.{fb.element.upper()}\.E8", 32, 16, 8)


def no_instruction(a: Quantizer | None, b: Quantizer | None, target: Target) -> str:
    """Why a GEMM on these operands is no block-scaled instruction on the target; empty where it is."""
    for q in (a, b):
        if reason := no_format(q):
            return reason
    found = instruction(str(format_of(a)), str(format_of(b)), target)
    return found if isinstance(found, str) else ""


@dataclass(frozen=True)
class MatmulSpec:
    """y = alpha * a b^T + bias (+ y): a (M, K) and b (N, K) quantized along K, FP32 accumulation, one rounding.

    a, b: names in FORMATS. alphas: FP32 factors read on the device, 0 to 2 (the operands' tensor scales), multiplied with each
    other first. bias: FP32, BF16 or FP16 of (N,), or None. output: bf16, fp16 or fp32. accumulate: add to y, which is FP32.
    partial: write the plain sums of a part of K, FP32 (the first kernel of split-K).
    """

    a: str
    b: str
    output: str = "bf16"
    alphas: int = 2
    bias: str | None = None
    accumulate: bool = False
    partial: bool = False

    def __post_init__(self) -> None:
        for name in (self.a, self.b):
            if name not in FORMATS:
                raise SpecError(f"matmul operand {name!r}; write one of {', '.join(FORMATS)}")
        if (FORMATS[self.a].scale, FORMATS[self.a].block) != (FORMATS[self.b].scale, FORMATS[self.b].block):
            raise SpecError(f"no tensor core multiplies {self.a} by {self.b}; write two formats with one kind of block scale")
        if self.output not in OUTPUTS or (self.bias is not None and self.bias not in OUTPUTS):
            raise SpecError(f"matmul output={self.output!r}, bias={self.bias!r}; write one of {', '.join(OUTPUTS)}")
        if not 0 <= self.alphas <= 2:
            raise SpecError(f"matmul alphas={self.alphas}; write 0, 1 or 2")
        if self.accumulate and self.output != "fp32":
            raise SpecError(f"accumulate adds to an FP32 result, not to {self.output}; write output='fp32'")
        if self.partial and (self.output != "fp32" or self.alphas or self.bias or self.accumulate):
            raise SpecError("partial sums have no epilogue; write output='fp32', alphas=0, and neither bias nor accumulate")

    @property
    def block(self) -> int:
        """Columns a block scale."""
        return FORMATS[self.a].block

    @property
    def parts(self) -> MatmulSpec:
        """The first kernel of split-K of this one."""
        return MatmulSpec(self.a, self.b, "fp32", 0, partial=True)


@dataclass(frozen=True)
class MatmulTile:
    """m x n of the result by one program, k of the contracted dimension a step.

    stages: steps whose loads are in flight. persistent: as many programs as the GPU has multiprocessors, each takes several
    tiles. specialized: warps of their own load, multiply and write (sm_100, sm_103). group: row tiles over which neighbouring
    programs share columns of b, for L2. split: programs that share K; their sums are added in a second kernel, in order.
    piece: columns of the result that are scaled, rounded and stored together.
    """

    m: int = 128
    n: int = 128
    k: int = 256
    stages: int = 3
    warps: int = 4
    persistent: bool = False
    specialized: bool = False
    group: int = 8
    split: int = 1
    piece: int = 128

    def __str__(self) -> str:
        flags = [f for f in ("persistent", "specialized") if getattr(self, f)] + (
            [f"split={self.split}"] if self.split > 1 else []
        )
        return " ".join([f"{self.m}x{self.n}x{self.k}", f"stages={self.stages}", f"warps={self.warps}", *flags])


def needed(spec: MatmulSpec, target: Target, tile: MatmulTile) -> int:
    """Static instructions of a step of the K loop in one thread's code."""
    found = instruction(spec.a, spec.b, target)
    assert isinstance(found, Instruction)
    steps = tile.k // found.k
    if found.rows == 0:
        return steps * (tile.m // 128) * max(1, tile.n // found.columns)
    return steps * tile.m * tile.n // (found.rows * found.columns * tile.warps)


def tiles(spec: MatmulSpec, target: Target) -> list[MatmulTile]:
    """The tiles that pass inspection on the target, the usual one first. Each is compiled and inspected in the tests."""
    eight_bits = any(FORMATS[name].per_byte == 1 for name in (spec.a, spec.b))
    if target.name == INTERPRETER:
        found = [MatmulTile(k=128, stages=1, persistent=True), MatmulTile(k=128, stages=1)]
    elif target.capability == 120:
        found = [MatmulTile(128, 128, 128, 3, 8), MatmulTile(128, 128, 128, 3, 8, persistent=True)]
        if not eight_bits:
            found += [MatmulTile(128, 128, 256, 2, 8), MatmulTile(128, 128, 256, 2, 8, persistent=True)]
    elif target.capability in (100, 103):
        k = 128 if eight_bits else 256
        found = [
            MatmulTile(128, 256, k, 3, 8, persistent=True, specialized=True, piece=64),
            MatmulTile(128, 128, k, 4, 8, persistent=True, specialized=True, piece=32),
            MatmulTile(128, 256, k, 3, piece=32),
            MatmulTile(128, 128, k, 4, piece=32),
            MatmulTile(256, 128, k, 3, 8, piece=32),
            MatmulTile(128, 128, k, 4, persistent=True, piece=32),
        ]
    elif target.capability == 90 and spec.block == 32:  # decoded in the kernel and multiplied in BF16: for checks only
        found = [MatmulTile(128, 128, 128, 3, 8)]
    else:
        found = []
    return [t for t in found if not t.persistent] if spec.partial else found
