"""Kernels whose operand is a packed FP4 tensor: decode, transpose, rotate, quantize in one ("re-quantize").

The backward of Quartet II (2601.22813, section 3.3) quantizes what forward saved, decoded, transposed and rotated; Quartet's
(2505.14669) does likewise. Here the codes are read where they lie and decoded in registers, half a byte an element. Rotation,
scales, rounding, draws and stores are those of `codegen.Kernel`.

A word is eight codes. Of the packed matrix itself (memory "rows") a unit's words lie together in its row. Of its transpose
("columns") a word holds one column of eight rows of the operand: the words pass through shared memory, an eighth of the
elements' count, so that each thread holds one row of all the units that are rotated together.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp4.kernels.codegen import GENERATORS, Kernel
from fp4.kernels.kernelspec import KernelSpec
from fp4.runtime.formats import SCALE_FORMATS
from fp4.runtime.rounding import nan_code
from fp4.runtime.spec import NVFP4, Quantizer, SpecError

CODES = 8  # of a word
PLAIN = NVFP4()
FACTORS = ("none", "tensor", "outer")


def readable(source: Quantizer) -> bool:
    """Can a kernel read what this quantizer packed?"""
    return source.packed and source.block[1] % 16 == 0


@dataclass(frozen=True)
class PackedSpec(KernelSpec):
    """`KernelSpec` of an operand that is decoded from codes.

    source: the quantizer that packed it, along its own rows. memory: "rows", the operand is the packed matrix; "columns", its
    transpose. input: bf16 or fp32, what the codes decode to. factor: "none", code times block scale; "tensor" or "outer",
    times the tensor scale or the outer scale too. ragged: the packed matrix's columns are no multiple of 8.
    """

    source: Quantizer = PLAIN
    factor: str = "none"
    ragged: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not readable(self.source):
            raise SpecError(f"source={self.source}; the kernels read packed E2M1 codes in blocks of a multiple of 16 columns")
        if self.factor not in FACTORS or (self.factor == "outer") > self.source.has_outer_scale:
            raise SpecError(f"factor={self.factor!r} of {self.source}; write one of {', '.join(FACTORS)}")
        if self.input == "fp16":
            raise SpecError("input='fp16'; codes decode to bf16 or fp32")

    @property
    def units_held(self) -> int:
        return 1

    @property
    def pointer_types(self) -> dict[str, str]:
        return {**super().pointer_types, "packed_ptr": "*i32", "packed_scales_ptr": "*u8", "packed_factor_ptr": "*fp32"}


class PackedKernel(Kernel):
    """`Kernel` that reads codes."""

    spec: PackedSpec

    paired = reads_pairs = False  # what is loaded are codes
    ahead = False

    @property
    def down_first(self) -> bool:
        return False

    @property
    def signs_on_load(self) -> bool:
        r = self.spec.rotation
        return r is not None and r.signs == "fresh" and not self.interpreted

    def __init__(self, spec: PackedSpec, target: object) -> None:
        super().__init__(spec, target)  # type: ignore[arg-type]
        self.pointers = ["packed_ptr", "packed_scales_ptr"]
        self.scalars = ["rows", "columns", "packed_stride", "packed_scales_stride"]

    def read(self) -> tuple[object, ...]:
        transposed = "transposed" if self.spec.memory == "columns" else None
        return self.spec.source, self.spec.input, transposed

    def load(self) -> None:
        spec = self.spec
        self.section(f"load: words of {CODES} codes, decoded to x ({spec.unit}, TR * TB), zero outside")
        if self.by_rows:
            self.load_rows()
        else:
            self.load_columns()

    def load_rows(self) -> None:
        """The packed matrix itself."""
        u = self.spec.unit
        self.add(
            f"w = tl.arange(0, {u // CODES})[:, None]",
            f"inside = {self.where(f'(row < rows)[None, :] & (unit[None, :] * {u} + w * {CODES} < columns)')}",
            f"words = tl.load(packed_ptr + (row * packed_stride + unit * {u // CODES})[None, :] + w, mask=inside, other=0)",
        )
        self.decode_words(
            "row",
            f"unit * {u}",
            self.where(f"(row < rows) & (unit * {u} < columns)"),
            word="[:, None, :]",
            code="[None, :, None]",
            scale="[None, None, :]",
        )
        if self.spec.ragged:
            self.add(f"x = tl.where(unit[None, :] * {u} + k < columns, x, 0.0)")

    def load_columns(self) -> None:
        """The transpose: the packed matrix's row is the operand's column."""
        u = self.spec.unit
        self.add(
            f"w = tl.arange(0, TR * TB // {CODES})",
            f"word_row = (down * (TR // {CODES}) + w % (TR // {CODES})).to(tl.int64)",
            f"column = (across * TB + w // (TR // {CODES})).to(tl.int64)[None, :] * {u} + k",
            f"inside = {self.where(f'(word_row * {CODES} < rows)[None, :] & (column < columns)')}",
            "words = tl.load(packed_ptr + column * packed_stride + word_row[None, :], mask=inside, other=0)",
        )
        self.decode_words(
            "column",
            f"word_row[None, :] * {CODES}",
            "inside",
            word="[:, :, None]",
            code="[None, None, :]",
            scale="[:, :, None]",
        )
        if self.spec.ragged:
            self.add("x = tl.where((row < rows)[None, :], x, 0.0)")

    def decode_words(self, row: str, column: str, inside: str, *, word: str, code: str, scale: str) -> None:
        """`x`, the values of the words as `reference.dequantize` decodes them.

        row, column, inside: where in the packed matrix the scales lie. word, code, scale: indices that make words, positions in
        a word, and scales broadcast.
        """
        spec, source = self.spec, self.spec.source
        rows, columns = source.block
        block_row = f"{row} // {rows}" if rows > 1 else row
        self.add(
            f"place = {block_row} * packed_scales_stride + {column} // {columns}",
            f"scale_code = tl.load(packed_scales_ptr + place, mask={inside}, other=0).to(tl.int32)",
        )
        self.decode_scale()
        code = f"words{word} << (28 - tl.arange(0, {CODES}) * 4){code}"
        if self.signs_on_load:
            self.fresh_signs()
            self.once("sign = sign << 31")
            self.spread_signs("sign", spec.rotation_units, spec.unit)
            shape = (
                f"({spec.unit // CODES}, {CODES}, TR * TB)" if self.by_rows else f"({spec.unit}, TR * TB // {CODES}, {CODES})"
            )
            value = f"{self.call('element_value_signed')}({code}, tl.reshape(sign, {shape}))"
        else:
            value = f"{self.call('element_value')}({code})"
        self.add(f"x = {value} * scale{scale}")
        if spec.factor == "tensor":
            self.add(f"x = x * tl.load({self.pointer('packed_factor_ptr')})")
        elif spec.factor == "outer":
            self.scalar("packed_factor_stride")
            self.add(
                f"place = {row} * packed_factor_stride + {column} // {source.outer}",
                f"x = x * tl.load({self.pointer('packed_factor_ptr')} + place, mask={inside}, other=0.0){scale}",
            )
        self.add(f"x = tl.reshape(x, ({spec.unit}, TR * TB))")
        if spec.input == "bf16" and (spec.factor != "none" or not source.exact_in_bf16):
            self.add(f"x = {self.call('round_bf16' if self.interpreted else 'round_bf16_pairs')}(x)")

    def decode_scale(self) -> None:
        """`scale`, the value of `scale_code`."""
        source = self.spec.source
        nan = nan_code(source.scale_format)
        if source.scale_format == "e8m0":
            self.add(f'scale = tl.where(scale_code == {nan}, float("nan"), {self.call("e8m0_value")}(scale_code))')
        elif source.scale_format == "e4m3" and not self.interpreted and self.target.capability >= 89:  # cvt.rn.f16x2.e4m3x2
            self.add("scale = scale_code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)")
        else:
            _, mantissa, bias, _ = SCALE_FORMATS[source.scale_format]
            self.add(f"scale = {self.call('exmy_value')}(scale_code, {mantissa}, {bias}, {nan})")


GENERATORS[PackedSpec] = PackedKernel
