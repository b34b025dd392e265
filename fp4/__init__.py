"""Training in 4-bit floating point, as a compiler: ``torch.compile(model, backend="fp4")``."""

from __future__ import annotations

from fp4.compiler.explain.capture import ExplainError
from fp4.compiler.explain.explanation import Explanation, explain
from fp4.compiler.explain.measure import Measurement, measure
from fp4.compiler.explain.step import StepError
from fp4.compiler.explain.suggest import Budget, Suggestion, suggest
from fp4.compiler.policy import (
    BF16,
    GemmPrecision,
    LinearPrecision,
    LinearSite,
    Operand,
    Policy,
    PolicyError,
    Rule,
    keep,
    keep_last,
    policy,
    rule,
)
from fp4.compiler.report import Report, report
from fp4.compiler.switch import switch
from fp4.passes.recipes import recipe, recipes
from fp4.runtime.quantized import QuantizedTensor, quantize
from fp4.runtime.spec import FP8, MXFP4, MXFP8, NVFP4, Quantizer, Rotation, SpecError

__version__ = "0.1.0"

__all__ = [
    "BF16",
    "FP8",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "Budget",
    "ExplainError",
    "Explanation",
    "GemmPrecision",
    "LinearPrecision",
    "LinearSite",
    "Measurement",
    "Operand",
    "Policy",
    "PolicyError",
    "QuantizedTensor",
    "Quantizer",
    "Report",
    "Rotation",
    "Rule",
    "SpecError",
    "StepError",
    "Suggestion",
    "explain",
    "keep",
    "keep_last",
    "measure",
    "policy",
    "quantize",
    "recipe",
    "recipes",
    "report",
    "rule",
    "suggest",
    "switch",
]
