"""The PTX inside helpers, which Triton's interpreter does not run: executed here, instruction by instruction."""

from __future__ import annotations

import itertools
import re

import ml_dtypes
import numpy as np
import pytest

from fp4.kernels.helpers import HELPERS
from fp4.kernels.native import _bytes

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
        given = [read(operand) for operand in operands]
        registers[target] = {
            "mul.f32": lambda g: bits(number(g[0]) * number(g[1])),
            "cvt.rn.satfinite.e4m3x2.f32": lambda g: e4m3(g[0]) << 8 | e4m3(g[1]),
            "mov.b32": lambda g: g[0] | g[1] << 16,
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
    plain, signed = assembly("unpack"), assembly("unpack_signed")
    for low in range(0, 1 << 16, 257):
        high = low ^ 0xA5A5
        pair = high << 16 | low
        found = run(plain, {"$2": pair})
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
