"""What one generated kernel does: a frozen value that its source is a function of."""

from __future__ import annotations

from dataclasses import dataclass

from fp4.runtime.spec import FP8, MXFP4, NVFP4, Quantizer, Rotation, SpecError

OUTPUTS = ("packed", "decoded", "rotated", "amax", "values")
DTYPES = ("bf16", "fp32", "e4m3", "e5m2")
INPUTS = ("bf16", "fp16", "fp32")
MEMORY = ("rows", "columns")
SCALE_LAYOUTS = ("plain", "swizzled")


@dataclass(frozen=True)
class KernelSpec:
    """One kernel over an operand (R, C), contracted dimension last, whatever its strides.

    quantizer: what it quantizes to; None with output "rotated", "amax" or "values".
    rotation: applied before everything else, or None.
    output: "packed", codes and scales; "decoded", code times block scale, never packed; "rotated", the rotated operand; "amax",
        its largest finite magnitude; "values", the operand as it is read (of codes, decoded).
    dtype: of the decoded or rotated values; e4m3 and e5m2 for the decoded values of MXFP4 (exact within their range, saturating
        beyond).
    scaled: decoded values times the tensor scale.
    memory: what lies together in memory, "rows" of the operand or its "columns" (the operand is a transpose); only speed
        depends on it.
    input: bf16, fp16 or fp32.
    aligned: C (rotated: after padding) is a multiple of 8, so one counter's eight draws go to neighbours.
    single: C is 1, which Triton would compile in: see `operand.Operand.tile`.
    scale_layout: "plain", or "swizzled" (the tensor cores': one scale a row, whatever the block's rows).
    located: the operand is a part of a matrix, and its elements draw as that matrix's: the seed is one of ``rng.locate``.
    native_draws: stochastic rounding by the target's own instruction, whose draws are those of runtime/native.py.
    factored: the tensor scale is written times a factor that is read: what a product of two operands is scaled by.
    """

    quantizer: Quantizer | None
    rotation: Rotation | None = None
    output: str = "packed"
    dtype: str = "bf16"
    scaled: bool = False
    memory: str = "rows"
    input: str = "bf16"
    aligned: bool = True
    scale_layout: str = "plain"
    located: bool = False
    native_draws: bool = False
    single: bool = False
    factored: bool = False

    def __post_init__(self) -> None:
        choices = (
            ("output", OUTPUTS),
            ("dtype", DTYPES),
            ("memory", MEMORY),
            ("input", INPUTS),
            ("scale_layout", SCALE_LAYOUTS),
        )
        for field, allowed in choices:
            if getattr(self, field) not in allowed:
                raise SpecError(f"kernel {field}={getattr(self, field)!r}; write one of {', '.join(allowed)}")
        q = self.quantizer
        if (q is None) != (self.output in ("rotated", "amax", "values")):
            raise SpecError(
                f"output={self.output!r}, quantizer={q}; write a quantizer for packed and decoded, None for the other outputs"
            )
        if self.output == "rotated" and self.rotation is None:
            raise SpecError("output='rotated' needs a rotation, e.g. Rotation(16)")
        if self.dtype in ("e4m3", "e5m2") and not self.stores_fp8:
            raise SpecError(f"dtype={self.dtype!r} is for decoded MXFP4, whose scale is a power of two; write bf16 or fp32")
        if q is not None and q.outer and (q.outer & (q.outer - 1)):
            raise SpecError(f"{q}: the kernels need outer to be a power of two, e.g. 128")
        if self.posthoc and (self.output != "packed" or self.scale_layout != "plain"):
            raise SpecError(
                f"{q}: the first pass of posthoc writes packed codes and FP32 scales; `posthoc` makes the rest of them"
            )
        if self.scale_layout == "swizzled" and (self.output != "packed" or q is None or q.scale_format == "fp32"):
            raise SpecError("scale_layout='swizzled' is for the one-byte scales of packed output; write 'plain'")

        if self.native_draws and not self.draws_elements:
            raise SpecError(f"native_draws=True with {q}, which draws for no element; write rounding='stochastic'")
        if self.factored and (self.output != "decoded" or q is None or q.has_outer_scale or self.posthoc):
            raise SpecError(
                f"factored=True with {q}, output={self.output!r}; the one tensor scale of decoded values has a factor"
            )

    @property
    def stores_fp8(self) -> bool:
        """Can it store its values as FP8?"""
        return self.output == "decoded" and isinstance(self.quantizer, MXFP4) and not self.scaled

    @property
    def pointer_types(self) -> dict[str, str]:
        """Triton's types of the arguments that only this kind of specification has."""
        return {"wide_ptr": "*fp32", "wide_amax_ptr": "*i32"} if self.posthoc else {}

    @property
    def posthoc(self) -> bool:
        """Is this the first pass of MS-EDEN with post hoc range alignment? (`posthoc`)"""
        return isinstance(self.quantizer, NVFP4) and self.quantizer.posthoc

    @property
    def block(self) -> tuple[int, int]:
        return (1, 16) if self.quantizer is None else (self.quantizer.block[0], self.quantizer.block[1])

    @property
    def unit(self) -> int:
        """Consecutive columns that one thread holds: 16, or a smaller block."""
        return min(16, self.block[1])

    @property
    def block_units(self) -> int:
        """Units in a row of a block."""
        return self.block[1] // self.unit

    @property
    def rotation_units(self) -> int:
        """Units that are rotated together."""
        return 1 if self.rotation is None else max(1, self.rotation.size // self.unit)

    @property
    def rows_held(self) -> int:
        """Rows of a unit that one thread holds where rows lie together in memory."""
        if self.draws_elements and not self.aligned:
            return 1  # a Philox call for each element
        return 2 if self.crowded else 4

    @property
    def crowded(self) -> bool:
        """Does a thread need nearly all its registers?"""
        q = self.quantizer
        return isinstance(q, NVFP4) and (q.four_six or (q.rounding == "ms_eden" and self.output == "packed"))

    @property
    def units_held(self) -> int:
        """Neighbouring units of a row that one thread holds, so that a butterfly across them needs no shuffle.

        Only where a thread has two anyway: registers are worth more than the shuffles elsewhere, as measured on an H200.
        """
        q = self.quantizer
        eden = isinstance(q, NVFP4) and q.rounding == "ms_eden" and not q.posthoc
        return 2 if eden and self.memory == "rows" and self.rotation_units > 1 and self.input != "fp32" else 1

    @property
    def outer_units(self) -> int:
        """Units that share an outer scale; 0 without one."""
        return 0 if self.quantizer is None else self.quantizer.outer // self.unit

    @property
    def least_tile(self) -> tuple[int, int]:
        """The least rows and units of a tile; tiles are powers of two."""
        return self.block[0], max(self.block_units, self.rotation_units, self.outer_units, 1)

    @property
    def writes_tensor_scale(self) -> bool:
        """Does the kernel compute the tensor scale? Where it is a constant of the quantizer, it does not."""
        return isinstance(self.quantizer, NVFP4) and self.quantizer.needs_amax

    @property
    def draws_elements(self) -> bool:
        return self.quantizer is not None and self.quantizer.rounding == "stochastic"

    @property
    def fp8_blocks(self) -> bool:
        """FP32 block scales?"""
        return isinstance(self.quantizer, FP8)
