"""The PTX inside helpers, which Triton's interpreter does not run: executed here, instruction by instruction."""

from __future__ import annotations

import itertools
import re

import ml_dtypes
import numpy as np
import pytest

from fp4.kernels.converted import _bent, _bent_signed, _bent_signed_across, _bytes
from fp4.kernels.helpers import HELPERS

VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=np.float32)
MASK = 0xFFFFFFFF


def bits(value: float | np.float32) -> int:
    return int(np.float32(value).view(np.uint32))


def number(pattern: int) -> np.float32:
    return np.uint32(pattern).view(np.float32)


def e4m3(pattern: int) -> int:
    return int(np.asarray(number(pattern)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def half(code: int) -> int:
    """The FP16 bits of an E4M3 code."""
    return int(np.uint8(code).view(ml_dtypes.float8_e4m3fn).astype(np.float16).view(np.uint16))


def larger(a: int, b: int) -> int:
    """Of BF16 bits: the larger magnitude with the product's sign; NaN, 0x7FFF, of a NaN (PTX ISA, max)."""
    magnitudes = a & 0x7FFF, b & 0x7FFF
    return 0x7FFF if max(magnitudes) > 0x7F80 else max(magnitudes) | (a ^ b) & 0x8000


def smaller(a: int, b: int) -> int:
    """Of BF16 bits: the smaller magnitude, the number's where one is a NaN, with the product's sign (PTX ISA, min)."""
    return min(a & 0x7FFF, b & 0x7FFF) | (a ^ b) & 0x8000


def fused(a: int, b: int, c: int) -> np.float32:
    """a * b + c, rounded once: 64 bits hold the sum exactly where its parts are not 2^16 apart."""
    x, y, z = (np.longdouble(number(pattern)) for pattern in (a, b, c))
    return np.float32(x * y + z)


def permuted(a: int, b: int, selector: int) -> int:
    """prmt: byte i of the result is that of b:a which nibble i of the selector names."""
    return sum(((b << 32 | a) >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))


def lop3(a: int, b: int, c: int, table: int) -> int:
    """Bit i of the result is the table's bit of (a, b, c)'s bits i."""
    found = 0
    for index in range(8):
        if table >> index & 1:
            found |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    return found & MASK


def run(text: str, inputs: dict[str, int]) -> dict[str, int]:
    """The registers after the statements of `text`, bit patterns, from those of the inputs ($1 ...)."""
    registers = dict(inputs)

    def read(operand: str) -> int:
        if literal := re.fullmatch(r"0f([0-9A-F]{8})", operand):
            return int(literal[1], 16)
        return registers[operand] if operand in registers else int(operand, 0) & MASK

    for statement in filter(None, (part.strip(" {}") for part in re.sub(r"\.reg [^;]*;", "", text).split(";"))):
        name, _, rest = statement.partition(" ")
        target, *operands = re.findall(r"[$\w]+", rest)
        if rest.startswith("{"):  # a register as its halves
            registers[target], registers[operands[0]] = registers[operands[1]] & 0xFFFF, registers[operands[1]] >> 16
            continue
        given = [0 if "%" in rest else read(operand) for operand in operands]  # of special registers, %ctaid.z alone is read
        registers[target] = {
            "mul.f32": lambda g: bits(number(g[0]) * number(g[1])),
            "cvt.rn.satfinite.e4m3x2.f32": lambda g: e4m3(g[0]) << 8 | e4m3(g[1]),
            "fma.rn.f32": lambda g: bits(fused(*g)),
            "fma.rn.sat.f32": lambda g: bits(np.clip(fused(*g), np.float32(0), np.float32(1))),
            "sub.rn.f32": lambda g: bits(number(g[0]) - number(g[1])),
            "mul.rn.f32": lambda g: bits(number(g[0]) * number(g[1])),
            "neg.f32": lambda g: g[0] ^ 1 << 31,
            "prmt.b32": lambda g: permuted(*g),
            "mov.b32": lambda g: g[0] | g[1] << 16,
            "mov.u32": lambda g: g[0],
            "add.u32": lambda g: (g[0] + g[1]) & MASK,
            "mul.lo.u32": lambda g: g[0] * g[1] & MASK,
            "min.xorsign.abs.bf16x2": lambda g: smaller(g[0] & 0xFFFF, g[1] & 0xFFFF) | smaller(g[0] >> 16, g[1] >> 16) << 16,
            "shl.b32": lambda g: g[0] << g[1] & MASK,
            "shr.b32": lambda g: g[0] >> g[1],
            "and.b32": lambda g: g[0] & g[1],
            "lop3.b32": lambda g: lop3(*g),
            "mad.lo.u32": lambda g: (g[0] * g[1] + g[2]) & MASK,
            "xor.b32": lambda g: g[0] ^ g[1],
            "abs.f32": lambda g: g[0] & 0x7FFFFFFF,
            "add.rn.f32": lambda g: bits(number(g[0]) + number(g[1])),
            "min.f32": lambda g: bits(np.fmin(number(g[0]), number(g[1]))),
            "cvt.u32.u16": lambda g: g[0],
            "cvt.rn.f16x2.e4m3x2": lambda g: half(g[0] & 0xFF) | half(g[0] >> 8) << 16,
            "cvt.f32.f16": lambda g: bits(np.float32(np.uint16(g[0]).view(np.float16))),
            "max.NaN.xorsign.abs.bf16x2": lambda g: larger(g[0] & 0xFFFF, g[1] & 0xFFFF) | larger(g[0] >> 16, g[1] >> 16) << 16,
        }[name](given)
    return registers


def assembly(helper: str) -> str:
    """The PTX of a helper's text."""
    (found,) = re.findall(r'inline_asm_elementwise\(\s*((?:"[^"]*"\s*)+),', HELPERS[helper])
    return "".join(re.findall(r'"([^"]*)"', found))


def word(codes: list[int]) -> int:
    values = [bits(VALUES[code & 7]) | (code & 8) << 28 for code in codes]
    return run(_bytes(), {f"${i + 1}": value for i, value in enumerate(values)})["$0"]


@pytest.mark.parametrize("place", range(8))
def test_each_code_goes_to_its_nibble(place: int) -> None:
    """Every code in every place, -0.0 too, the others being 0 or all bits."""
    for code, rest in itertools.product(range(16), (0, 15)):
        codes = [rest] * 8
        codes[place] = code
        assert word(codes) == sum(c << 4 * i for i, c in enumerate(codes)), (code, rest)


def test_words_of_random_codes() -> None:
    for codes in np.random.default_rng(0).integers(0, 16, (200, 8)).tolist():
        assert word(codes) == sum(c << 4 * i for i, c in enumerate(codes))


@pytest.mark.parametrize("signs", list(itertools.product((0, 1 << 31), repeat=2)), ids=str)
def test_two_bf16_become_fp32_with_signs(signs: tuple[int, int]) -> None:
    """BF16 of every exponent in either half, its sign flipped where it says so."""
    plain, product, signed = assembly("unpack"), assembly("unpack_product"), assembly("unpack_signed")
    for low in range(0, 1 << 16, 257):
        high = low ^ 0xA5A5
        pair = high << 16 | low
        for text in (plain, product):
            found = run(text, {"$2": pair})
            assert (found["$0"], found["$1"]) == (low << 16, high << 16)
        found = run(signed, {"$2": pair, "$3": signs[0], "$4": signs[1]})
        assert (found["$0"], found["$1"]) == (low << 16 ^ signs[0], high << 16 ^ signs[1])


@pytest.mark.parametrize("signs", list(itertools.product((0, 1 << 15), repeat=2)), ids=str)
def test_two_signs_in_a_register(signs: tuple[int, int]) -> None:
    text = assembly("unpack_signed_pairs")
    for low in range(0, 1 << 16, 257):
        high = low ^ 0xA5A5
        found = run(text, {"$2": high << 16 | low, "$3": signs[1] << 16 | signs[0]})
        assert (found["$0"], found["$1"]) == ((low ^ signs[0]) << 16, (high ^ signs[1]) << 16)


def test_e4m3_by_conversion() -> None:
    """`round_e4m3` is `round_exmy`'s rounding: each number of E4M3, the midpoints, their neighbours, what saturates, NaN."""
    values = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middles = (values[1:] + values[:-1]) / 2
    points = np.concatenate([values, middles, np.array([448, 449, 1e9, 3.4e38, np.inf, np.nan], dtype=np.float32)])
    for point in np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))]):
        wanted = np.fmin(point, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        found = run(assembly("round_e4m3"), {"$2": bits(point)})
        assert found["$1"] == int(wanted.view(np.uint8)), point
        assert number(found["$0"]) == np.float32(wanted), point


def test_the_larger_of_two_pairs() -> None:
    """Magnitudes, NaN where one is; what is made of them ignores the sign."""
    text = assembly("larger_of")
    patterns = [0, 0x8000, 1, 0x3F80, 0xBF80, 0x7F7F, 0xFF80, 0x7F80, 0x7FC0, 0xFFC1]
    for a, b in itertools.product(patterns, repeat=2):
        found = run(text, {"$1": b << 16 | a, "$2": a << 16 | b})["$0"]
        for half_ in (found & 0xFFFF, found >> 16):
            assert half_ & 0x7FFF == (0x7FFF if max(a & 0x7FFF, b & 0x7FFF) > 0x7F80 else max(a & 0x7FFF, b & 0x7FFF))


def test_the_last_butterfly_s_larger_magnitude() -> None:
    """|a| + |b| is the larger of |a + b| and |a - b|, each rounded."""
    text = assembly("last_butterfly")
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(2000) * 2.0 ** rng.integers(-40, 40, 2000)).astype(np.float32).reshape(2, -1)
    for x, y in zip(a, b, strict=True):
        assert number(run(text, {"$1": bits(x), "$2": bits(y)})["$0"]) == max(abs(x + y), abs(x - y))


def test_the_smaller_magnitude_keeps_the_sign() -> None:
    """`bounded_pairs` by a bound that is not negative; a NaN becomes the bound."""
    text = assembly("bounded_pairs")
    for x, bound in itertools.product([0, 0x8000, 1, 0x3F80, 0xBF80, 0x7F7F, 0xFF80, 0x7FC0, 0xFFC1], [0x0001, 0x3F80, 0x7F80]):
        found = run(text, {"$1": x << 16 | x, "$2": bound << 16 | bound})["$0"]
        assert found & 0xFFFF == found >> 16 == min(x & 0x7FFF, bound) | x & 0x8000


# -- rounding by the conversion to E4M3

MIDPOINTS = (VALUES[1:] + VALUES[:-1]) / 2


def rounded(a: np.ndarray) -> np.ndarray:
    """Codes of magnitudes, half to even, saturating."""
    below = np.searchsorted(MIDPOINTS, a, side="left")  # midpoints below a
    return below + ((np.searchsorted(MIDPOINTS, a, side="right") > below) & (below % 2 == 1))


def test_bent_magnitudes_round_to_their_codes() -> None:
    """Every FP32 number from 1/8 to 6.5, by the constants of the helper; the sums are exact in FP64."""
    k, d, slope, less, scale = (np.float64(number(int(c, 16))) for c in re.findall("0f([0-9A-F]{8})", HELPERS["bent"]))
    first, last = (int(np.float32(end).view(np.int32)) for end in (0.125, 6.5))
    for start in range(first, last, 1 << 22):
        a = np.arange(start, min(start + (1 << 22), last), dtype=np.int32).view(np.float32)
        wide = a.astype(np.float64)
        v, w = ((np.clip(wide * x + y, 0, 1)).astype(np.float32) for x, y in ((k, d), (slope, less)))
        bent = (wide * scale - v).astype(np.float32) - w
        codes = bent.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        assert np.array_equal(codes, rounded(a)), a[codes != rounded(a)][:5]


def test_two_fmas_round_to_the_nearest() -> None:
    """`nearest_e2m1` of every FP32 number from 1/8 to 6, by the constants of the helper; FP64 holds products and sums."""
    least, up, down = (float(c) for c in re.findall(r"(-?[\d.]+)[,)]", HELPERS["nearest_e2m1"].partition("6.0)")[2])[:3])
    first, last = (int(np.float32(end).view(np.int32)) for end in (0.125, 6.0))
    for start in range(first, last + 1, 1 << 22):
        a = np.arange(start, min(start + (1 << 22), last + 1), dtype=np.int32).view(np.float32)
        m = np.maximum(a, np.float32(least)).astype(np.float64)
        value = (m * up + (m * down + a).astype(np.float32)).astype(np.float32)
        assert np.array_equal(value, VALUES[rounded(a)]), a[value != VALUES[rounded(a)]][:5]


def test_the_helper_does_what_was_checked() -> None:
    """`bent` itself around the midpoints, the numbers of E2M1 and 0."""
    points = np.concatenate([MIDPOINTS, VALUES])
    near = np.concatenate([points, np.nextafter(points, np.float32(9)), np.abs(np.nextafter(points, np.float32(0)))])
    for a, code in zip(near, rounded(near), strict=True):
        assert e4m3(run(assembly("bent"), {"$1": bits(a)})["$0"]) == code, a


def bent(code: int) -> int:
    """What `bent` gives for the magnitude of a code."""
    return run(assembly("bent"), {"$1": bits(VALUES[code & 7])})["$0"]


@pytest.mark.parametrize("place", range(8))
def test_converted_codes_go_to_their_nibbles(place: int) -> None:
    """Signs of FP32, of the pairs of a row, and of pairs across two rows, whose codes go to a word each."""
    for code, rest in itertools.product(range(16), (0, 15)):
        codes = [rest] * 8
        codes[place] = code
        other = codes[::-1]
        wanted, wanted_other = (sum(c << 4 * i for i, c in enumerate(row)) for row in (codes, other))
        signed = {f"${i + 1}": bent(c) | (c & 8) << 28 for i, c in enumerate(codes)}
        assert run(_bent(), signed)["$0"] == wanted
        magnitudes = {f"${i + 1}": bent(c) for i, c in enumerate(codes)}
        pairs = {
            f"${9 + j}": (codes[2 * j + 1] & 8) << 28 | (codes[2 * j] & 8) << 12 | 0x12345678 & 0x7FFF7FFF for j in range(4)
        }
        assert run(_bent_signed(), magnitudes | pairs)["$0"] == wanted
        both = {f"${2 + 2 * i + row}": bent(c) for row, line in enumerate((codes, other)) for i, c in enumerate(line)}
        across = {
            f"${18 + i}": (b & 8) << 28 | (a & 8) << 12 | 0x5A5A5A5A & 0x7FFF7FFF
            for i, (a, b) in enumerate(zip(codes, other, strict=True))
        }
        found = run(_bent_signed_across(), both | across)
        assert (found["$0"], found["$1"]) == (wanted, wanted_other)
