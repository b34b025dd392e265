"""The operand of a generated kernel: its tiles, their loads, the rotation."""

from __future__ import annotations

import math

from fp4.kernels.scales import ScaleRules
from fp4.kernels.writer import f32
from fp4.runtime.rng import STREAM_SIGNS
from fp4.runtime.spec import NVFP4


class Operand(ScaleRules):
    """From the operand in memory to `x` (U, TR * TB), FP32, rotated."""

    def tile(self) -> None:
        spec, u = self.spec, self.spec.unit
        width = "columns" if spec.rotation is None else f"tl.cdiv(columns, {spec.rotation.size}) * {spec.rotation.size}"
        units = f"tl.cdiv(width, {spec.block[1]})" + (f" * {spec.block_units}" if spec.block_units > 1 else "")
        known = []
        if spec.output == "packed" and not self.by_rows:  # so that neighbours in a row are stored at once
            known = ["if WHOLE:", f"    units = tl.multiple_of(width // {u}, TB)"]
        if spec.single:
            # Of columns that are known to be equal ptxas (12.8) packs an undefined register.
            self.once("columns = columns + tl.program_id(1)  # 1, which the compiler is not to know")
        self.once(
            f"width = {width}",
            f"units = {units}",
            *known,
            *self.tiles(),
            "g = tl.arange(0, TR * TB)",
            f"k = tl.arange(0, {u})[:, None]",
        )
        if self.held > 1:
            self.once(
                f"held = tl.arange(0, TR * TB // {self.held}) * {self.held}  # the first of the units that a thread holds"
            )
        row, unit = self.place_of("g", "down", "across")
        self.add(f"# unit g holds columns {u} * unit ... {u} * unit + {u - 1} of its row", f"row = {row}", f"unit = {unit}")
        if self.held > 1:
            row, unit = self.place_of("held", "down", "across")
            self.add(f"held_row, held_unit = {row}, {unit}")

    def place_of(self, g: str, down: str, across: str) -> tuple[str, str]:
        """Row and unit, in the operand, of units g of a tile."""
        row, unit = (f"{g} // TB", f"{g} % TB") if self.by_rows else (f"{g} % TR", f"{g} // TR")
        return f"({down} * TR + {row}).to(tl.int64)", f"{across} * TB + {unit}"

    @property
    def down_first(self) -> bool:
        """So that tiles of few rows, neighbours in memory, are read together; high ones are better written together."""
        spec = self.spec
        four_six = isinstance(spec.quantizer, NVFP4) and spec.quantizer.four_six
        return not self.by_rows and (spec.output == "packed" or spec.rotation_units > 1 or four_six)

    def tiles(self) -> list[str]:
        in_row, in_column = "tl.maximum(tl.cdiv(units, TB), 1)", "tl.maximum(tl.cdiv(rows, TR), 1)"
        if not self.down_first:
            return [f"tiles = {in_row}  # of a row, numbered one after the other", f"total = {in_column} * tiles"]
        return [f"tiles = {in_column}  # of a column, numbered one after the other", f"total = {in_row} * tiles"]

    def load(self) -> None:
        spec = self.spec
        pairs = self.reads_pairs
        stem, count = "raw" if pairs else "x", self.parts * self.held
        names = [f"{stem}{i}" for i in range(count)] if count > 1 or pairs else ["x"]
        if self.ahead:
            self.load_ahead(names)
        else:
            self.section(f"load: x ({spec.unit}, TR * TB), zero outside")
            self.add(*self.loads(names, *self.load_place))
        if not pairs:
            self.add(*(f"{name} = {name}.to(tl.float32)" for name in names))
        elif self.signs_on_load:
            self.signs_of_parts(count)
        for i, name in enumerate(names if pairs else []):
            unpack = "unpack_signed_pairs" if self.signs_in_pairs else "unpack_signed"
            call = f"{unpack}({name}, sign{i})" if self.signs_on_load else f"{self.unpack}({name})"
            self.call(call.partition("(")[0])
            self.add(f"x{i if count > 1 else ''} = {call}")
        if count > 1:
            self.add(f"x = {self.joined([f'x{i}' for i in range(count)])}")

    def joined(self, names: list[str]) -> str:
        """The tile of the parts of the units that a thread holds, in their order in memory."""
        bits, of_parts = len(names).bit_length() - 1, self.parts.bit_length() - 1
        while len(names) > 1:
            names = [f"tl.join({a}, {b})" for a, b in zip(names[::2], names[1::2], strict=True)]
        order = [*range(1 + of_parts, 1, -1), 0, 1, *range(1 + bits, 1 + of_parts, -1)]
        return f"tl.reshape(tl.permute({names[0]}, ({', '.join(map(str, order))})), ({self.spec.unit}, TR * TB))"

    @property
    def parts(self) -> int:
        """Of a unit: a thread loads 16 bytes at once, and the whole of it would else go to several threads."""
        return max(1, self.spec.unit * (4 if self.spec.input == "fp32" else 2) // 16) if self.by_rows else 1

    @property
    def load_place(self) -> tuple[str, str]:
        """Names of the row and unit where a thread's elements begin."""
        return ("row", "unit") if self.held == 1 else ("held_row", "held_unit")

    def loads(self, names: list[str], row: str = "row", unit: str = "unit", also: str = "") -> list[str]:
        """The parts of the units from `unit` on, in the operand's dtype. also: a scalar condition of all."""
        spec, n = self.spec, self.spec.unit // self.parts
        lines = [
            f"source = (x_ptr + {row} * stride_r + {unit}.to(tl.int64) * stride_c * {spec.unit})[None, :]",
            f"j = tl.arange(0, {n})[:, None]",
        ]
        if not self.by_rows:
            rows = spec.rows_held
            lines.append(
                f"source = tl.max_contiguous(source, (1, {rows}))  # {rows} rows a thread: more would take all its registers"
            )
        mask = f"inside & {also}" if also else "inside"
        for i, name in enumerate(names):
            at = "j" if i == 0 else f"(j + {i * n})"
            lines += [
                f"inside = {self.where(f'({row} < rows)[None, :] & ({unit}[None, :] * {spec.unit} + {at} < columns)')}",
                f"{name} = tl.load(source + {at}.to(tl.int64) * stride_c, mask={mask}, other=0.0)",
            ]
        return lines

    @property
    def ahead(self) -> bool:
        """Is the next tile loaded while this one is computed? Where a thread computes much and few programs fit a GPU."""
        q = self.spec.quantizer
        eden = isinstance(q, NVFP4) and q.rounding == "ms_eden" and not q.posthoc
        return eden and (self.by_rows or self.spec.output == "decoded") and self.loops and not self.interpreted

    def load_ahead(self, names: list[str]) -> None:
        """Loads by a function, of the first tile before the loop, then in it of the next one."""
        head = "@triton.jit\ndef load(x_ptr, row, unit, rows, columns, stride_r, stride_c, there, WHOLE: tl.constexpr):"
        about = f'"""Columns {self.spec.unit} * unit ... of each row, zero outside, or where there is no such tile."""'
        self.functions.append("\n    ".join([head, about, *self.loads(names, also="there"), f"return {', '.join(names)}"]))

        def call(left: str, down: str, across: str, there: str) -> str:
            place = ", ".join(self.place_of("held" if self.held > 1 else "g", down, across))
            return f"{left} = load(x_ptr, {place}, rows, columns, stride_r, stride_c, {there}, WHOLE)"

        self.start.append(call(", ".join(names), "down", "across", "tl.program_id(0) < total"))
        self.section("the next tile arrives while this one is computed")
        following = ", ".join(f"next_{name}" for name in names)
        self.add(*self.advance(), call(following, "next_down", "next_across", "tile + tl.num_programs(0) < total"))
        self.finish += [f"{name} = next_{name}" for name in names]

    def rotate(self) -> None:
        spec, r, u = self.spec, self.spec.rotation, self.spec.unit
        assert r is not None
        self.section(f"rotate: signs ({r.signs}), {r.size.bit_length() - 1} butterfly stages, 1/sqrt({r.size})")
        self.signs_after_load()
        self.hadamard()
        self.add(f"x = x * {self.normalization()}")
        if spec.block[1] > r.size:
            self.add(f"x = tl.where(unit[None, :] * {u} + k < width, x, 0.0)  # the block's padding is not rotated")
        if self.paired:
            names = [f"raw{i}" for i in range(self.pieces)]
            parts = self.halves_of("x", "rotated") if len(names) > 1 else ["x"]
            self.add(*(f"{name} = {self.call('to_bf16_pairs')}({part})" for name, part in zip(names, parts, strict=True)))
            unpacked = ", ".join(f"{self.call(self.unpack)}({name})" for name in names)
            self.add(f"x = {self.call('unhalve')}({unpacked})" if len(names) > 1 else f"x = {unpacked}")
        elif r.bf16:
            self.add(f"x = {self.call('round_bf16' if self.interpreted else 'round_bf16_pairs')}(x)")

    @property
    def pieces(self) -> int:
        """How many `raw0` ... of a unit there are where elements are `paired`."""
        return max(1, self.spec.unit // 8) if self.by_rows else 1

    def signs_after_load(self) -> None:
        """The rotation's signs, where they did not come with the load."""
        r = self.spec.rotation
        if r is not None and r.signs != "none" and not self.signs_on_load:
            self.signs()

    def normalization(self) -> str:
        """The factor that makes the rotation orthogonal."""
        assert self.spec.rotation is not None
        return f32(1 / math.sqrt(self.spec.rotation.size))

    def hadamard(self, below: int = 0) -> None:
        """The butterflies of x, without `normalization`; with `below`, those of a smaller distance."""
        r, u = self.spec.rotation, self.spec.unit
        assert r is not None
        self.add(f"x = tl.reshape(x, ({u} * TR * TB,))")
        butterfly = self.call("butterfly")
        h = 1
        while h < (below or r.size):
            self.add(f"x = {butterfly}(x, {self.apart(h)})")
            h *= 2
        self.add(f"x = tl.reshape(x, ({u}, TR * TB))")

    def apart(self, columns: int) -> str:
        """How far apart, in a flat tile, elements are that lie so many columns apart."""
        u = self.spec.unit
        return f"{columns} * TR * TB" if columns < u else self.distance(columns // u)

    @property
    def signs_on_load(self) -> bool:
        """Do fresh signs come with the conversion of BF16 pairs to FP32? Fixed ones are constants: butterflies absorb them."""
        r = self.spec.rotation
        return r is not None and r.signs == "fresh" and self.spec.input == "bf16" and not self.interpreted

    @property
    def signs_in_pairs(self) -> bool:
        """Two signs a register? Where registers are few."""
        return self.by_rows and self.spec.output != "amax"

    def signs_of_parts(self, count: int) -> None:
        """`sign0` ...: the fresh signs of each part of the units that a thread holds, uint32, 2^31 where negative."""
        n, held = self.spec.unit // self.parts, self.held
        groups = self.spec.rotation_units // held
        shifted = "(sign << 15).to(tl.int16)" if self.signs_in_pairs else "sign << 31"
        if count > 1:
            self.drawn_signs(count, groups, n, shifted)
        else:
            self.fresh_signs()
            self.once(f"sign0 = {shifted}")
        for i in range(count):
            self.spread_signs(f"sign{i}", groups, n, held)

    def drawn_signs(self, count: int, groups: int, n: int, shifted: str) -> None:
        """`sign0` ... (n, groups), `shifted`. Each of the rotation's signs is drawn by one thread."""
        self.seed()
        self.scalar("signs_site")
        first = f"tl.arange(0, {count * groups * n // 4}).to(tl.int64) * 4"
        words = f"{self.call('element_words')}({first}, {STREAM_SIGNS}, seed, signs_site.to(tl.uint32), 4)"
        halves = ", ".join(["2"] * (count.bit_length() - 1))
        self.once(
            f"sign = {words} >> 31",
            f"sign = tl.reshape(tl.trans({shifted}), ({groups}, {count}, {n}))  # of consecutive columns",
            f"sign = tl.reshape(tl.permute(sign, (2, 0, 1)), ({n}, {groups}, {halves}))",
        )
        names = ["sign"]
        while len(names) < count:
            size = len(names)
            parts = [f"sign{i}" if 2 * size == count else f"sign_{i}" for i in range(2 * size)]
            self.once(*(f"{parts[i]}, {parts[i + size]} = tl.split({name})" for i, name in enumerate(names)))
            names = parts

    def signs(self) -> None:
        spec, r, u = self.spec, self.spec.rotation, self.spec.unit
        assert r is not None
        units = spec.rotation_units
        if r.signs == "fresh":
            self.fresh_signs()
        else:
            n = len(r.vector)
            masks = [sum((v < 0) << i for i, v in enumerate(r.vector[f : f + 32])) for f in range(0, n, 32)]
            if n <= u:
                units = 1
                index = "k" if n == u else f"k % {n}"
            else:
                self.once(f"index = (tl.arange(0, {units})[None, :] * {u} + k) % {n}")
                index = "index % 32" if n > 32 else "index"
            mask = f"tl.full((1, 1), {masks[0]:#x}, tl.uint32)"
            for f, m in zip(range(32, n, 32), masks[1:], strict=True):
                mask = f"tl.where(index >= {f}, tl.full((1, 1), {m:#x}, tl.uint32), {mask})"
            self.once(f"sign = ({mask} >> ({index}).to(tl.uint32)) & 1")
        self.once("sign = 1.0 - 2.0 * sign.to(tl.float32)")
        if units > 1:
            self.spread_signs("sign", units, u)
        self.add("x = x * sign")

    def fresh_signs(self) -> None:
        """`sign` (U, units of a rotation): 1 where a sign is negative."""
        self.seed()
        self.scalar("signs_site")
        u, units, words = self.spec.unit, self.spec.rotation_units, self.call("element_words")
        start = f"tl.arange(0, {units}).to(tl.int64) * {u}"
        self.once(f"sign = {words}({start}, {STREAM_SIGNS}, seed, signs_site.to(tl.uint32), {u}) >> 31  # ({u}, {units})")

    def spread_signs(self, name: str, units: int, n: int, held: int = 1) -> None:
        """From (n, units) to (n, TR * TB / held)."""
        size = f"TR * TB // {held}" if held > 1 else "TR * TB"
        if units > 1 and self.by_rows:
            shape = f"({n}, TR * TB // {units * held}, {units})"
            self.once(f"{name} = tl.reshape(tl.broadcast_to({name}[:, None, :], {shape}), ({n}, {size}))")
        elif units > 1:
            shape = f"({n}, TB // {units}, {units}, TR)"
            self.once(f"{name} = tl.reshape(tl.broadcast_to({name}[:, None, :, None], {shape}), ({n}, TR * TB))")
        else:
            self.once(f"{name} = tl.broadcast_to({name}, ({n}, {size}))")
