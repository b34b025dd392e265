"""Hypothesis strategies: any specification that is allowed, and operands of every kind."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from fp4.runtime.formats import SCALE_FORMATS
from fp4.runtime.spec import FP8, MX_SCALE_RULES, MXFP4, MXFP8, NVFP4, ROUNDINGS, Quantizer, Rotation, SpecError


def _allowed(kind: Callable[..., Any], **choices: Iterable[Any]) -> list[Any]:
    """Every combination of the choices that is not refused."""
    specs = []
    for values in itertools.product(*choices.values()):
        with contextlib.suppress(SpecError):
            specs.append(kind(**dict(zip(choices, values, strict=True))))
    return specs


_ROWS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 40, 0)
_COLUMNS = (16, 17, 32, 33, 40, 48, 63, 64, 100, 127, 128, 129, 160, 257, 300, 1, 0)
_FLAG = (False, True)
_EIGHT_BITS = {"format": ("e4m3", "e5m2")}
_NVFP4 = _allowed(
    NVFP4,
    block=((1, 16), (16, 16), (1, 8), (1, 32), (1, 64), (1, 128)),
    rounding=ROUNDINGS,
    four_six=_FLAG,
    range_guard=_FLAG,
    scale=SCALE_FORMATS,
    tensor_scale=_FLAG,
    outer=(0, 0, 0, 32, 128),
)
# Shares of what is drawn: NVFP4 with its usual scale, with any, and the others.
_QUANTIZERS: tuple[list[Quantizer], ...] = (
    [q for q in _NVFP4 if q.scale == "e4m3"],
    _NVFP4,
    _allowed(
        MXFP4,
        block=((1, 32), (32, 32)),
        rounding=ROUNDINGS,
        scale_rule=MX_SCALE_RULES,
        prescale=(1.0, 0.75, 0.3),
        allow_clipping=_FLAG,
    ),
    _allowed(MXFP8, block=((1, 32), (32, 32)), scale_rule=MX_SCALE_RULES, **_EIGHT_BITS)
    + _allowed(FP8, block=((1, 128), (128, 128), (1, 32)), **_EIGHT_BITS),
)


def quantizers() -> st.SearchStrategy[Quantizer]:
    return st.sampled_from(_QUANTIZERS).flatmap(st.sampled_from)


def rotations() -> st.SearchStrategy[Rotation]:
    vectors = st.integers(0, 4).flatmap(lambda k: st.tuples(*[st.sampled_from([1, -1])] * 2**k))
    return st.builds(
        Rotation,
        size=st.sampled_from([16, 32, 64, 128, 256]),
        signs=st.sampled_from(["none", "fixed", "fresh"]),
        bf16=st.booleans(),
        vector=vectors,
    )


@st.composite
def operands(draw: st.DrawFn) -> torch.Tensor:
    """(R, C), up to 40 x 300, of a kind that is hard on some rounding: scaled, on the quarter grid, of random bits."""
    rows, columns = draw(st.sampled_from(_ROWS)), draw(st.sampled_from(_COLUMNS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["gaussian", "quarter_grid", "bits", "wide_rows", "heavy_tail"]))
    if kind == "quarter_grid":
        x = rng.integers(-32, 33, (rows, columns)) / 4
    elif kind == "bits":  # every sign, exponent and mantissa alike; NaN and Inf too
        x = rng.integers(0, 2**32, (rows, columns), dtype=np.uint32).view(np.float32)
    elif kind == "wide_rows":
        x = rng.standard_normal((rows, columns)) * 2.0 ** rng.integers(-40, 20, (rows, 1))
    elif kind == "heavy_tail":
        x = rng.standard_t(2, (rows, columns))
    else:
        x = rng.standard_normal((rows, columns))
    if kind != "bits":
        x = x * 2.0 ** draw(st.integers(-60, 60))
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    if draw(st.booleans()):
        x[rng.random((rows, columns)) < 0.5] = 0
    if draw(st.integers(0, 9)) == 0:
        x[rng.random((rows, columns)) < 0.01] = np.nan
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]))
    return torch.from_numpy(x).to(dtype)
