"""Kernels that find the largest finite magnitude of an operand, rotated or not."""

from __future__ import annotations

from fp4.kernels.operand import Operand
from fp4.kernels.writer import CONSTANTS, INF_BITS


class Amax(Operand):
    """Lines that end in one atomic maximum a program."""

    def amax(self) -> None:
        """From the loaded tile `x` on."""
        self.call("bits")
        self.call("floats")
        if self.spec.rotation is None:
            self.once("finite = tl.full((TR * TB,), 1 << 24, tl.uint32)")
            self.largest_finite("x")
            self.after.append(f"largest = {self.found}")
        else:
            self.amax_of_rotated()
        self.after.append(f"tl.atomic_max({self.pointer('amax_ptr')}, bits(largest))")

    found = "floats(((tl.max(finite, 0) - (1 << 24)) >> 1).to(tl.int32))"

    def largest_finite(self, x: str) -> None:
        """`finite` (TR * TB,), from which `found` follows."""
        self.section("the largest finite magnitude: integers have the same order; shifted, Inf and NaN wrap below all others")
        self.add(
            f"i = ({x}.to(tl.uint32, bitcast=True) << 1) + (1 << 24)",
            "finite = tl.maximum(finite, tl.max(i, 0))",
        )

    def amax_of_rotated(self) -> None:
        """The rotation's factor and its rounding to BF16 keep the order: they are made of the largest alone.

        Of the last butterfly's a + b and a - b the larger magnitude is |a| + |b|, in FP32 too, unless that overflows: a program
        that meets an Inf or a NaN takes its tiles anew, by `carefully`.
        """
        r, u = self.spec.rotation, self.spec.unit
        assert r is not None
        half = r.size // 2
        self.section(f"rotate: signs ({r.signs}), {r.size.bit_length() - 2} butterfly stages, and of the last |a| + |b|")
        self.signs_after_load()
        self.hadamard(half)
        flat = f"tl.reshape(x, ({u} * TR * TB,))"
        rows, units = u, "TR * TB"
        if self.by_rows and half >= u and not self.interpreted:  # a and b are in two threads
            last = f"{self.call('last_butterfly')}({flat}, {self.apart(half)})"
        else:
            last = f"{self.call('add_halves')}(tl.abs({flat}), {self.apart(half)})"
            rows, units = (u // 2, units) if half < u else (u, "TR * TB // 2")
        self.add(f"x = tl.reshape({last}, ({rows}, {units}))", "largest = tl.maximum(largest, tl.max(bits(x), 0))")
        self.once(f"largest = tl.zeros(({units},), tl.int32)")
        down, across = (1, max(8, self.spec.rotation_units)) if self.by_rows else (8, max(4, self.spec.rotation_units))
        if self.interpreted:  # whose time is the number of operations
            down = 16
        part = self.carefully()
        self.after += [
            "top = tl.max(largest, 0)",
            "largest = floats(top)",
            f"PART: tl.constexpr = TB if TB < {across} else {across}",
            f"if top >= {INF_BITS}:  # an Inf, a NaN or an overflow: anew, with every butterfly",
            f"    finite = tl.full(({down} * PART,), 1 << 24, tl.uint32)",
            *("    " + line for line in self.loop([
                f"for part in range(TR // {down} * (TB // PART)):",
                f"    part_down = down * (TR // {down}) + part // (TB // PART)",
                "    part_across = across * (TB // PART) + part % (TB // PART)",
                f"    finite = carefully(finite, part_down, part_across, {', '.join(part)}, {down}, PART, WHOLE)",
            ])),
            f"    largest = {self.found}",
            f"largest = largest * {self.normalization()}",
        ]  # fmt: skip
        if r.bf16:
            rounded = f"{self.call('round_bf16')}(largest)" if self.interpreted else "largest.to(tl.bfloat16).to(tl.float32)"
            self.after.append(f"largest = {rounded}")

    def carefully(self) -> list[str]:
        """A function of small tiles, which takes few registers; returns its parameters beside the tile's."""
        part = type(self)(self.spec, self.target)
        part.loops = False
        part.tile()
        part.load()
        part.signs_after_load()
        part.hadamard()
        part.largest_finite("x")
        parameters = [*part.pointers, *part.scalars]
        head = f"@triton.jit\ndef carefully(finite, down, across, {', '.join([*parameters, *CONSTANTS])}):"
        about = '"""The largest finite magnitude of one tile after all butterflies, or the one so far, as of `finite`."""'
        lines = [about, *part.before, *part.lines, "return finite"]
        self.functions.append("\n".join([head, *("    " + line if line else "" for line in lines)]))
        self.helpers += [name for name in part.helpers if name not in self.helpers]
        return parameters
