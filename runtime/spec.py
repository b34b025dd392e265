"""What a tensor is quantized to: quantizer and rotation specifications.

Specifications are frozen values. Each has a canonical text form (``str(q)``, read back by ``Quantizer.parse``), which is
how it travels as an argument of an ``fp4::`` op: readable in a printed graph, part of every cache key.

This module is pure Python; the arithmetic is in ``runtime/reference.py``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from fp4.runtime.formats import E2M1_MAX, EDEN_CLIP, SCALE_FORMATS, SR_GUARD

ROUNDINGS = ("nearest", "stochastic", "ms_eden")
MX_SCALE_RULES = ("floor", "even", "uos", "ceil", "rceil", "quest", "range_fit")
# Rules whose block maximum can exceed the largest element, so that stochastic rounding clips and is biased.
CLIPPING_RULES = ("floor", "even", "uos", "quest")
# NVIDIA's sign vector (TransformerEngine get_wgrad_sign_vector): one vector for every layer of the whole run.
NVIDIA_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


class SpecError(ValueError):
    """A quantizer or rotation that cannot mean what it says; the message names the field and the way out."""


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return "x".join(str(v) for v in value)
    return str(value)


def _read(text: str, like: Any) -> Any:
    if isinstance(like, bool):
        if text not in ("yes", "no"):
            raise ValueError(f"{text!r} is not yes or no")
        return text == "yes"
    if isinstance(like, tuple):
        return tuple(int(v) for v in text.split("x")) if text else ()
    return type(like)(text)


class _Spec:
    """Text form shared by quantizers and rotations: ``name[field=value,...]`` with the defaults left out."""

    name: ClassVar[str]

    def __str__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        parts = [f"{f.name}={_text(getattr(self, f.name))}" for f in fields if getattr(self, f.name) != f.default]
        return self.name + (f"[{','.join(parts)}]" if parts else "")

    @classmethod
    def _parse(cls, text: str, kinds: dict[str, type]) -> Any:
        name, bracket, rest = text.partition("[")
        if name not in kinds or (bracket and not rest.endswith("]")):
            raise SpecError(f"{text!r} is not a specification; known names: {', '.join(sorted(kinds))}")
        kind = kinds[name]
        defaults = {f.name: f.default for f in dataclasses.fields(kind)}
        values: dict[str, Any] = {}
        for part in filter(None, rest[:-1].split(",")):
            key, _, value = part.partition("=")
            if key not in defaults:
                raise SpecError(f"{name} has no field {key!r}; its fields: {', '.join(defaults)}")
            try:
                values[key] = _read(value, defaults[key])
            except ValueError as error:
                raise SpecError(f"{name} {key}={value!r}; write it in the form of {_text(defaults[key])!r}") from error
        return kind(**values)


@dataclass(frozen=True)
class Quantizer(_Spec):
    """Base of the quantizers: what every executor may ask of one. Use a subclass: NVFP4, MXFP4, MXFP8, FP8."""

    element: ClassVar[str] = "e2m1"

    # Fields every subclass has (declared there, since defaults differ).
    block: tuple[int, ...] = (1, 16)
    rounding: str = "nearest"
    outer = 0  # columns that share an FP32 outer scale (a field of NVFP4); 0 where there is none

    @staticmethod
    def parse(text: str) -> Quantizer:
        """The quantizer whose ``str`` is `text`. Raises SpecError for an unknown name or field."""
        return _Spec._parse(text, {k.name: k for k in (NVFP4, MXFP4, MXFP8, FP8)})

    def __post_init__(self) -> None:
        if self.rounding not in ROUNDINGS:
            raise SpecError(f"rounding={self.rounding!r}; write one of {', '.join(ROUNDINGS)}")
        if len(self.block) != 2 or min(self.block) < 1:
            raise SpecError(f"block={self.block!r}; write (rows, columns), e.g. (1, 16) or (16, 16)")

    @property
    def element_dtype(self) -> str:
        """Element format: e2m1 (4 bits, two codes a byte), e4m3 or e5m2 (8 bits, one code a byte)."""
        return getattr(self, "format", self.element)

    @property
    def packed(self) -> bool:
        """Two codes a byte?"""
        return self.element_dtype == "e2m1"

    @property
    def needs_seed(self) -> bool:
        return self.rounding != "nearest"

    @property
    def needs_amax(self) -> bool:
        """Does the arithmetic read the tensor's amax?"""
        return False

    @property
    def has_tensor_scale(self) -> bool:
        """Has the decoded value a factor beyond code times block scale?"""
        return self.needs_amax

    @property
    def stretch(self) -> float:
        """What values are multiplied by before they are quantized, a constant; the tensor scale undoes it."""
        return 1.0

    @property
    def has_outer_scale(self) -> bool:
        """Has the decoded value, in the tensor scale's place, an FP32 factor for every `outer` columns?"""
        return self.outer > 0

    @property
    def transposable(self) -> bool:
        """Square blocks and nearest rounding: quantizing the transpose gives the transpose, code for code."""
        return self.block[0] == self.block[1] and self.rounding == "nearest"

    @property
    def exact_in_bf16(self) -> bool:
        """Is every code times its block scale a BF16 number?"""
        return True

    @property
    def scale_format(self) -> str:
        raise NotImplementedError  # abstract: each subclass names its block scale's format

    @property
    def bits_per_element(self) -> float:
        """Stored bits an element, block scales and outer scales included."""
        scale_bits = 32 if self.scale_format == "fp32" else 8
        outer = 32 / self.outer if self.has_outer_scale else 0
        return (4 if self.packed else 8) + scale_bits / (self.block[0] * self.block[1]) + outer


@dataclass(frozen=True)
class NVFP4(Quantizer):
    """E2M1 elements, blocks of 16, E4M3 block scale, one FP32 tensor scale (NVIDIA 2509.25149, appendix B).

    block: (1, 16), or (16, 16) for weights, whose transpose then has the same codes.
    rounding: "nearest" (RNE), "stochastic", or "ms_eden" (Quartet II 2601.22813, algorithm 1; needs a rotation with
        fresh signs, which the policy checks).
    four_six: per block the better of mapping amax to 6 or to 4 (Four Over Six 2512.02010). Nearest only.
    range_guard: block scale from 6*(16/17) instead of 6, so that stochastic rounding never clips.
    scale: format of the block scale; E4M3, or another unsigned ExMy for the sweep of FP4 All the Way (2505.19115).
    tensor_scale: keep the second-level FP32 scale.
    outer: columns that share an FP32 outer scale in the tensor scale's place (TetraJet-v2 2510.27527: 128); 0 for
        none. Its arithmetic is the tensor scale's, with the amax of the 1 x `outer` group.
    posthoc: of ms_eden, the tensor scale from the corrected block scales instead of the amax (Quartet II's kernels, "post hoc
        range alignment"): the operand is read once. Other codes and scales than without.
    """

    name: ClassVar[str] = "nvfp4"
    block: tuple[int, ...] = (1, 16)
    rounding: str = "nearest"
    four_six: bool = False
    range_guard: bool = False
    scale: str = "e4m3"
    tensor_scale: bool = True
    outer: int = 0
    posthoc: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block not in ((1, 16), (16, 16), (1, 32), (1, 8), (1, 64), (1, 128)):
            raise SpecError(f"nvfp4 block={self.block}; write (1, 16), (16, 16), or (1, n) with n = 8, 32, 64, 128")
        if self.scale not in SCALE_FORMATS:
            raise SpecError(f"nvfp4 scale={self.scale!r}; write one of {', '.join(SCALE_FORMATS)}")
        if self.scale == "e8m0" and self.tensor_scale:
            raise SpecError(
                "nvfp4 scale='e8m0' has FP32's own range: a tensor scale that fills it makes the GEMM overflow. "
                "Write tensor_scale=False"
            )
        if self.four_six and self.rounding != "nearest":
            raise SpecError(
                "four_six needs rounding='nearest': choosing a block scale by its error is biased (+0.73 % on Gaussian "
                "data) when rounding is random. Write four_six=False, or rounding='nearest'"
            )
        if self.four_six and self.range_guard:
            raise SpecError("four_six already chooses what a block's amax is mapped to; write range_guard=False")
        if self.outer and (self.outer < 0 or self.outer % 16 or self.block != (1, 16) or self.scale != "e4m3"):
            raise SpecError(
                f"nvfp4 outer={self.outer}; write 0, or a multiple of 16 such as 128, with block=(1, 16) and scale='e4m3'"
            )
        if self.outer and (self.rounding == "ms_eden" or self.four_six or not self.tensor_scale):
            raise SpecError(
                "outer replaces the tensor scale of plain NVFP4; ms_eden and four_six leave headroom in theirs. Write "
                "outer=0, or rounding='nearest' or 'stochastic' with four_six=False and tensor_scale=True"
            )
        if self.posthoc and self.rounding != "ms_eden":
            raise SpecError(
                f"posthoc aligns the range of ms_eden's corrected scales, and rounding={self.rounding!r} corrects none. Write "
                "posthoc=False, or rounding='ms_eden'"
            )
        if self.rounding == "ms_eden":
            if self.scale != "e4m3" or not self.tensor_scale:
                raise SpecError(
                    f"ms_eden corrects an E4M3 block scale stochastically; with scale={self.scale!r} that is as noisy as "
                    "rounding every element. Write scale='e4m3', tensor_scale=True, or rounding='stochastic'"
                )
            if self.block != (1, 16):
                raise SpecError(f"ms_eden needs block=(1, 16), not {self.block}: the correction is per block of 16")

    @property
    def scale_format(self) -> str:
        return self.scale

    @property
    def exact_in_bf16(self) -> bool:
        # E2M1 adds 2 significant bits to the scale's 1 + mantissa; BF16 has 8. An FP32 outer scale has 24.
        return not self.has_outer_scale and SCALE_FORMATS[self.scale][1] <= 5

    @property
    def needs_amax(self) -> bool:
        return self.tensor_scale and not self.has_outer_scale and not self.posthoc

    @property
    def factor(self) -> float:
        """What a block's amax is mapped to."""
        if self.rounding == "ms_eden":
            return E2M1_MAX * SR_GUARD / EDEN_CLIP
        return E2M1_MAX * SR_GUARD if self.range_guard else float(E2M1_MAX)


@dataclass(frozen=True)
class MXFP4(Quantizer):
    """E2M1 elements, blocks of 32, E8M0 scale 2^E (OCP Microscaling 1.0).

    scale_rule: how E follows from the block: floor (OCP; clips), even, uos, ceil (never clips), quest (from the
        standard deviation; Quartet 2505.14669), range_fit (Quartet's backward; decoded value code*2^E/3).
    prescale: factor on the value before quantizing, undone in the decoded value (Amazon 2502.20586: 3/4 with floor, so that
        nothing clips).
    allow_clipping: stochastic rounding on a rule that clips is biased; say so to have it all the same.
    """

    name: ClassVar[str] = "mxfp4"
    block: tuple[int, ...] = (1, 32)
    rounding: str = "nearest"
    scale_rule: str = "floor"
    prescale: float = 1.0
    allow_clipping: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block not in ((1, 32), (32, 32)):
            raise SpecError(f"mxfp4 block={self.block}; write (1, 32) or (32, 32)")
        if self.scale_rule not in MX_SCALE_RULES or self.scale_rule == "rceil":
            raise SpecError(f"mxfp4 scale_rule={self.scale_rule!r}; write one of floor, even, uos, ceil, quest, range_fit")
        if not 0 < self.prescale <= 1:
            raise SpecError(f"mxfp4 prescale={self.prescale}; write a factor above 0 and up to 1, e.g. 0.75")
        if self.rounding == "ms_eden":
            raise SpecError(
                "ms_eden on E8M0 scales gains nothing: rounding a power of two up or down is as noisy as rounding "
                "every element (Quartet II, table of scale formats). Write NVFP4(rounding='ms_eden')"
            )
        clips = self.scale_rule in CLIPPING_RULES and not (self.scale_rule == "floor" and self.prescale <= 0.75)
        if self.rounding == "stochastic" and clips and not self.allow_clipping:
            raise SpecError(
                f"stochastic rounding with scale_rule={self.scale_rule!r} clips the block maximum and is not unbiased. Write "
                "scale_rule='ceil', or scale_rule='floor' with prescale=0.75, or allow_clipping=True"
            )

    @property
    def scale_format(self) -> str:
        return "e8m0"

    @property
    def has_tensor_scale(self) -> bool:
        return self.stretch != 1

    @property
    def stretch(self) -> float:
        return (3.0 if self.scale_rule == "range_fit" else 1.0) * self.prescale


@dataclass(frozen=True)
class MXFP8(Quantizer):
    """E4M3 or E5M2 elements, blocks of 32, E8M0 scale (NVIDIA 2506.08027).

    scale_rule: rceil (2^ceil(log2(amax/max)); never clips) or floor (OCP).
    """

    name: ClassVar[str] = "mxfp8"
    block: tuple[int, ...] = (1, 32)
    rounding: str = "nearest"
    format: str = "e4m3"
    scale_rule: str = "rceil"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_fp8(self)
        if self.block not in ((1, 32), (32, 32)) or self.scale_rule not in ("rceil", "floor"):
            raise SpecError(f"mxfp8 block={self.block}, scale_rule={self.scale_rule!r}; write (1, 32) and rceil or floor")

    @property
    def scale_format(self) -> str:
        return "e8m0"


@dataclass(frozen=True)
class FP8(Quantizer):
    """E4M3 or E5M2 elements with an FP32 scale a block (DeepSeek-V3 2412.19437): 1x128 for X and dY, 128x128 for W."""

    name: ClassVar[str] = "fp8"
    block: tuple[int, ...] = (1, 128)
    rounding: str = "nearest"
    format: str = "e4m3"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_fp8(self)
        if self.block not in ((1, 128), (128, 128), (1, 32)):
            raise SpecError(f"fp8 block={self.block}; write (1, 128), (128, 128) or (1, 32)")

    @property
    def scale_format(self) -> str:
        return "fp32"

    @property
    def exact_in_bf16(self) -> bool:
        return False  # an FP32 scale has 24 significant bits


def _check_fp8(q: MXFP8 | FP8) -> None:
    if q.format not in ("e4m3", "e5m2"):
        raise SpecError(f"{q.name} format={q.format!r}; write e4m3 or e5m2")
    if q.rounding != "nearest":
        raise SpecError(f"{q.name} rounds to nearest only, not {q.rounding!r}; stochastic rounding is for E2M1 elements")


@dataclass(frozen=True)
class Rotation(_Spec):
    """Block-diagonal Hadamard rotation along the contracted dimension: diag(signs), Sylvester H_n, times 1/sqrt(n).

    Both operands of a GEMM are rotated alike, so the rotation cancels in the product.
    size: n, a power of two from 16 to 256; a length that is no multiple of n is zero-padded.
    signs: "none", "fixed" (`vector`, NVIDIA's by default, repeated to n), or "fresh" (drawn from seed and site a step).
    bf16: round the rotated values to BF16 (NVIDIA's kernels do); else they stay FP32.
    """

    name: ClassVar[str] = "hadamard"
    size: int = 16
    signs: str = "none"
    bf16: bool = True
    vector: tuple[int, ...] = NVIDIA_SIGNS

    def __post_init__(self) -> None:
        if self.size not in (16, 32, 64, 128, 256):
            raise SpecError(f"rotation size={self.size}; write 16, 32, 64, 128 or 256")
        if self.signs not in ("none", "fixed", "fresh"):
            raise SpecError(f"rotation signs={self.signs!r}; write none, fixed or fresh")
        if any(v not in (-1, 1) for v in self.vector) or not self.vector or self.size % len(self.vector):
            raise SpecError(f"rotation vector={self.vector}; write +-1 entries, as many as divide the size {self.size}")

    @staticmethod
    def parse(text: str) -> Rotation:
        """The rotation whose ``str`` is `text`. Raises SpecError for an unknown name or field."""
        return _Spec._parse(text, {Rotation.name: Rotation})

    @property
    def needs_seed(self) -> bool:
        return self.signs == "fresh"
