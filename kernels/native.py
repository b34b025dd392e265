"""Blackwell's conversions to and from E2M1, as parts of generated kernels.

Nearest: ``cvt.rn.satfinite.e2m1x2.f32`` (sm_100a, 103a, 120a, 121a; PTX ISA 9.1, section "cvt") rounds two FP32 values half to
even, saturates at 6, keeps the sign of -0.0, and packs them: the bytes are those of the arithmetic rounding of helpers.py for
every finite input, in one instruction a pair instead of about seven an element. A NaN becomes +6 there and +-6 here; it only
occurs in blocks with a NaN or Inf element, whose scale is NaN and whose codes mean nothing.

Values: ``cvt.rn.f16x2.e2m1x2`` and ``cvt.f32.f16``, both exact: one and a half instructions an element, so decoded output, and
the errors that four_six and MS-EDEN weigh, come from the codes.

Stochastic: ``cvt.rs.satfinite.e2m1x4.f32`` (sm_100a, 103a), on request (``KernelSpec.native_draws``): runtime/native.py is its
oracle. Its draws are other than the software's, so it is never chosen unasked.

Under the interpreter the same kernels run with the instructions modelled by arithmetic: ``Target("interpreter", "sm_100a")``.
Compiled and inspected, not run on the hardware.
"""

from __future__ import annotations

from fp4.kernels.draws import Draws
from fp4.kernels.helpers import NEEDS, helper
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.target import Target
from fp4.runtime.native import BYTE_SHIFTS
from fp4.runtime.rng import STREAM_ELEMENT


def _pairs(instruction: str) -> str:
    """Four converts of two registers each to the four bytes of $0; the first register goes to the low nibble."""
    converts = " ".join(f"{instruction} p{i}, ${2 * i + 2}, ${2 * i + 1};" for i in range(4))
    return f"{{ .reg .b8 p<4>; {converts} mov.b32 $0, {{p0, p1, p2, p3}}; }}"


def _fours(instruction: str) -> str:
    """Two converts of four registers and a random word each to the two halves of $0."""
    converts = " ".join(
        f"{instruction} h{i}, {{{', '.join(f'${4 * i + j}' for j in (4, 3, 2, 1))}}}, ${9 + i};" for i in range(2)
    )
    return f"{{ .reg .b16 h<2>; {converts} mov.b32 $0, {{h0, h1}}; }}"


def _values() -> str:
    """The eight codes of $8 to the FP32 registers $0 to $7."""
    halves = " ".join(
        f"cvt.rn.f16x2.e2m1x2 v, p{i}; mov.b32 {{f, g}}, v; cvt.f32.f16 ${2 * i}, f; cvt.f32.f16 ${2 * i + 1}, g;"
        for i in range(4)
    )
    return f"{{ .reg .b8 p<4>; .reg .b32 v; .reg .b16 f, g; mov.b32 {{p0, p1, p2, p3}}, $8; {halves} }}"


EIGHT = "a, b, c, d, e, f, g, h"
NEEDS.update(
    {
        "rows8": ("even_odd", "flat"),
        "e2m1_codes": ("rows8",),
        "e2m1_values": ("stack8",),
        "e2m1_draws": ("rows8",),
        "model_e2m1x8": ("round_e2m1", "bits"),
        "model_e2m1x8_values": ("element_value",),
        "model_e2m1x8_drawn": ("bits",),
    }
)

helper(
    "even_odd",
    '''
@triton.jit
def even_odd(x):
    """(2N, G): its even rows and its odd rows."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0] // 2, 2, x.shape[1])), (0, 2, 1)))
''',
)
helper(
    "flat",
    '''
@triton.jit
def flat(x):
    """One row (1, G) as (G,)."""
    return tl.reshape(x, (x.shape[1],))
''',
)
helper(
    "rows8",
    '''
@triton.jit
def rows8(x):
    """The eight rows (G,) of (8, G)."""
    even, odd = even_odd(x)
    even, two_six = even_odd(even)
    odd, three_seven = even_odd(odd)
    a, e = even_odd(even)
    b, f = even_odd(odd)
    c, g = even_odd(two_six)
    d, h = even_odd(three_seven)
    return flat(a), flat(b), flat(c), flat(d), flat(e), flat(f), flat(g), flat(h)
''',
)
helper(
    "stack8",
    '''
@triton.jit
def stack8(a, b, c, d, e, f, g, h):
    """Eight (G,) as the rows of (8, G)."""
    low = tl.join(tl.join(a, b), tl.join(c, d))
    high = tl.join(tl.join(e, f), tl.join(g, h))
    return tl.reshape(tl.permute(tl.join(low, high), (3, 2, 1, 0)), (8, a.shape[0]))
''',
)
helper(
    "halves",
    '''
@triton.jit
def halves(x):
    """(16, G): rows 0 to 7 and rows 8 to 15."""
    return tl.split(tl.permute(tl.reshape(x, (2, 8, x.shape[1])), (1, 2, 0)))
''',
)
helper(
    "unhalve",
    '''
@triton.jit
def unhalve(a, b):
    """Two (8, G) as one (16, G)."""
    return tl.reshape(tl.permute(tl.join(a, b), (2, 0, 1)), (16, a.shape[1]))
''',
)
helper(
    "e2m1_codes",
    '''
@triton.jit
def e2m1_codes(x):
    """FP32 (8, G) to E2M1, half to even, saturating: eight codes a word, row 0 lowest, (G,) int32."""
    a, b, c, d, e, f, g, h = rows8(x)
    return e2m1x8(a, b, c, d, e, f, g, h)
''',
)
helper(
    "e2m1_draws",
    '''
@triton.jit
def e2m1_draws(x, r, s):
    """FP32 (8, G) to E2M1, rounded stochastically by word r (rows 0 to 3) and s (4 to 7): eight codes a word, (G,) int32."""
    a, b, c, d, e, f, g, h = rows8(x)
    return e2m1x8_drawn(a, b, c, d, e, f, g, h, r, s)
''',
)
helper(
    "e2m1_values",
    '''
@triton.jit
def e2m1_values(word):
    """Eight codes a word (G,) to FP32 (8, G)."""
    a, b, c, d, e, f, g, h = e2m1x8_values(word)
    return stack8(a, b, c, d, e, f, g, h)
''',
)
helper(
    "e2m1x8",
    f'''
@triton.jit
def e2m1x8({EIGHT}):
    """Eight FP32 values to the codes of one word, the first lowest: four instructions."""
    return tl.inline_asm_elementwise(
        "{_pairs("cvt.rn.satfinite.e2m1x2.f32")}",
        "=r,f,f,f,f,f,f,f,f",
        [{EIGHT}],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
''',
)
helper(
    "e2m1x8_drawn",
    f'''
@triton.jit
def e2m1x8_drawn({EIGHT}, r, s):
    """Eight FP32 values to the codes of one word, the first lowest, rounded by the random words r and s."""
    return tl.inline_asm_elementwise(
        "{_fours("cvt.rs.satfinite.e2m1x4.f32")}",
        "=r,f,f,f,f,f,f,f,f,r,r",
        [{EIGHT}, r, s],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
''',
)
helper(
    "e2m1x8_values",
    f'''
@triton.jit
def e2m1x8_values(word):
    """The FP32 values of the eight codes of a word."""
    return tl.inline_asm_elementwise(
        "{_values()}",
        "=f,=f,=f,=f,=f,=f,=f,=f,r",
        [word],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )
''',
)
helper(
    "model_e2m1x8",
    f'''
@triton.jit
def signed_code(x):
    value, code = round_e2m1(tl.abs(x))
    return code | (bits(x) >> 28) & 8


@triton.jit
def e2m1x8({EIGHT}):
    """What cvt.rn.satfinite.e2m1x2.f32 gives, by arithmetic."""
    low = signed_code(a) | signed_code(b) << 4 | signed_code(c) << 8 | signed_code(d) << 12
    return low | signed_code(e) << 16 | signed_code(f) << 20 | signed_code(g) << 24 | signed_code(h) << 28
''',
)
helper(
    "model_e2m1x8_values",
    f'''
@triton.jit
def e2m1x8_values(word):
    """What cvt.rn.f16x2.e2m1x2 gives, by arithmetic."""
    return {", ".join(f"element_value(word << {28 - 4 * i})" for i in range(8))}
''',
)
helper(
    "model_e2m1x8_drawn",
    f'''
@triton.jit
def drawn_code(x, word, SHIFT: tl.constexpr):
    """Up where the byte, added to the upper eight discarded bits, carries."""
    a = tl.where(tl.abs(x) < 6.0, tl.abs(x), 6.0)
    above = tl.where(a < 1.0, a + 1.0, a)  # below 1 the step is that of [1, 2)
    step = tl.where(a < 2.0, 0.5, tl.where(a < 4.0, 1.0, 2.0))
    fixed = tl.floor(tl.div_rn(above, step) * 256.0).to(tl.int32)
    n = fixed + ((word >> SHIFT) & 0xFF).to(tl.int32) >> 8
    code = n + tl.where(a < 1.0, -2, tl.where(a < 2.0, 0, tl.where(a < 4.0, 2, 4)))
    return code | (bits(x) >> 28) & 8


@triton.jit
def e2m1x8_drawn({EIGHT}, r, s):
    """What cvt.rs.satfinite.e2m1x4.f32 gives, by arithmetic."""
    low = {" | ".join(f"drawn_code({x}, r, {BYTE_SHIFTS[i]}) << {4 * i}" for i, x in enumerate("abcd"))}
    return low | {" | ".join(f"drawn_code({x}, s, {BYTE_SHIFTS[i]}) << {4 * i + 16}" for i, x in enumerate("efgh"))}
''',
)


def rounds_natively(spec: KernelSpec, target: Target) -> bool:
    """Does the target's kernel round elements to E2M1 by an instruction?"""
    q = spec.quantizer
    if q is None or not q.packed:
        return False
    return spec.native_draws if q.rounding == "stochastic" else target.rounds_e2m1


class NativeRounding(Draws):
    """Lines that round with the target's own instructions: the codes of a unit are `low` and, of 16 columns, `high`."""

    @property
    def native(self) -> bool:
        """Are this kernel's elements rounded by instructions of the target?"""
        return rounds_natively(self.spec, self.target)

    def instruction(self, name: str) -> None:
        """Note an instruction's helper, or the interpreter's model of it, ahead of what calls it."""
        self.call(f"model_{name}" if self.target.models else name)

    def native_codes(self, scaled: str, suffix: str = "") -> None:
        """`low{suffix}` (and `high{suffix}`): the codes of a signed, scaled tile."""
        u, drawn = self.spec.unit, self.spec.native_draws
        self.instruction("e2m1x8_drawn" if drawn else "e2m1x8")
        codes = self.call("e2m1_draws" if drawn else "e2m1_codes")
        words = ("", "")
        if drawn:
            self.native_draws()
            words = (", w0, w1", ", w2, w3")
        if u == 8:
            self.add(f"low{suffix} = {codes}({scaled}{words[0]})")
            return
        self.add(
            f"left, right = {self.call('halves')}({scaled})",
            f"low{suffix}, high{suffix} = {codes}(left{words[0]}), {codes}(right{words[1]})",
        )

    def native_draws(self) -> None:
        """Random words of the unit's columns, four each: `w0` to `w3`, of which a unit of 8 takes two."""
        self.seed()
        self.scalar("site")
        half = "" if self.spec.unit == 16 else " // 2"
        counter = self.located(f"row * tl.cdiv(width, 16) + unit{half}", "row", f"unit{half}", 16)
        self.add(f"w0, w1, w2, w3 = {self.call('philox')}({counter}, {STREAM_ELEMENT}, seed, site.to(tl.uint32))")
        if half:
            self.add("w0, w1 = tl.where(unit % 2 == 0, w0, w2), tl.where(unit % 2 == 0, w1, w3)")

    def native_values(self, suffix: str = "") -> None:
        """`value{suffix}`: the signed values of `low{suffix}` and `high{suffix}`."""
        self.instruction("e2m1x8_values")
        values = self.call("e2m1_values")
        if self.spec.unit == 8:
            self.add(f"value{suffix} = {values}(low{suffix})")
        else:
            self.add(f"value{suffix} = {self.call('unhalve')}({values}(low{suffix}), {values}(high{suffix}))")
