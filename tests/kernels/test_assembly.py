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
        }[name](given)
    return registers


def assembly(helper: str) -> str:
    """The PTX of a helper's text."""
    (found,) = re.findall(r'inline_asm_elementwise\(\s*"([^"]*)"', HELPERS[helper])
    return str(found)


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
