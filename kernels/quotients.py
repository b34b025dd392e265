"""Quotients and reciprocals of generated kernels, rounded to the nearest: the only divisions that are not ``tl.div_rn``."""

from __future__ import annotations

from fp4.kernels.converted import ConvertedRounding
from fp4.kernels.helpers import NEEDS, helper
from fp4.kernels.writer import f32
from fp4.runtime.spec import NVFP4

NEEDS.update(
    {
        "divide": ("bits", "floats", "inverse_of"),
        "reciprocal": ("inverse_of",),
        "near_reciprocal": ("near_inverse",),
    }
)

helper(
    "inverse_of",
    '''
@triton.jit
def inverse_of(d):
    """1/d, rounded to the nearest: rcp.rn.f32, shorter than a division."""
    return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1)
''',
)
helper(
    "near_inverse",
    '''
@triton.jit
def near_inverse(d):
    """`inverse_of` d in 2^-126 .. 2^126, what rcp.rn.f32 does there without its branch for the rest; NaN of 0."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 r, e; rcp.approx.ftz.f32 r, $1; fma.rn.f32 e, $1, r, 0fBF800000; neg.f32 e, e; fma.rn.f32 $0, r, e, r; }",
        "=f,f", [d], dtype=tl.float32, is_pure=True, pack=1,
    )
''',
)
helper(
    "divide",
    '''
@triton.jit
def divide(x, d):
    """x (U, G) / d (G,), rounded to the nearest where it is in 2^-100 .. 2^100; tiny, huge or NaN beyond.

    One IEEE reciprocal for all of a column, then Markstein's correction, twice: fma.rn.f32. d comes into [1, 2) first, so that
    nothing that matters over- or underflows.
    """
    power = floats(tl.minimum(tl.maximum((254 << 23) - (bits(d) & 0x7F800000), 1 << 23), 253 << 23))
    n = d * power
    r = tl.broadcast_to(inverse_of(n)[None, :], x.shape)
    minus = tl.broadcast_to((n * -1.0)[None, :], x.shape)
    x = x * power[None, :]
    q = x * r
    q = tl.fma(tl.fma(q, minus, x), r, q)
    return tl.fma(tl.fma(q, minus, x), r, q)
''',
)
for _name, _inverse in (("reciprocal", "inverse_of"), ("near_reciprocal", "near_inverse")):
    helper(
        _name,
        f'''
@triton.jit
def {_name}(d):
    """1/d as a sum, high the nearest FP32, for d in 2^-100 .. 2^100; 0, 0 where d is 0. See `quotient`."""
    high = tl.where(d > 0.0, {_inverse}(d), 0.0)
    error = tl.fma(high * -1.0, d, 1.0)
    low = error * high
    return high, tl.fma(low, error, low)
''',
    )
helper(
    "quotient",
    '''
@triton.jit
def quotient(x, high, low):
    """x / d of d's reciprocal, by fma.rn.f32; 0 where that is 0, NaN of Inf or NaN there.

    Not always the nearest, but on the same side of each midpoint of E2M1 and E4M3 as the nearest (checked for every significand
    of d in tests/kernels/test_quotient.py), so that it rounds to the same element.
    """
    return tl.fma(x, tl.broadcast_to(high, x.shape), x * low)
''',
)


class Quotients(ConvertedRounding):
    """Expressions that divide: by the interpreter's division, or by reciprocals."""

    def inverse(self, value: str) -> str:
        """1 / value, one of each block, rounded to the nearest."""
        return f"tl.div_rn(1.0, {value})" if self.interpreted else f"{self.call('inverse_of')}({value})"

    def inverse_of_scale(self, q: NVFP4, divisor: str) -> str:
        """1 / divisor, the block scale times the tensor scale; inf or NaN where that is 0."""
        if self.interpreted or self.branches or q.has_outer_scale or q.scale != "e4m3":
            return self.inverse(divisor)
        if not q.tensor_scale:
            return f"{self.call('near_inverse')}({divisor})"
        # Below 2^126 as it is, but it may be subnormal.
        self.once(f"boost = tl.where(tensor_scale < {2.0**-60!r}, {2.0**60!r}, 1.0)")
        return f"{self.call('near_inverse')}({divisor} * boost) * boost"

    @property
    def branches(self) -> bool:
        """Are reciprocals taken by rcp.rn.f32? Where its branch, across which the assembler moves nothing, was faster on an
        H200: of decoded rows it kept a thread's two stores together, which are halves of one sector.
        """
        spec, q = self.spec, self.spec.quantizer
        if isinstance(q, NVFP4) and q.rounding == "ms_eden":
            return not self.by_rows
        four_six = isinstance(q, NVFP4) and q.four_six
        return self.by_rows and spec.output == "decoded" and spec.rotation is None and not four_six

    @property
    def reciprocal(self) -> str:
        return "reciprocal" if self.branches else "near_reciprocal"

    def over_divisor(self, value: str) -> str:
        """A tile over `divisor`, one of each unit."""
        # The interpreter's fma rounds twice.
        return f"tl.div_rn({value}, divisor[None, :])" if self.interpreted else f"{self.call('divide')}({value}, divisor)"

    def over_factor(self, q: NVFP4, factor: float) -> str:
        """`block_max` over the tensor scale and a factor, to be rounded to the scale's format."""
        if self.interpreted or not self.lifts:
            return f"tl.div_rn(block_max, tensor_scale * {f32(factor)})"
        name = f"{factor:g}".replace(".", "_")
        self.once(f"high_{name}, low_{name} = {self.call(self.reciprocal)}(tensor_scale * {f32(factor)} * lift)")
        return f"{self.call('quotient')}(block_max * lift, high_{name}, low_{name})"

    @property
    def lifts(self) -> bool:
        """Are divisors the tensor scale times E4M3 numbers, so that `lift` brings all of them where `quotient` is right?"""
        q = self.spec.quantizer
        return isinstance(q, NVFP4) and q.tensor_scale and not q.posthoc and q.scale == "e4m3" and not q.has_outer_scale

    @property
    def lifted(self) -> bool:
        """Where it was faster on an H200."""
        q = self.spec.quantizer
        weighs = isinstance(q, NVFP4) and (q.four_six or q.rounding == "ms_eden")
        return weighs and self.lifts and self.loops and self.by_rows and not (self.interpreted or self.native)
