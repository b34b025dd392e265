"""E2M1 by the conversion to E4M3 that sm_89 and sm_90 have: cvt.rn.satfinite.e4m3x2.f32.

Nearest, packed: E4M3's subnormals are the multiples of 2^-9 up to 7 * 2^-9, so the conversion rounds to E2M1, half to even,
what was bent so that E2M1's eight magnitudes lie on a line: a - (a - 2)+ / 2 - (a - 4)+ / 4, where (.)+ is 0 of what is
negative, which fma.rn.sat.f32 gives. All of it is done by the units of fma, which rounding by integers leaves idle, and the
byte is the code.

Values of E2M1 that are known already are converted 2^-6 times as large: then the byte is s00ccc00.
"""

from __future__ import annotations

from fp4.kernels.helpers import NEEDS, helper
from fp4.kernels.native import EIGHT, NativeRounding
from fp4.kernels.target import INTERPRETER
from fp4.kernels.writer import f32
from fp4.runtime.spec import NVFP4

NEEDS.update(
    {
        "e2m1_words": ("rows8", "values_to_codes"),
        "bent_words": ("rows8", "bent_to_codes"),
        "pair_bits": ("even_odd", "flat"),
        "bent_words_signed": ("rows8", "pair_bits", "bent_to_codes_signed"),
        "bent_words_signed_across": ("rows8", "bent_to_codes_signed_across"),
    }
)


def _converts(values: list[str]) -> str:
    """Eight registers to bytes: those of even columns in a, of odd columns in b."""
    converts = " ".join(f"cvt.rn.satfinite.e4m3x2.f32 h{j}, {values[i + 2]}, {values[i]};" for j, i in enumerate((0, 4, 1, 5)))
    return f"{converts} mov.b32 a, {{h0, h1}}; mov.b32 b, {{h2, h3}};"


def _bytes() -> str:
    """Eight values of E2M1 to codes in $0: even and odd columns to the bytes of E4M3, of which both nibbles are made."""
    values = [f"x{i}" for i in range(8)]
    scaled = " ".join(f"mul.f32 {value}, ${i + 1}, 0f3C800000;" for i, value in enumerate(values))
    return (
        f"{{ .reg .f32 x<8>; .reg .b16 h<4>; .reg .b32 a, b, c, d; {scaled} {_converts(values)} "
        "shr.b32 c, a, 2; shr.b32 a, a, 4; and.b32 c, c, 0x07070707; lop3.b32 c, a, 0x08080808, c, 0xEA; "
        "shl.b32 d, b, 2; lop3.b32 c, d, 0x70707070, c, 0xEA; lop3.b32 $0, b, 0x80808080, c, 0xEA; }"
    )


def _bent() -> str:
    """Eight signed values of `bent` to codes in $0: bytes s0000ccc."""
    return (
        f"{{ .reg .b16 h<4>; .reg .b32 a, b, c, d; {_converts([f'${i + 1}' for i in range(8)])} "
        "mad.lo.u32 c, b, 16, a; shr.b32 d, a, 4; lop3.b32 c, 0x77777777, c, d, 0xCA; lop3.b32 $0, b, 0x80808080, c, 0xEA; }"
    )


def _signed(word: str, values: list[str], even: str, odd: str) -> str:
    """Eight magnitudes to codes in `word`; even, odd: two registers and the bytes of them whose top bits are the signs."""
    return (
        f"{_converts(values)} mad.lo.u32 c, b, 16, a; prmt.b32 e, {even}; prmt.b32 o, {odd}; shr.b32 e, e, 4; "
        f"lop3.b32 c, e, 0x08080808, c, 0xEA; lop3.b32 {word}, o, 0x80808080, c, 0xEA;"
    )


def _gathered(names: str, words: list[tuple[str, str]]) -> str:
    """Of two words each the bytes with signs: the lower halves', then the upper halves'."""
    return " ".join(f"prmt.b32 {name}, {a}, {b}, 0x7351;" for name, (a, b) in zip(names, words, strict=True))


def _bent_signed() -> str:
    """Eight magnitudes to codes in $0, their signs those of four words of two BF16 each."""
    gathered = _gathered("pq", [("$9", "$10"), ("$11", "$12")])
    codes = _signed("$0", [f"${i + 1}" for i in range(8)], "p, q, 0x5410", "p, q, 0x7632")
    return f"{{ .reg .b16 h<4>; .reg .b32 a, b, c, e, o, p, q; {gathered} {codes} }}"


def _bent_signed_across() -> str:
    """Twice eight magnitudes, two neighbouring rows' by turns, to codes in $0 and $1; words of BF16 hold both rows."""
    words = [f"${18 + i}" for i in range(8)]
    gathered = _gathered("pqrs", [(words[i], words[i + 2]) for i in (0, 4, 1, 5)])
    codes = [
        _signed(f"${row}", [f"${2 + 2 * i + row}" for i in range(8)], f"p, q, {half}", f"r, s, {half}")
        for row, half in enumerate(("0x5410", "0x7632"))
    ]
    return f"{{ .reg .b16 h<4>; .reg .b32 a, b, c, e, o, p, q, r, s; {gathered} {' '.join(codes)} }}"


helper(
    "bent",
    '''
@triton.jit
def bent(a):
    """2^-8 times a - (a - 2)+ / 2 - (a - 4)+ / 4 of magnitudes up to 6.5, for the conversion to E4M3.

    The constants are some units off: where a sum loses its last bit, each midpoint of E2M1 still rounds to even, and the FP32
    numbers beside it to their sides (tests/kernels/test_assembly.py takes every a).
    """
    return tl.inline_asm_elementwise(
        "{ .reg .f32 v, w, t; fma.rn.sat.f32 v, $1, 0f3B000002, 0fBB800003; fma.rn.sat.f32 w, $1, 0f3A7FFFF8, 0fBB7FFFFB; "
        "neg.f32 v, v; fma.rn.f32 t, $1, 0f3B800000, v; sub.rn.f32 $0, t, w; }",
        "=f,f", [a], dtype=tl.float32, is_pure=True, pack=1,
    )
''',
)
helper(
    "magnitude",
    '''
@triton.jit
def magnitude(x, y):
    """|x| * y in one instruction."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 a; abs.f32 a, $1; mul.rn.f32 $0, a, $2; }", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
    )
''',
)
helper(
    "bounded_pairs",
    '''
@triton.jit
def bounded_pairs(x, bound):
    """BF16 x (U, G) with magnitudes of at most bound (G,), that of a NaN: min.xorsign.abs.bf16x2, two at once."""
    bound = bound.to(tl.bfloat16)[None, :]
    return tl.inline_asm_elementwise(
        "min.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [x, bound], dtype=tl.bfloat16, is_pure=True, pack=2
    )
''',
)
helper(
    "pair_bits",
    '''
@triton.jit
def pair_bits(x):
    """BF16 (8, G) to the four words (G,) of two neighbours each."""
    even, odd = even_odd(x)
    word = tl.inline_asm_elementwise("mov.b32 $0, {$1, $2};", "=r,h,h", [even, odd], dtype=tl.int32, is_pure=True, pack=1)
    even, odd = even_odd(word)
    a, c = even_odd(even)
    b, d = even_odd(odd)
    return flat(a), flat(b), flat(c), flat(d)
''',
)


def _converter(name: str, about: str, assembly: str, signs: str = "", pack: int = 1) -> None:
    """A helper of eight FP32 arguments and words with `signs`: that assembly, which makes `pack` words of codes."""
    registers = ",".join(["=r"] * pack + ["f"] * (8 * pack) + ["r"] * len(signs.split()))
    arguments = ", ".join([EIGHT, *signs.split()])
    helper(
        name,
        f'''
@triton.jit
def {name}({arguments}):
    """{about}"""
    return tl.inline_asm_elementwise(
        "{assembly}",
        "{registers}",
        [{arguments}],
        dtype=tl.int32,
        is_pure=True,
        pack={pack},
    )
''',
    )


_converter(
    "values_to_codes",
    "The codes of eight values of E2M1 by cvt.rn.satfinite.e4m3x2.f32 (sm_89): 2^-6 times them, E4M3's bytes are s00ccc00.",
    _bytes(),
)
_converter("bent_to_codes", "The codes of eight values of `bent` with their signs.", _bent())
_converter(
    "bent_to_codes_signed",
    "The codes of eight values of `bent`, with the signs of four words of two BF16 each.",
    _bent_signed(),
    "p q r s",
)
_converter(
    "bent_to_codes_signed_across",
    "The codes of eight values of `bent`, with the signs of eight of BF16, whose registers hold two words' at a place.",
    _bent_signed_across(),
    "i j k l m n o p",
    pack=2,
)
helper(
    "e2m1_words",
    '''
@triton.jit
def e2m1_words(x):
    """FP32 values of E2M1 (8, G): the codes of eight in a word, row 0 lowest, (G,) int32."""
    a, b, c, d, e, f, g, h = rows8(x)
    return values_to_codes(a, b, c, d, e, f, g, h)
''',
)
helper(
    "bent_words",
    '''
@triton.jit
def bent_words(x):
    """Signed values of `bent` (8, G): the codes of eight in a word, row 0 lowest, (G,) int32."""
    a, b, c, d, e, f, g, h = rows8(x)
    return bent_to_codes(a, b, c, d, e, f, g, h)
''',
)
helper(
    "bent_words_signed",
    '''
@triton.jit
def bent_words_signed(x, raw):
    """Values of `bent` (8, G), signs of raw, BF16, two neighbours a register: the codes of eight in a word, (G,) int32."""
    a, b, c, d, e, f, g, h = rows8(x)
    p, q, r, s = pair_bits(raw)
    return bent_to_codes_signed(a, b, c, d, e, f, g, h, p, q, r, s)
''',
)
helper(
    "bent_words_signed_across",
    '''
@triton.jit
def bent_words_signed_across(x, raw):
    """Values of `bent` (8, G), signs of raw, BF16, two words' elements a register: codes of eight in a word, (G,) int32."""
    a, b, c, d, e, f, g, h = rows8(x)
    i, j, k, l, m, n, o, p = rows8(raw)
    return bent_to_codes_signed_across(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)
''',
)


class ConvertedRounding(NativeRounding):
    """Lines that make codes by the conversion to E4M3: those of a unit are `low` and, of 16 columns, `high`."""

    @property
    def reads_pairs(self) -> bool:
        """Is the operand BF16 in memory, two neighbours in a register? Its parts are `raw0` ... then."""
        return self.spec.input == "bf16" and not self.interpreted

    @property
    def paired(self) -> bool:
        """Are the elements that are quantized BF16 numbers, two neighbours in a register? They are `raw0` ... then."""
        r = self.spec.rotation
        return not self.interpreted and self.held == 1 and (self.reads_pairs if r is None else r.bf16)

    @property
    def unpack(self) -> str:
        """The helper that takes BF16 pairs to FP32: that which was faster on an H200."""
        return "unpack_product" if self.spec.rotation is not None and self.spec.quantizer is not None else "unpack"

    @property
    def packs_values(self) -> bool:
        """Are codes made by conversion, not in integers?"""
        return not self.native and self.target.name != INTERPRETER and self.target.capability >= 89

    @property
    def converts(self) -> bool:
        """Does the conversion round, too?"""
        q = self.spec.quantizer
        if q is None or not q.packed or not self.packs_values or self.spec.output != "packed" or q.rounding != "nearest":
            return False
        # four_six weighs values; beside outer scales it was slower on an H200.
        return not q.has_outer_scale and not (isinstance(q, NVFP4) and q.four_six)

    def converted_codes(self, inverse: str, bound: str, factor: float = 1.0) -> None:
        """`low` (and `high`) of a tile times `inverse` and the factor, of magnitudes of at most `bound`, about 6 / both.

        inverse, bound: expressions of one value a block.
        """
        self.add(f"inverse = {self.spread(inverse)}")
        bent, names = self.call("bent"), ["low", "high"][: self.spec.unit // 8]
        times = f" * {f32(factor)}" if factor != 1 else ""
        if not self.paired:
            scaled = f"{bent}(tl.minimum(tl.abs(x * inverse[None, :]){times}, 6.0))"
            self.add(f"scaled = {self.call('with_sign')}({scaled}, x)")
            words = self.call("bent_words")
            parts = self.halves_of("scaled", "scaled")
            self.add(*(f"{name} = {words}({part})" for name, part in zip(names, parts, strict=True)))
            return
        self.add(f"bound = {self.spread(bound)}")
        bounded, magnitude, unpack = self.call("bounded_pairs"), self.call("magnitude"), self.call(self.unpack)
        raw = [f"raw{i}" for i in range(len(names))] if self.by_rows else self.halves_of("raw0", "raw")
        words = self.call("bent_words_signed" if self.by_rows else "bent_words_signed_across")
        for name, part in zip(names, raw, strict=True):
            self.add(
                f"scaled = {bent}({magnitude}({unpack}({bounded}({part}, bound)), inverse[None, :]){times})",
                f"{name} = {words}(scaled, {part})",
            )

    def halves_of(self, value: str, stem: str) -> list[str]:
        """Names of the parts of eight columns each."""
        if self.spec.unit == 8:
            return [value]
        names = [f"{stem}_left", f"{stem}_right"]
        self.add(f"{', '.join(names)} = {self.call('halves')}({value})")
        return names

    def packed_values(self) -> None:
        """`low` (and `high`): the codes of `value` with the signs of x."""
        words = self.call("e2m1_words")
        self.add(f"signed = {self.call('with_sign')}(value, x)")
        parts = self.halves_of("signed", "signed")
        self.add(*(f"{name} = {words}({part})" for name, part in zip(("low", "high"), parts, strict=False)))
