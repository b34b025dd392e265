"""Specifications: text form, refusals and what they say, values as dictionary keys and across processes."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given, settings

from fp4.runtime.spec import FP8, MXFP4, MXFP8, NVFP4, Quantizer, Rotation, SpecError
from tests.runtime import cases
from tests.runtime.strategies import quantizers, rotations

ROTATIONS = [Rotation(size=n, signs=s, bf16=b) for n in (16, 256) for s in ("none", "fresh") for b in (True, False)]
ALL = (*cases.QUANTIZERS, *ROTATIONS)


@given(quantizers())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_quantizer_text_reads_back(q: Quantizer) -> None:
    assert Quantizer.parse(str(q)) == q
    assert str(Quantizer.parse(str(q))) == str(q)


@given(rotations())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_rotation_text_reads_back(r: Rotation) -> None:
    assert Rotation.parse(str(r)) == r


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (NVFP4(), "nvfp4"),
        (NVFP4(block=(16, 16), four_six=True), "nvfp4[block=16x16,four_six=yes]"),
        (NVFP4(tensor_scale=False), "nvfp4[tensor_scale=no]"),
        (NVFP4(rounding="stochastic", outer=128), "nvfp4[rounding=stochastic,outer=128]"),
        (MXFP4(rounding="stochastic", prescale=0.75), "mxfp4[rounding=stochastic,prescale=0.75]"),
        (MXFP8(format="e5m2"), "mxfp8[format=e5m2]"),
        (FP8(block=(128, 128)), "fp8[block=128x128]"),
        (Rotation(), "hadamard"),
        (Rotation(size=32, signs="fixed", bf16=False, vector=(1, -1)), "hadamard[size=32,signs=fixed,bf16=no,vector=1x-1]"),
    ],
    ids=str,
)
def test_text(spec: Quantizer | Rotation, text: str) -> None:
    assert str(spec) == text


def test_texts_are_distinct() -> None:
    assert len({str(q) for q in ALL}) == len(set(ALL)) == len(ALL)


@pytest.mark.parametrize("spec", ALL, ids=str)
def test_is_a_value(spec: Quantizer | Rotation) -> None:
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    assert hash(again) == hash(spec)
    assert again is not spec
    with pytest.raises(AttributeError):
        setattr(spec, dataclasses.fields(spec)[0].name, None)


def test_quantizers_of_equal_fields_and_other_names_differ() -> None:
    assert MXFP8() != MXFP8(format="e5m2")
    assert NVFP4(block=(1, 32)) != MXFP4(block=(1, 32))


REFUSALS: tuple[tuple[type, dict[str, Any], str], ...] = (
    (NVFP4, {"rounding": "up"}, "rounding='up'; write one of nearest, stochastic, ms_eden"),
    (NVFP4, {"block": (16,)}, r"block=\(16,\); write \(rows, columns\)"),
    (NVFP4, {"block": (0, 16)}, r"block=\(0, 16\); write \(rows, columns\)"),
    (NVFP4, {"block": (32, 32)}, r"nvfp4 block=\(32, 32\); write \(1, 16\), \(16, 16\)"),
    (NVFP4, {"scale": "e4m4"}, "nvfp4 scale='e4m4'; write one of .*e4m3"),
    (NVFP4, {"scale": "e8m0"}, "scale='e8m0' has FP32's own range.*Write tensor_scale=False"),
    (NVFP4, {"four_six": True, "rounding": "stochastic"}, r"four_six needs rounding='nearest'.*biased.*Write four_six=False"),
    (NVFP4, {"four_six": True, "rounding": "ms_eden"}, r"four_six needs rounding='nearest'.*biased.*Write four_six=False"),
    (NVFP4, {"four_six": True, "range_guard": True}, "four_six already chooses.*write range_guard=False"),
    (NVFP4, {"rounding": "ms_eden", "scale": "e5m2"}, "ms_eden corrects an E4M3 block scale.*Write scale='e4m3'"),
    (NVFP4, {"rounding": "ms_eden", "tensor_scale": False}, "ms_eden corrects an E4M3.*tensor_scale=True"),
    (NVFP4, {"rounding": "ms_eden", "block": (16, 16)}, r"ms_eden needs block=\(1, 16\), not \(16, 16\)"),
    (NVFP4, {"outer": 100}, r"nvfp4 outer=100; write 0, or a multiple of 16 such as 128, with block=\(1, 16\)"),
    (NVFP4, {"outer": -128}, "nvfp4 outer=-128; write 0, or a multiple of 16"),
    (NVFP4, {"outer": 128, "block": (16, 16)}, r"outer=128; write 0, or .* with block=\(1, 16\)"),
    (NVFP4, {"outer": 128, "scale": "e3m4"}, "outer=128; write 0, or .*scale='e4m3'"),
    (NVFP4, {"outer": 128, "four_six": True}, "outer replaces the tensor scale.*Write outer=0, or .*four_six=False"),
    (NVFP4, {"posthoc": True}, "posthoc aligns.*Write posthoc=False, or rounding='ms_eden'"),
    (NVFP4, {"outer": 128, "rounding": "ms_eden"}, "outer replaces the tensor scale.*or rounding='nearest' or 'stochastic'"),
    (NVFP4, {"outer": 128, "tensor_scale": False}, "outer replaces the tensor scale.*tensor_scale=True"),
    (MXFP4, {"block": (1, 16)}, r"mxfp4 block=\(1, 16\); write \(1, 32\) or \(32, 32\)"),
    (MXFP4, {"scale_rule": "rceil"}, "mxfp4 scale_rule='rceil'; write one of floor, even, uos, ceil, quest, range_fit"),
    (MXFP4, {"scale_rule": "best"}, "mxfp4 scale_rule='best'; write one of floor"),
    (MXFP4, {"prescale": 0.0}, "mxfp4 prescale=0.0; write a factor above 0 and up to 1"),
    (MXFP4, {"prescale": 1.5}, "mxfp4 prescale=1.5; write a factor above 0 and up to 1"),
    (MXFP4, {"rounding": "ms_eden"}, r"ms_eden on E8M0 scales gains nothing.*Write NVFP4\(rounding='ms_eden'\)"),
    (MXFP4, {"rounding": "stochastic"}, "floor.*clips.*not unbiased.*'ceil'.*prescale=0.75.*allow_clipping"),
    (MXFP4, {"rounding": "stochastic", "scale_rule": "even"}, "scale_rule='even' clips"),
    (MXFP4, {"rounding": "stochastic", "scale_rule": "uos"}, "scale_rule='uos' clips"),
    (MXFP4, {"rounding": "stochastic", "scale_rule": "quest"}, "scale_rule='quest' clips"),
    (MXFP4, {"rounding": "stochastic", "prescale": 0.8}, "scale_rule='floor' clips"),
    (MXFP4, {"rounding": "stochastic", "scale_rule": "even", "prescale": 0.75}, "scale_rule='even' clips"),
    (MXFP8, {"format": "e3m4"}, "mxfp8 format='e3m4'; write e4m3 or e5m2"),
    (MXFP8, {"rounding": "stochastic"}, "mxfp8 rounds to nearest only, not 'stochastic'"),
    (MXFP8, {"scale_rule": "ceil"}, r"mxfp8 .*scale_rule='ceil'; write \(1, 32\) and rceil or floor"),
    (MXFP8, {"block": (1, 16)}, r"mxfp8 block=\(1, 16\).*write \(1, 32\)"),
    (FP8, {"format": "e2m1"}, "fp8 format='e2m1'; write e4m3 or e5m2"),
    (FP8, {"rounding": "ms_eden"}, "fp8 rounds to nearest only, not 'ms_eden'"),
    (FP8, {"block": (128, 1)}, r"fp8 block=\(128, 1\); write \(1, 128\), \(128, 128\) or \(1, 32\)"),
    (Rotation, {"size": 8}, "rotation size=8; write 16, 32, 64, 128 or 256"),
    (Rotation, {"size": 48}, "rotation size=48; write 16"),
    (Rotation, {"signs": "random"}, "rotation signs='random'; write none, fixed or fresh"),
    (Rotation, {"vector": (1, 0)}, r"rotation vector=\(1, 0\); write \+-1 entries"),
    (Rotation, {"vector": (1, 1, -1)}, "as many as divide the size 16"),
    (Rotation, {"vector": ()}, r"rotation vector=\(\); write \+-1 entries"),
)


@pytest.mark.parametrize(("kind", "fields", "message"), REFUSALS)
def test_refusals_say_what_to_write(kind: type, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        kind(**fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int4", "'int4' is not a specification; known names: fp8, mxfp4, mxfp8, nvfp4"),
        ("", "is not a specification"),
        ("hadamard", "known names: fp8"),
        ("nvfp4[block=1x16", "is not a specification"),
        ("nvfp4]", "is not a specification"),
        ("nvfp4[size=3]", "nvfp4 has no field 'size'; its fields: block, rounding, four_six"),
        ("nvfp4[block=16]", r"write \(rows, columns\)"),
        ("nvfp4[block=axb]", "nvfp4 block='axb'; write it in the form of '1x16'"),
        ("nvfp4[four_six=true]", "nvfp4 four_six='true'; write it in the form of 'no'"),
        ("mxfp4[prescale=half]", "mxfp4 prescale='half'; write it in the form of '1.0'"),
        ("nvfp4[four_six=yes,rounding=stochastic]", "four_six needs rounding='nearest'"),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Quantizer.parse(text)


def test_rotation_parse_refuses_quantizers() -> None:
    with pytest.raises(SpecError, match="known names: hadamard"):
        Rotation.parse("nvfp4")


def test_what_is_allowed_beside_the_refusals() -> None:
    assert MXFP4(rounding="stochastic", allow_clipping=True).needs_seed
    assert MXFP4(rounding="stochastic", prescale=0.75).needs_seed
    assert not NVFP4(four_six=True).needs_seed


@pytest.mark.parametrize(
    ("q", "packed", "amax", "transposable", "scale_format"),
    [
        (NVFP4(), True, True, False, "e4m3"),
        (NVFP4(block=(16, 16)), True, True, True, "e4m3"),
        (NVFP4(block=(16, 16), rounding="stochastic"), True, True, False, "e4m3"),
        (NVFP4(scale="e2m5", tensor_scale=False), True, False, False, "e2m5"),
        (MXFP4(), True, False, False, "e8m0"),
        (MXFP8(block=(32, 32)), False, False, True, "e8m0"),
        (FP8(), False, False, False, "fp32"),
    ],
    ids=str,
)
def test_properties(q: Quantizer, packed: bool, amax: bool, transposable: bool, scale_format: str) -> None:
    assert (q.packed, q.needs_amax, q.transposable, q.scale_format) == (packed, amax, transposable, scale_format)


@pytest.mark.parametrize(
    ("q", "tensor", "outer", "bits"),
    [
        (NVFP4(), True, False, 4.5),
        (NVFP4(tensor_scale=False), False, False, 4.5),
        (NVFP4(outer=128), False, True, 4.75),
        (NVFP4(outer=64, rounding="stochastic"), False, True, 5.0),
        (MXFP4(), False, False, 4.25),
        (MXFP4(scale_rule="range_fit"), True, False, 4.25),
        (MXFP4(prescale=0.75), True, False, 4.25),
        (FP8(), False, False, 8.25),
    ],
    ids=str,
)
def test_factors_beyond_the_block_scale(q: Quantizer, tensor: bool, outer: bool, bits: float) -> None:
    assert (q.has_tensor_scale, q.has_outer_scale, q.bits_per_element) == (tensor, outer, bits)
    assert not (outer and (q.needs_amax or q.exact_in_bf16))
