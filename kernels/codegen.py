"""The Triton source of one kernel: `source(spec, target)`.

A kernel covers an operand with tiles of TR rows x TB units. A unit is U (16, or a smaller block) consecutive columns of a
row, held by one thread: a tile is a tensor (U, TR * TB), so that a block's amax, butterflies up to 16 and the packing of
codes stay in registers. The units of a tile are numbered along memory: row by row, or column by column where the operand is
a transpose.
"""

from __future__ import annotations

import re

from fp4.kernels.amax import Amax
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.posthoc import first_pass
from fp4.kernels.target import INTERPRETER, Target, TargetError
from fp4.kernels.writer import f32
from fp4.runtime.rounding import nan_code
from fp4.runtime.spec import FP8, MXFP4, MXFP8, NVFP4

FP8_TYPES = {"e4m3": "tl.float8e4nv", "e5m2": "tl.float8e5"}


def source(spec: KernelSpec, target: Target) -> str:
    """The text of a module whose function `kernel` is the kernel. The same text for equal arguments.

    Raises TargetError where the target cannot do what the specification asks.
    """
    if spec.dtype in FP8_TYPES and target.name != INTERPRETER and target.capability < 89:
        raise TargetError(f"{target.name} has no FP8 tensor cores to read dtype={spec.dtype!r}; write bf16")
    if spec.native_draws and not target.draws_e2m1:
        raise TargetError(
            f"{target.name} has no cvt.rs.satfinite.e2m1x4.f32, sm_100a and sm_103a have; leave native_draws out: stochastic "
            "rounding by arithmetic runs on every target"
        )
    kernel = GENERATORS.get(type(spec), Kernel)(spec, target)
    kernel.body()
    return kernel.module(kernel.title(), kernel.name())


class Kernel(Amax):
    """The kernel, from load to store."""

    def body(self) -> None:
        self.tile()
        self.load()
        if self.spec.output == "amax":
            self.amax()
            return
        if self.spec.rotation is not None:
            self.rotate()
        if self.spec.output in ("rotated", "values"):
            self.section("store")
            self.store_values("x", "width")
        else:
            self.quantize()

    def quantize(self) -> None:
        q = self.spec.quantizer
        assert q is not None
        self.call("bits")
        self.call("floats")
        self.section(f"amax of each block of {q.block[0]} x {q.block[1]}: NaN stays NaN")
        if self.interpreted:  # whose reductions by a function are slow; as integers, magnitudes have the same order
            self.add("largest = tl.max(bits(x) & 0x7FFFFFFF, 0)")
            self.block_reduce("largest")
            self.add("largest = floats(largest)")
        else:
            self.unit_amax()
            self.block_reduce("largest", "group_amax")
        self.add('finite = largest < float("inf")', "block_max = tl.where(finite, largest, 0.0)")
        if isinstance(q, NVFP4) and q.posthoc:
            first_pass(self, f32(q.factor))
            self.store_codes(8)
            return
        if isinstance(q, NVFP4):
            self.nvfp4(q)
        elif isinstance(q, FP8):
            self.fp8(q)
        else:
            assert isinstance(q, MXFP4 | MXFP8)
            self.mx(q)
        if not self.spec.fp8_blocks:
            self.add(f"scale_code = tl.where(finite, scale_code, {nan_code(q.scale_format)})")
        self.store_scales()
        if self.spec.output == "packed":
            self.store_codes(8 if q.packed else 16)
        else:
            self.decode()

    def unit_amax(self) -> None:
        """`largest` (TR * TB,): the largest magnitude of each unit, pairwise."""
        if not (self.paired and self.target.capability >= 86):
            if self.by_rows:
                self.tree("largest", "tl.abs(x)", self.call("larger_halves"))
            else:
                self.add(f"largest = tl.reduce(tl.abs(x), 0, {self.call('larger')})")
            return
        pairs, height = self.call("larger_pairs"), self.spec.unit // self.pieces
        if self.pieces == 2:
            self.add(f"pair = {self.call('larger_of')}(raw0, raw1)")
        else:
            self.add(f"pair = {pairs}(raw0)")
            height //= 2
        while height > 2:
            self.add(f"pair = {pairs}(pair)")
            height //= 2
        self.add(f"largest = tl.reduce(tl.abs(pair.to(tl.float32)), 0, {self.call('larger')})")

    # -- stores

    def store_scales(self) -> None:
        spec, q = self.spec, self.spec.quantizer
        assert q is not None
        self.section("store")
        if not q.has_outer_scale:
            scale = "tensor_scale" if spec.writes_tensor_scale else f32(1 / q.stretch)
            if spec.factored:
                scale = f"{scale} * tl.load({self.pointer('factor_ptr')})"
            self.once(f"tl.store({self.pointer('tensor_scale_ptr')} + tl.program_id(0), {scale}, mask=tl.program_id(0) == 0)")
        if spec.output == "packed":
            self.store_block_scales(q.block[0])
        if q.has_outer_scale and not spec.scaled:  # scaled: they are in the values
            self.store_outer_scales()

    def store_block_scales(self, block_rows: int) -> None:
        spec = self.spec
        scale = "s" if spec.fp8_blocks else "scale_code"
        if spec.scale_layout == "swizzled" and block_rows > 1:  # tensor cores read a scale for every row
            n, b = self.row_axis()
            scale, block_rows = f"{self.call('repeat')}({scale}, {n}, {b})", 1
        # Of a transpose, neighbours in a row are stored together, where a thread has the registers for it.
        across = not self.by_rows and spec.scale_layout == "plain" and not spec.crowded
        if across:
            scale = self.transposed(scale, *self.blocks(block_rows, spec.block_units))
        self.coordinates("block_row", "block_column", block_rows, spec.block_units, flat=not across)
        self.add(f"block_columns = units // {spec.block_units}" if spec.block_units > 1 else "block_columns = units")
        if spec.scale_layout == "swizzled":
            self.add(
                "at = (block_row // 128 * tl.cdiv(block_columns, 4) + block_column // 4) * 512",
                "at = at + block_row % 32 * 16 + block_row % 128 // 32 * 4 + block_column % 4",
            )
        else:
            self.add("at = block_row * block_columns + block_column")
        within = "(block_row < rows)" if block_rows == 1 else f"(block_row * {block_rows} < rows)"
        within = self.where(f"{within} & (block_column < block_columns)")
        stored = scale if spec.fp8_blocks else f"{scale}.to(tl.uint8)"
        self.add(f"tl.store({self.pointer('scales_ptr')} + at, {stored}, mask={within})")

    def store_outer_scales(self) -> None:
        units = self.spec.outer_units
        self.coordinates("group_row", "group_column", 1, units)
        n, b = self.unit_axis(units)
        self.add(
            f"groups = tl.cdiv(units, {units})",
            f"outer_scale = {self.call('group_max')}(tensor_scale, {n}, {b})  # equal in the group",
            f"tl.store({self.pointer('tensor_scale_ptr')} + group_row * groups + group_column, outer_scale, "
            f"mask={self.where('(group_row < rows) & (group_column < groups)')})",
        )

    def store_codes(self, width: int) -> None:
        u = self.spec.unit
        self.pointer("codes_ptr")
        if width == 16:
            inside = self.where("(row < rows) & (unit < units)")
            self.add(
                f"target = codes_ptr + ((row * units + unit) * {u})[None, :] + k",
                f"tl.store(target, code.to(tl.uint8), mask=({inside})[None, :])",
            )
            return
        if self.native or self.packs_values:
            if not (self.native or self.converts):
                self.packed_values()
            word = "(low.to(tl.uint64) & 0xFFFFFFFF) | (high.to(tl.uint64) << 32)"
            self.add("word = low" if u == 8 else f"word = ({word}).to(tl.int64, bitcast=True)")
        else:
            self.integer_codes()
        row, unit, word = self.stored("word")
        inside = self.where(f"({row} < rows) & ({unit} < units)")
        self.add(
            "# eight codes a word, the even column in the low nibble",
            f"tl.store(codes_ptr + {row} * units + {unit}, {word}, mask={inside})",
        )

    def integer_codes(self) -> None:
        """`word` of each unit, of `code`."""
        u = self.spec.unit
        self.add(
            "code = code | (bits(x) >> 28) & 8",
            f"shifted = tl.reshape(code, ({u // 8}, 8, TR * TB)) << (tl.arange(0, 8) * 4)[None, :, None]",
            f"words = tl.sum(shifted, 1).to(tl.uint32)  # ({u // 8}, TR * TB)",
        )
        if u == 16:
            self.add(
                "low, high = tl.split(tl.permute(words, (1, 0)))",
                "word = (low.to(tl.uint64) | (high.to(tl.uint64) << 32)).to(tl.int64, bitcast=True)",
            )
        else:
            self.add("word = tl.reshape(words, (TR * TB,)).to(tl.int32, bitcast=True)")

    def decode(self) -> None:
        spec, q = self.spec, self.spec.quantizer
        assert q is not None
        if not spec.fp8_blocks:
            self.add('s = tl.where(finite, s, float("nan"))')
        if self.in_pairs:
            self.decode_pairs()
            return
        signed = "value" if self.native else f"{self.call('with_sign')}(value, x)"
        self.add(f"x = {signed} * {self.over(self.spread('s'))}")
        if spec.scaled:
            if q.has_outer_scale:
                self.add("x = x * tensor_scale[None, :]")
            elif spec.writes_tensor_scale or q.has_tensor_scale:
                self.add("x = x * tensor_scale")
        self.store_values("x", "width")

    @property
    def in_pairs(self) -> bool:
        """Is the decoded value a BF16 number, a product of two? Then two neighbours are one instruction."""
        spec, q = self.spec, self.spec.quantizer
        if spec.output != "decoded" or spec.dtype != "bf16" or spec.scaled or not self.by_rows or self.interpreted:
            return False
        return q is not None and q.exact_in_bf16

    @property
    def keeps_raw(self) -> bool:
        """Are the signs of decoded values those of `raw0` ...?"""
        return self.in_pairs and self.paired and not self.native

    def decode_pairs(self) -> None:
        scale, parts = self.spread("s"), max(1, self.spec.unit // 8)
        values = self.split("value", "value", parts)
        scales = [scale for _ in values]
        if self.held > 1:
            self.add(f"s = tl.reshape({scale}, (1, TR * TB))")
            scales = [f"tl.reshape({s}, (TR * TB // {self.held},))" for s in self.split("s", "s", 1) for _ in range(parts)]
        if self.native:
            calls = [f"{self.call('decoded_pairs')}({v}, {s})" for v, s in zip(values, scales, strict=True)]
        elif self.keeps_raw:
            calls = [
                f"{self.call('signed_pairs')}({v}, raw{i}, {s})" for i, (v, s) in enumerate(zip(values, scales, strict=True))
            ]
        else:
            signed = zip(values, self.split("x", "x", parts), scales, strict=True)
            calls = [f"{self.call('signed_pairs_fp32')}({v}, {x}, {s})" for v, x, s in signed]
        names = [f"y{i}" for i in range(len(values))]
        self.add(*(f"{name} = {call}" for name, call in zip(names, calls, strict=True)))
        self.store_parts(names, parts, "width")

    def split(self, value: str, stem: str, parts: int) -> list[str]:
        """Names of the parts, of consecutive columns each, of the units that a thread holds, in their order in memory."""
        count = parts * self.held
        if count == 1:
            return [value]
        bits, of_parts = count.bit_length() - 1, parts.bit_length() - 1
        held = "TR * TB" if self.held == 1 else f"TR * TB // {self.held}"
        height = f"{value}.shape[0] // {parts}" if parts > 1 else f"{value}.shape[0]"
        shape = ", ".join([*["2"] * of_parts, height, held, *["2"] * (bits - of_parts)])
        order = [of_parts, of_parts + 1, *range(of_parts - 1, -1, -1), *range(bits + 1, of_parts + 1, -1)]
        names = [f"{stem}_"]
        self.add(f"{names[0]} = tl.permute(tl.reshape({value}, ({shape})), ({', '.join(map(str, order))}))")
        while len(names) < count:
            halves = (
                [f"{name}{bit}" for name in names for bit in "01"]
                if 2 * len(names) < count
                else [f"{stem}{i}" for i in range(count)]
            )
            self.add(*(f"{a}, {b} = tl.split({name})" for name, a, b in zip(names, halves[::2], halves[1::2], strict=True)))
            names = halves
        return names

    def store_values(self, name: str, width: str) -> None:
        """A tile of FP32 values to (rows, width) of the dtype."""
        spec, u = self.spec, self.spec.unit
        self.pointer("y_ptr")
        if spec.dtype == "bf16":
            self.add(f"{name} = {self.call('to_bf16')}({name})" if self.interpreted else f"{name} = {name}.to(tl.bfloat16)")
        elif spec.dtype in FP8_TYPES and self.interpreted:
            self.add(
                f"_, code = {self.round_exmy(f'tl.abs({name})', spec.dtype)}",
                f"code = tl.where({name} == {name}, code, 0x7F) | ({self.call('bits')}({name}) >> 24) & 0x80",
                f"{name} = code.to(tl.uint8)",
            )
        elif spec.dtype in FP8_TYPES:  # cvt.rn.satfinite, on sm_89 of the FP16 value
            self.add(f"{name} = {name}.to({FP8_TYPES[spec.dtype]}).to(tl.uint8, bitcast=True)")
        parts = max(1, {"bf16": u // 8, "fp32": u // 4}.get(spec.dtype, 1)) if self.by_rows else 1
        self.store_parts(self.split(name, name, parts), parts, width)

    def store_parts(self, names: list[str], parts: int, width: str) -> None:
        u, n = self.spec.unit, self.spec.unit // parts
        row, unit = self.load_place
        self.add(
            f"j = tl.arange(0, {n})[:, None]",
            f"target = {self.pointer('y_ptr')} + ({row} * {width} + {unit} * {u})[None, :] + j",
        )
        for i, part in enumerate(names):
            at = "j" if i == 0 else f"j + {i * n}"
            offset = "" if i == 0 else f" + {i * n}"
            self.add(
                f"inside = {self.where(f'({row} < rows)[None, :] & ({unit}[None, :] * {u} + {at} < {width})')}",
                f"tl.store(target{offset}, {part}, mask=inside)",
            )

    def read(self) -> tuple[object, ...]:
        """What is read, for the title."""
        return (self.spec.input,)

    def steps(self) -> list[str]:
        """What is done to the operand, from what is read."""
        return [str(part) for part in (*self.read(), self.spec.rotation, self.spec.quantizer) if part is not None]

    def name(self) -> str:
        """Of the function, e.g. fp4_bf16_hadamard_signs_fixed_nvfp4_packed_rows."""
        return re.sub(r"\W+", "_", " ".join(["fp4", *self.steps(), self.spec.output, self.spec.memory]).replace("]", ""))

    def title(self) -> str:
        spec = self.spec
        what = " -> ".join(self.steps())
        scaled = ", tensor scale included" if spec.scaled else ""
        output = f"{spec.output} {spec.dtype}" if spec.output in ("decoded", "rotated", "values") else spec.output
        return (
            f"{what}: {output}{scaled}, {spec.memory} together in memory, for {self.target.name}.\n\n"
            f"A program takes TR rows x TB units of {spec.unit} columns. WHOLE: no tile reaches beyond the operand. "
            "Compile with build.COMPILE_OPTIONS.\n"
        )


# The generator of a kind of specification, where it is not `Kernel`: the module that defines the kind adds it.
GENERATORS: dict[type[KernelSpec], type[Kernel]] = {}
