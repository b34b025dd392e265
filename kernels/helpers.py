"""Triton functions that generated kernels are composed of, as text. Each kernel's file holds those that it calls.

Rounding is by arithmetic that no compiler may change: adding and subtracting 1.5 * 2^23 rounds to an integer, half to even, by
the FP32 adder alone; a binade's power of two is read from the bits of the float. Divisions are ``tl.div_rn`` (div.rn.f32, IEEE;
Triton's ``/`` is approximate). Kernels are compiled with build.COMPILE_OPTIONS: no product and sum are contracted, nothing is
flushed.
"""

from __future__ import annotations

HELPERS: dict[str, str] = {}
# What a helper calls.
NEEDS: dict[str, tuple[str, ...]] = {
    "group_amax": ("larger",),
    "larger_halves": ("larger",),
    "larger_pairs": ("larger_of",),
    "round_e2m1": ("bits", "floats"),
    "round_e2m1_stochastic": ("bits", "floats"),
    "round_e2m1_stochastic_fma": ("bits", "floats"),
    "round_exmy": ("bits", "floats"),
    "round_exmy_stochastic": ("bits", "floats", "uniform"),
    "round_e8m0": ("bits", "e8m0_value"),
    "round_bf16": ("bits", "floats"),
    "to_bf16": ("bits", "round_bf16"),
    "e8m0_value": ("floats",),
    "e8m0_inverse": ("floats",),
    "exmy_value": ("floats",),
    "element_value": ("floats",),
    "element_value_signed": ("floats",),
    "with_sign": ("bits", "floats"),
    "butterfly": ("floats",),
    "last_butterfly": ("floats",),
}


def helper(name: str, text: str) -> None:
    HELPERS[name] = text.strip("\n")


def used(names: list[str]) -> list[str]:
    """The helpers named and what they call, callees first, each once."""
    found: list[str] = []

    def visit(name: str) -> None:
        for callee in NEEDS.get(name, ()):
            visit(callee)
        if name not in found:
            found.append(name)

    for name in names:
        visit(name)
    return found


helper(
    "bits",
    '''
@triton.jit
def bits(x):
    """The bits of FP32 values, int32."""
    return x.to(tl.int32, bitcast=True)
''',
)
helper(
    "floats",
    '''
@triton.jit
def floats(i):
    """The FP32 values of these 32 bits."""
    return i.to(tl.float32, bitcast=True)
''',
)
helper(
    "larger",
    '''
@triton.jit
def larger(a, b):
    """The larger one, NaN where one is: max.NaN.f32."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
''',
)
helper(
    "group_amax",
    '''
@triton.jit
def group_amax(x, N: tl.constexpr, B: tl.constexpr):
    """Flat x seen as (A, N, B): the largest of each N, flat; NaN stays NaN."""
    return tl.reshape(tl.reduce(tl.reshape(x, (x.shape[0] // (N * B), N, B)), 1, larger), (x.shape[0] // N,))
''',
)
helper(
    "group_max",
    '''
@triton.jit
def group_max(x, N: tl.constexpr, B: tl.constexpr):
    """Flat x seen as (A, N, B): the largest of each N, flat."""
    return tl.reshape(tl.max(tl.reshape(x, (x.shape[0] // (N * B), N, B)), 1), (x.shape[0] // N,))
''',
)
helper(
    "larger_halves",
    '''
@triton.jit
def larger_halves(x, B: tl.constexpr):
    """Flat x seen as (A, 2, B): the larger of the two, flat; NaN where one is."""
    return tl.reshape(tl.reduce(tl.reshape(x, (x.shape[0] // (2 * B), 2, B)), 1, larger), (x.shape[0] // 2,))
''',
)
helper(
    "larger_of",
    '''
@triton.jit
def larger_of(a, b):
    """The larger magnitude of BF16, NaN where one is, two at once; its sign means nothing."""
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2
    )
''',
)
helper(
    "larger_pairs",
    '''
@triton.jit
def larger_pairs(x):
    """`larger_of` rows i and N + i of BF16 (2N, G): (N, G)."""
    a, b = tl.split(tl.permute(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), (1, 2, 0)))
    return larger_of(a, b)
''',
)
helper(
    "add_halves",
    '''
@triton.jit
def add_halves(x, B: tl.constexpr):
    """Flat x seen as (A, 2, B): the sums of the two, flat. One step of a pairwise sum."""
    return tl.reshape(tl.sum(tl.reshape(x, (x.shape[0] // (2 * B), 2, B)), 1), (x.shape[0] // 2,))
''',
)
helper(
    "repeat",
    '''
@triton.jit
def repeat(x, N: tl.constexpr, B: tl.constexpr):
    """Flat x seen as (A, 1, B), each N times: flat."""
    A: tl.constexpr = x.shape[0] // B
    return tl.reshape(tl.broadcast_to(tl.reshape(x, (A, 1, B)), (A, N, B)), (x.shape[0] * N,))
''',
)
helper(
    "butterfly",
    '''
@triton.jit
def butterfly(x, B: tl.constexpr):
    """One stage of a Hadamard transform: flat x seen as (A, 2, B), [a, b] becomes [a + b, a - b]."""
    pairs = tl.reshape(x, (x.shape[0] // (2 * B), 2, B))
    pattern = pairs.to(tl.uint32, bitcast=True)
    # The partner of each: the sum of both bit patterns less its own. Folded away in one thread, one shuffle between two.
    partner = floats(tl.sum(pattern, 1, keep_dims=True).to(tl.uint32) - pattern)
    sign = 1.0 - 2.0 * tl.arange(0, 2).to(tl.float32)
    # The product is exact, so a fused sum is the plain one.
    sign = tl.broadcast_to(sign[None, :, None], pairs.shape)
    return tl.reshape(tl.fma(pairs, sign, partner), (x.shape[0],))
''',
)
helper(
    "last_butterfly",
    '''
@triton.jit
def last_butterfly(x, B: tl.constexpr):
    """The larger magnitude of what `butterfly` gives, |a| + |b|, in the place of both: abs after the shuffle costs nothing."""
    pairs = tl.reshape(x, (x.shape[0] // (2 * B), 2, B))
    pattern = pairs.to(tl.uint32, bitcast=True)
    partner = floats(tl.sum(pattern, 1, keep_dims=True).to(tl.uint32) - pattern)
    y = tl.inline_asm_elementwise(
        "{ .reg .f32 a, b; abs.f32 a, $1; abs.f32 b, $2; add.rn.f32 $0, a, b; }",
        "=f,f,f", [pairs, partner], dtype=tl.float32, is_pure=True, pack=1,
    )
    return tl.reshape(y, (x.shape[0],))
''',
)
helper(
    "round_bf16",
    '''
@triton.jit
def round_bf16(x):
    """FP32 rounded to the nearest BF16, still FP32."""
    i = bits(x)
    return tl.where(tl.abs(x) < float("inf"), floats((i + 0x7FFF + ((i >> 16) & 1)) & -0x10000), x)
''',
)
helper(
    "to_bf16",
    '''
@triton.jit
def to_bf16(x):
    """FP32 to the nearest BF16, by its bits: the interpreter's own conversion truncates."""
    return (bits(round_bf16(x)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
''',
)
helper(
    "unpack",
    '''
@triton.jit
def unpack(x):
    """BF16 to FP32, two at once."""
    return tl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2
    )
''',
)
helper(
    "unpack_product",
    '''
@triton.jit
def unpack_product(x):
    """`unpack` by a product in place of a shift, whose units are busier: ptxas is not to know that it is by 2^16."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 p; mov.u32 p, %ctaid.z; add.u32 p, p, 65536; mul.lo.u32 $0, $2, p; and.b32 $1, $2, 0xffff0000; }",
        "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2,
    )
''',
)
helper(
    "unpack_signed",
    '''
@triton.jit
def unpack_signed(x, sign):
    """BF16 to FP32, two at once, negative where `sign` (uint32) is 2^31: no more instructions than without signs."""
    return tl.inline_asm_elementwise(
        "mad.lo.u32 $0, $2, 65536, $3; lop3.b32 $1, $2, 0xffff0000, $4, 0x6A;",
        "=f,=f,r,r,r", [x, sign], dtype=tl.float32, is_pure=True, pack=2,
    )
''',
)
helper(
    "unpack_signed_pairs",
    '''
@triton.jit
def unpack_signed_pairs(x, sign):
    """`unpack_signed` of signs of int16, -2^15 where negative: two a register, for half an instruction an element more."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 p; xor.b32 p, $2, $3; shl.b32 $0, p, 16; and.b32 $1, p, 0xffff0000; }",
        "=f,=f,r,r", [x, sign], dtype=tl.float32, is_pure=True, pack=2,
    )
''',
)
helper(
    "round_bf16_pairs",
    '''
@triton.jit
def round_bf16_pairs(x):
    """FP32 rounded to the nearest BF16, still FP32; cvt.rn.bf16x2.f32, two at once (one alone is a slow instruction)."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 p; cvt.rn.bf16x2.f32 p, $3, $2; shl.b32 $0, p, 16; and.b32 $1, p, 0xffff0000; }",
        "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2,
    )
''',
)
helper(
    "to_bf16_pairs",
    '''
@triton.jit
def to_bf16_pairs(x):
    """FP32 to the nearest BF16; cvt.rn.bf16x2.f32, two at once."""
    return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2)
''',
)
helper(
    "decoded_pairs",
    '''
@triton.jit
def decoded_pairs(value, s):
    """value (U, G) FP32, of few bits, times s (G,): BF16, exact where it is a BF16 number; fma.rn.bf16x2, two at once."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 v, z; cvt.rn.bf16x2.f32 v, $2, $1; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, v, $3, z; }",
        "=r,f,f,r", [value, s.to(tl.bfloat16)[None, :]], dtype=tl.bfloat16, is_pure=True, pack=2,
    )
''',
)
helper(
    "signed_pairs",
    '''
@triton.jit
def signed_pairs(value, x, s):
    """`decoded_pairs` of magnitudes, with the signs of x (U, G), BF16."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 v, z; cvt.rn.bf16x2.f32 v, $2, $1; mov.b32 z, 0x80008000; lop3.b32 v, v, $3, z, 0xF8; "
        "fma.rn.bf16x2 $0, v, $4, z; }",
        "=r,f,f,r,r", [value, x, s.to(tl.bfloat16)[None, :]], dtype=tl.bfloat16, is_pure=True, pack=2,
    )
''',
)
helper(
    "signed_pairs_fp32",
    '''
@triton.jit
def signed_pairs_fp32(value, x, s):
    """`decoded_pairs` of magnitudes, with the signs of x (U, G), FP32."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 v, x, z; cvt.rn.bf16x2.f32 v, $2, $1; prmt.b32 x, $3, $4, 0x7632; mov.b32 z, 0x80008000; "
        "lop3.b32 v, v, x, z, 0xF8; fma.rn.bf16x2 $0, v, $5, z; }",
        "=r,f,f,f,f,r", [value, x, s.to(tl.bfloat16)[None, :]], dtype=tl.bfloat16, is_pure=True, pack=2,
    )
''',
)
helper(
    "with_sign",
    '''
@triton.jit
def with_sign(magnitude, x):
    """The magnitude with the sign bit of x, -0.0 included."""
    return floats(bits(magnitude) | (bits(x) & -0x80000000))
''',
)
helper(
    "round_e2m1",
    '''
@triton.jit
def round_e2m1(a):
    """Magnitudes to E2M1, half to even, saturating: (value FP32, code int32 in 0..7)."""
    a = tl.minimum(a, 6.0)
    # 2^22 times a's binade, 1, 2 or 4, one unit of which is the step; below 1 the step is that of [1, 2).
    magic = floats(tl.maximum(bits(a) + 0x0B000000, 0x4A800000) & 0x7F800000)
    t = a + magic
    return t - magic, (bits(t) + (bits(magic) >> 22) + 6) & 7
''',
)
helper(
    "nearest_e2m1",
    '''
@triton.jit
def nearest_e2m1(a):
    """The values of `round_e2m1`, by two fma.rn.f32: an ulp of 2^22 m is E2M1's step at a, to which the first one rounds."""
    a = tl.minimum(a, 6.0)
    m = tl.maximum(a, 1.5)
    return tl.fma(m, 4194304.0, tl.fma(m, -4194304.0, a))
''',
)
helper(
    "round_e2m1_stochastic",
    '''
@triton.jit
def round_e2m1_stochastic(a, draw):
    """Magnitudes to E2M1, saturating, up as draws of 16 bits say (runtime/rounding.py): (value FP32, code int32)."""
    a = tl.minimum(a, 6.0)
    below = tl.where(a < 1.0, 1.0, 0.0)  # there the step is that of [1, 2)
    i = bits(a + below) + ((draw << 6) | 32)  # what is below the step, and the draw: the carry rounds up
    return floats(i & -0x400000) - below, (i >> 22) - tl.where(a < 1.0, 254, 252)
''',
)
helper(
    "round_e2m1_stochastic_fma",
    '''
@triton.jit
def round_e2m1_stochastic_fma(a, draw):
    """`round_e2m1_stochastic` with no comparison: fma.rn.sat.f32, of the units that rounding leaves idle."""
    a = tl.minimum(a, 6.0)
    below = tl.inline_asm_elementwise(  # sat(2^24 - 2^24 a): 1 where a < 1, else 0
        "fma.rn.sat.f32 $0, $1, 0fCB800000, 0f4B800000;", "=f,f", [a], dtype=tl.float32, is_pure=True, pack=1
    )
    i = bits(a + below) + ((draw << 6) | 32)
    return floats(i & -0x400000) - below, (i - bits(tl.maximum(below, 0.5))) >> 22
''',
)
helper(
    "round_exmy",
    '''
@triton.jit
def round_exmy(a, M: tl.constexpr, BIAS: tl.constexpr, TOP: tl.constexpr):
    """Magnitudes to a format of M mantissa bits, half to even, saturating at TOP: (value FP32, code int32)."""
    a = tl.where(a < TOP, a, TOP)
    # Binades above the first, in which the subnormals lie on the same grid.
    above = tl.maximum((bits(a) & 0x7F800000) - ((128 - BIAS) << 23), 0)
    t = a * floats(((126 + M + BIAS) << 23) - above) + 12582912.0
    value = (t - 12582912.0) * floats(above + ((128 - BIAS - M) << 23))
    return value, (above >> (23 - M)) + (bits(t) - 0x4B400000)
''',
)
helper(
    "round_e4m3",
    '''
@triton.jit
def round_e4m3(a):
    """`round_exmy` to E4M3 by cvt.rn.satfinite.e4m3x2.f32 and back (sm_89)."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 a; .reg .b16 p, f, g; .reg .b32 v; min.f32 a, $2, 0f43E00000; "
        "cvt.rn.satfinite.e4m3x2.f32 p, 0f00000000, a; cvt.u32.u16 $1, p; "
        "cvt.rn.f16x2.e4m3x2 v, p; mov.b32 {f, g}, v; cvt.f32.f16 $0, f; }",
        "=f,=r,f", [a], dtype=(tl.float32, tl.int32), is_pure=True, pack=1,
    )
''',
)
helper(
    "round_exmy_stochastic",
    '''
@triton.jit
def round_exmy_stochastic(a, word, M: tl.constexpr, BIAS: tl.constexpr, TOP: tl.constexpr):
    """Magnitudes to a format of M mantissa bits, up where uniform(word) is below the fraction: (value FP32, code int32)."""
    a = tl.where(a < TOP, a, TOP)
    above = tl.maximum((bits(a) & 0x7F800000) - ((128 - BIAS) << 23), 0)
    t = a * floats(((126 + M + BIAS) << 23) - above)
    low = tl.floor(t)
    n = low + (uniform(word) < t - low).to(tl.float32)
    value = n * floats(above + ((128 - BIAS - M) << 23))
    return value, (above >> (23 - M)) + n.to(tl.int32)
''',
)
helper(
    "round_e8m0",
    '''
@triton.jit
def round_e8m0(a, TOP: tl.constexpr):
    """Magnitudes to the nearest power of two, 1.5 upwards: (value FP32, code int32). Zero is 2^-127."""
    i = bits(tl.where(a < TOP, a, TOP))
    code = tl.minimum(tl.where(i < 0x00800000, (i >= 0x00600000).to(tl.int32), (i + 0x00400000) >> 23), 254)
    return e8m0_value(code), code
''',
)
helper(
    "e8m0_value",
    '''
@triton.jit
def e8m0_value(code):
    """2^(code - 127) of codes 0..254."""
    return floats(tl.maximum(code << 23, 0x00400000))
''',
)
helper(
    "e8m0_inverse",
    '''
@triton.jit
def e8m0_inverse(code):
    """2^(127 - code) of codes 0..254."""
    return floats(tl.maximum((254 - code) << 23, 0x00400000))
''',
)
helper(
    "exmy_value",
    '''
@triton.jit
def exmy_value(code, M: tl.constexpr, BIAS: tl.constexpr, NAN: tl.constexpr):
    """Codes (int32) of an unsigned format of M mantissa bits to FP32; the code NAN to NaN."""
    # As the exponent and mantissa of a float they are 2^(127 - BIAS) times too small, subnormals included.
    value = floats(code << (23 - M)) * floats(tl.full((1,), (254 - BIAS) << 23, tl.int32))
    return tl.where(code == NAN, float("nan"), value)
''',
)
helper(
    "element_value",
    '''
@triton.jit
def element_value(code):
    """E2M1 codes (the upper four bits of int32) to FP32."""
    # As the exponent and mantissa of a float they are 2^126 times too small, subnormals included.
    return floats((code >> 6) & -0x7E400000) * 8.507059173023462e37
''',
)
helper(
    "element_value_signed",
    '''
@triton.jit
def element_value_signed(code, sign):
    """`element_value`, negative where `sign` (uint32) is 2^31."""
    return floats(((code >> 6) & -0x7E400000) ^ sign.to(tl.int32, bitcast=True)) * 8.507059173023462e37
''',
)
