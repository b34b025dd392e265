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
        row, unit = ("g // TB", "g % TB") if self.by_rows else ("g % TR", "g // TR")
        self.once(
            f"width = {width}",
            f"units = {units}",
            *self.tiles(),
            "g = tl.arange(0, TR * TB)",
            f"k = tl.arange(0, {u})[:, None]",
        )
        self.add(
            f"# unit g holds columns {u} * unit ... {u} * unit + {u - 1} of its row",
            f"row = (down * TR + {row}).to(tl.int64)",
            f"unit = across * TB + {unit}",
        )

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
        # A thread loads 16 bytes at once: a unit comes in parts, which would else go to several threads.
        parts = max(1, spec.unit * (4 if spec.input == "fp32" else 2) // 16) if self.by_rows else 1
        pairs = spec.input == "bf16" and not self.interpreted
        stem = "raw" if pairs else "x"
        names = [f"{stem}{i}" for i in range(parts)] if parts > 1 or pairs else ["x"]
        if self.ahead:
            self.load_ahead(names)
        else:
            self.section(f"load: x ({spec.unit}, TR * TB), zero outside")
            self.add(*self.loads(names))
        if not pairs:
            self.add(*(f"{name} = {name}.to(tl.float32)" for name in names))
        elif self.signs_on_load:
            self.signs_of_parts(parts)
        for i, name in enumerate(names if pairs else []):
            call = f"unpack_signed({name}, sign{i})" if self.signs_on_load else f"unpack({name})"
            self.call(call.partition("(")[0])
            self.add(f"x{i if parts > 1 else ''} = {call}")
        if parts == 2:
            self.add(f"x = tl.reshape(tl.permute(tl.join(x0, x1), (2, 0, 1)), ({spec.unit}, TR * TB))")
        elif parts == 4:
            joined = "tl.join(tl.join(x0, x1), tl.join(x2, x3))"
            self.add(f"x = tl.reshape(tl.permute({joined}, (3, 2, 0, 1)), ({spec.unit}, TR * TB))")

    def loads(self, names: list[str]) -> list[str]:
        """The parts of the tile's units, in the operand's dtype."""
        spec, n = self.spec, self.spec.unit // len(names)
        lines = [
            f"source = (x_ptr + row * stride_r + unit.to(tl.int64) * stride_c * {spec.unit})[None, :]",
            f"j = tl.arange(0, {n})[:, None]",
        ]
        if not self.by_rows:
            rows = spec.rows_held
            lines.append(
                f"source = tl.max_contiguous(source, (1, {rows}))  # {rows} rows a thread: more would take all its registers"
            )
        for i, name in enumerate(names):
            at = "j" if i == 0 else f"(j + {i * n})"
            lines += [
                f"inside = (row < rows)[None, :] & (unit[None, :] * {spec.unit} + {at} < columns)",
                f"{name} = tl.load(source + {at}.to(tl.int64) * stride_c, mask=inside, other=0.0)",
            ]
        return lines

    @property
    def ahead(self) -> bool:
        """Is the next tile loaded while this one is computed? Where a thread computes much and few programs fit a GPU."""
        q = self.spec.quantizer
        much = isinstance(q, NVFP4) and (q.four_six or (q.rounding == "ms_eden" and self.spec.output == "decoded"))
        return much and self.loops and not self.interpreted

    def load_ahead(self, names: list[str]) -> None:
        """Loads by a function, of the first tile before the loop, then in it of the next one."""
        head = "@triton.jit\ndef load(x_ptr, row, unit, rows, columns, stride_r, stride_c):"
        about = f'"""Columns {self.spec.unit} * unit ... of each row, zero outside."""'
        self.functions.append("\n    ".join([head, about, *self.loads(names), f"return {', '.join(names)}"]))
        row, unit = ("g // TB", "g % TB") if self.by_rows else ("g % TR", "g // TR")

        def call(left: str, down: str, across: str) -> str:
            place = f"({down} * TR + {row}).to(tl.int64), {across} * TB + {unit}"
            return f"{left} = load(x_ptr, {place}, rows, columns, stride_r, stride_c)"

        self.start.append(call(", ".join(names), "down", "across"))
        self.section("the next tile arrives while this one is computed")
        self.add(*self.advance(), call(", ".join(f"next_{name}" for name in names), "next_down", "next_across"))
        self.finish += [f"{name} = next_{name}" for name in names]

    def rotate(self) -> None:
        spec, r, u = self.spec, self.spec.rotation, self.spec.unit
        assert r is not None
        self.section(f"rotate: signs ({r.signs}), {r.size.bit_length() - 1} butterfly stages, 1/sqrt({r.size})")
        if r.signs != "none" and not self.signs_on_load:
            self.signs()
        self.hadamard()
        if spec.output == "amax":
            return  # the factor and the rounding to BF16 keep the order: they are the largest one's alone
        self.add(f"x = x * {self.normalization()}")
        if r.bf16:
            self.add(f"x = {self.call('round_bf16' if self.interpreted else 'round_bf16_pairs')}(x)")
        if spec.block[1] > r.size:
            self.add(f"x = tl.where(unit[None, :] * {u} + k < width, x, 0.0)  # the block's padding is not rotated")

    def normalization(self) -> str:
        """The factor that makes the rotation orthogonal."""
        assert self.spec.rotation is not None
        return f32(1 / math.sqrt(self.spec.rotation.size))

    def hadamard(self) -> None:
        """The butterflies of x, without `normalization`."""
        r, u = self.spec.rotation, self.spec.unit
        assert r is not None
        self.add(f"x = tl.reshape(x, ({u} * TR * TB,))")
        butterfly = self.call("butterfly")
        h = 1
        while h < r.size:
            self.add(f"x = {butterfly}(x, {f'{h} * TR * TB' if h < u else self.distance(h // u)})")
            h *= 2
        self.add(f"x = tl.reshape(x, ({u}, TR * TB))")

    @property
    def signs_on_load(self) -> bool:
        """Do fresh signs come with the conversion of BF16 pairs to FP32? Fixed ones are constants: butterflies absorb them."""
        r = self.spec.rotation
        return r is not None and r.signs == "fresh" and self.spec.input == "bf16" and not self.interpreted

    def signs_of_parts(self, parts: int) -> None:
        """`sign0` ...: the fresh signs of each part of a unit, uint32, 2^31 where negative."""
        n = self.spec.unit // parts
        for i in range(parts):
            self.fresh_signs(f"sign{i}", i * n, n)
            self.once(f"sign{i} = sign{i} << 31")
            self.spread_signs(f"sign{i}", self.spec.rotation_units, n)

    def signs(self) -> None:
        spec, r, u = self.spec, self.spec.rotation, self.spec.unit
        assert r is not None
        units = spec.rotation_units
        if r.signs == "fresh":
            self.fresh_signs("sign", 0, u)
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

    def fresh_signs(self, name: str, first: int, n: int) -> None:
        """`name` (n, units of a rotation): 1 where a sign is negative, of n columns of each unit from the first."""
        u, units = self.spec.unit, self.spec.rotation_units
        self.seed()
        self.scalar("signs_site")
        start = f"tl.arange(0, {units}).to(tl.int64) * {u}" + (f" + {first}" if first else "")
        words = self.call("element_words")
        self.once(f"{name} = {words}({start}, {STREAM_SIGNS}, seed, signs_site.to(tl.uint32), {n}) >> 31  # ({n}, {units})")

    def spread_signs(self, name: str, units: int, n: int) -> None:
        """From (n, units) to (n, TR * TB)."""
        if units > 1 and self.by_rows:
            shape = f"({n}, TR * TB // {units}, {units})"
            self.once(f"{name} = tl.reshape(tl.broadcast_to({name}[:, None, :], {shape}), ({n}, TR * TB))")
        elif units > 1:
            shape = f"({n}, TB // {units}, {units}, TR)"
            self.once(f"{name} = tl.reshape(tl.broadcast_to({name}[:, None, :, None], {shape}), ({n}, TR * TB))")
        else:
            self.once(f"{name} = tl.broadcast_to({name}, ({n}, TR * TB))")
