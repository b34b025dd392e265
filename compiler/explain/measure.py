"""The error report of one training step: what quantization did to every operand and every product.

The step's rewritten graph runs once, op by op, and each GEMM is compared, where it stands, with the product of the model's own
operands: same X, same W, same dY, the model's dtype. So an error is that of this GEMM alone; what the whole step adds up to is
in the loss and the gradients, beside those of the unquantized step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from fp4.compiler.explain.step import Capture, Loss, Outcome, Step, StepError, policy_of
from fp4.compiler.explain.taps import TAPS
from fp4.compiler.pipeline import Context
from fp4.compiler.policy import Policy, matches
from fp4.compiler.report import KEPT
from fp4.compiler.sites import OPERANDS, Role
from fp4.passes.recipes import DEFAULT
from fp4.runtime import reference
from fp4.runtime.quantized import QuantizedTensor
from fp4.runtime.rounding import exmy_value
from fp4.runtime.spec import Quantizer

RESULTS = {"fprop": "Y", "dgrad": "dX", "wgrad": "dW"}
COLUMNS = ("linear", "GEMM", "error", "cosine", "operand", "precision", "SQNR dB", "underflow", "saturation", "note")


@dataclass
class OperandError:
    """One operand of a GEMM, against the model's tensor under the same rotation; None where it was not quantized.

    precision: its quantizer. sqnr_db: 10 log10 of the tensor's squared norm over the error's, dB (inf for no error). Two
    quantizers that the operand went through (the forward copy) count together. underflow: share of the non-zero elements that
    the quantizer made zero. saturation: share of the elements cut to the largest code. scales: floor(log2(block scale)) ->
    number of blocks, the tensor scale left out. zero_scales: blocks whose scale is zero. amax: largest finite magnitude.
    nonfinite: NaN and Inf in the model's tensor, of `elements`; SQNR is NaN where there are any.
    """

    name: str
    precision: str
    elements: int
    nonfinite: int
    amax: float
    sqnr_db: float | None = None
    underflow: float | None = None
    saturation: float | None = None
    scales: dict[int, int] = field(default_factory=dict)
    zero_scales: int = 0


@dataclass
class GemmError:
    """One GEMM: its operands, and its result (Y, dX or dW) against the unquantized product of the same operands.

    relative_error: norm of the difference over norm of the unquantized result. cosine: of the angle between the two. m, n, k:
    the linear's tokens, output and input features. nonfinite: NaN and Inf in the result, of `elements`. reason: why it stayed
    in high precision, if it did; its error is then 0.
    """

    linear: str
    role: str
    m: int
    n: int
    k: int
    rotation: str
    reason: str
    operands: tuple[OperandError, OperandError]
    result: str
    relative_error: float
    cosine: float
    elements: int
    nonfinite: int

    @property
    def quantized(self) -> bool:
        return not self.reason


@dataclass(frozen=True)
class NonFinite:
    """NaN or Inf in a tensor of a GEMM (X, W, dY, Y, dX, dW), or in a parameter's value or gradient (role "")."""

    where: str
    role: str
    tensor: str
    count: int
    elements: int

    def __str__(self) -> str:
        return f"{' '.join(filter(None, (self.where, self.role, self.tensor)))}: {self.count} of {self.elements} elements"


@dataclass
class Measurement:
    """What ``fp4.measure`` found. Rich and notebooks print ``table()``; ``str`` is the same as plain text.

    loss, reference_loss: of this step, and of the step with nothing quantized. gradients: parameter -> (relative error, cosine)
    of its gradient against that step's; gradient_error, gradient_cosine: of all of them together. gemms: in execution order.
    nonfinite: in execution order, so the first is where to look.
    """

    policy: str
    seed: int
    loss: float
    reference_loss: float
    gradient_error: float
    gradient_cosine: float
    gradients: dict[str, tuple[float, float]]
    gemms: list[GemmError]
    nonfinite: list[NonFinite]
    warnings: list[str]

    def gemm(self, linear: str, role: str) -> GemmError:
        """The first GEMM of a role ("fprop", "dgrad", "wgrad") of the linear. Raises KeyError, which lists the linears."""
        for gemm in self.gemms:
            if (gemm.linear, gemm.role) == (linear, role):
                return gemm
        raise KeyError(f"no {role} of {linear!r}; the linears: {', '.join(dict.fromkeys(g.linear for g in self.gemms))}")

    def title(self) -> str:
        return (
            f"policy {self.policy}: loss {self.loss:.6g}, unquantized {self.reference_loss:.6g}; gradient's relative error "
            f"{self.gradient_error:.3g}, cosine {self.gradient_cosine:.4f}"
        )

    def linears(self, only: str = "*") -> dict[str, list[GemmError]]:
        """The GEMMs of each linear whose name the glob matches, fprop first; a linear called twice has them twice."""
        found: dict[str, list[GemmError]] = {}
        for g in self.gemms:
            if matches(g.linear, only):
                found.setdefault(g.linear, []).append(g)
        if not found:
            names = ", ".join(dict.fromkeys(g.linear for g in self.gemms))
            raise StepError(f"only={only!r} matches none of the linears: {names}")
        return {name: sorted(gemms, key=lambda g: list(RESULTS).index(g.role)) for name, gemms in found.items()}

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The cells of ``COLUMNS``: a row an operand of each quantized GEMM, one row for a GEMM that is not."""
        for name, gemms in self.linears().items():
            for i, g in enumerate(gemms):
                bad = {t.name: t.nonfinite for t in g.operands} | {g.result: g.nonfinite}
                notes = [f"{count} of {tensor} not finite" for tensor, count in bad.items() if count]
                head = (name if i == 0 else "", g.role, f"{g.result} {g.relative_error:.2g}", f"{g.cosine:.5f}")
                if not g.quantized:
                    yield (*head, ", ".join(o.name for o in g.operands), KEPT, "", "", "", "; ".join([g.reason, *notes]))
                    continue
                for o in g.operands:
                    sqnr = "" if o.sqnr_db is None else f"{o.sqnr_db:.1f}"
                    yield (*head, o.name, o.precision, sqnr, _percent(o.underflow), _percent(o.saturation), "; ".join(notes))
                    head, notes = ("",) * 4, []

    def table(self) -> Table:
        """For ``rich``: two rows a GEMM, an operand each, by linear."""
        table = Table(*COLUMNS, title=self.title())
        for column in (2, 3, 6, 7, 8):
            table.columns[column].justify = "right"
        for row in self.rows():
            if row[0] and table.row_count:
                table.add_section()
            table.add_row(*map(escape, row))
        if self.nonfinite:
            first, more = self.nonfinite[0], len(self.nonfinite) - 1
            table.caption = f"NaN or Inf first in {first}" + (f", then in {more} more tensors" if more else "")
        return table

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=200)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()

    def to_markdown(self) -> str:
        """The table as a Markdown table under its title."""
        cells = ([c.replace("|", "\\|") for c in row] for row in self.rows())
        lines = [f"| {' | '.join(row)} |" for row in ([*COLUMNS], ["---"] * len(COLUMNS), *cells)]
        return "\n".join([self.title(), "", *lines, ""])

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON has it: NaN and infinity become null."""
        return _finite(asdict(self))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def plot(self, path: str | Path | None = None, only: str = "*") -> Any:
        """Heat maps, a row a linear: SQNR of the six operands, relative error of Y, dX, dW. Returns matplotlib's Figure.

        path: also write it there, PNG, SVG or PDF by its ending. only: a glob on the linears' names.
        """
        from fp4.compiler.explain.plots import heat_maps

        return heat_maps(self.title(), self.linears(only), path)

    def plot_scales(self, path: str | Path | None = None, only: str = "*") -> Any:
        """Heat map of the block scales, a row a quantized operand, a column a binary exponent. As ``plot`` otherwise."""
        from fp4.compiler.explain.plots import scale_map

        return scale_map(self.linears(only), path)


def measure(
    model: torch.nn.Module,
    batch: Any,
    recipe: str | Policy = DEFAULT,
    *,
    loss: Loss | None = None,
    phase: str | None = None,
    seed: int = 0,
) -> Measurement:
    """Run forward and backward of one batch under a recipe and measure every GEMM against high precision.

    model: as it is trained (compiled or not, in its training mode, under the autocast of the caller); nothing in it changes.
    batch: a tensor, or a sequence or mapping of the model's arguments. loss: called as loss(model, batch), returns a scalar;
    None: what the model returns, or its ``loss``. recipe: a name or an ``fp4.Policy``; phase: one of its phases. seed: of all
    random draws. Memory: that of a step without checkpointing, in eager mode.

    Raises StepError where forward and loss are not one graph or the loss is no scalar, PolicyError for a policy.
    """
    policy = policy_of(recipe, phase)
    return measure_step(Capture(model, loss)(batch), policy, seed)


def measure_step(step: Step, policy: Policy, seed: int = 0) -> Measurement:
    """``measure`` of a captured step."""
    graph, context = step.captured.rewritten(policy, TAPS)
    if not context.linears:
        raise StepError("no linear in the step's graph, so nothing to measure: fp4 quantizes matrix products with a parameter")
    gemms: list[GemmError] = []

    def record(index: int, role: str, *values: Any) -> None:
        gemms.append(_gemm(context, index, Role(role), *values))

    outcome = step.run(graph, seed, record)
    plain = step.run(step.captured.rewritten(Policy("bf16"))[0], seed)
    errors = {n: _difference(g, plain.gradients[n]) for n, g in outcome.gradients.items()}
    total = _total(outcome, plain)
    return Measurement(
        policy.name,
        seed,
        float(outcome.loss),
        float(plain.loss),
        *total,
        errors,
        gemms,
        _nonfinite(step, context, gemms, outcome),
        list(context.warnings),
    )


def _gemm(
    context: Context,
    index: int,
    role: Role,
    result: Tensor,
    left: Tensor,
    right: Tensor,
    bias: Tensor | None,
    first_is_left: bool,
    parts: list[dict[str, Any] | None],
) -> GemmError:
    """The measurement of one tap (``taps.TapGemms``, ``taps.TapOperands``)."""
    site, decision = context.linears[index].site, context.decisions[index]
    precision = decision.precision.gemms()[role]
    originals = (left, right) if first_is_left else (right, left)
    operands = [
        _operand(name, original, part, str(spec) if spec.rewritten else KEPT)
        for name, original, part, spec in zip(
            OPERANDS[role], originals, parts, (precision.first, precision.second), strict=True
        )
    ]
    error, cosine, reason = 0.0, 1.0, ""
    if precision.quantized:
        error, cosine = _difference(result, reference.mm(left, right, None, bias, result.dtype))
    else:
        reason = decision.reason or f"the policy {context.policy.name} leaves it"
    return GemmError(
        linear=site.name,
        role=str(role),
        m=site.m or 0,
        n=site.n or 0,
        k=site.k or 0,
        rotation=str(precision.rotation or ""),
        reason=reason,
        operands=(operands[0], operands[1]),
        result=RESULTS[role],
        relative_error=error,
        cosine=cosine,
        elements=result.numel(),
        nonfinite=_bad(result),
    )


def _operand(name: str, original: Tensor, part: dict[str, Any] | None, precision: str) -> OperandError:
    found = OperandError(name, precision, original.numel(), _bad(original), float(reference.amax(original)))
    if part is None:
        return found
    q = Quantizer.parse(part["quantizer"])
    value, wanted = part["value"].double(), part["reference"].double()
    for factor in part["factors"]:
        value = value * factor.double()
    noise, signal = float((value - wanted).square().sum()), float(wanted.square().sum())
    found.sqnr_db = 10 * math.log10(signal / noise) if noise and signal else math.inf if noise == 0 else -math.inf
    matrix = part["matrix"]
    quantized = QuantizedTensor(
        part["codes"], part["scales"], part["tensor_scale"], q, None, matrix.shape, matrix.dtype, None, 0
    )
    error = quantized.error(matrix)
    found.underflow, found.saturation = error.underflow, error.saturation
    scales = part["scales"] if q.scale_format == "fp32" else exmy_value(part["scales"], q.scale_format)
    found.zero_scales = int((scales == 0).sum())
    exponents = torch.frexp(scales[torch.isfinite(scales) & (scales > 0)].double())[1] - 1
    found.scales = {int(e): int(n) for e, n in zip(*exponents.unique(return_counts=True), strict=True)}
    return found


def _difference(value: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Relative error and cosine, sums in FP64. Two zeros are equal; a zero has no angle to anything else: cosine 0."""
    a, b = value.double(), wanted.double()
    return _relative(float((a - b).square().sum()), float((a * b).sum()), float(a.square().sum()), float(b.square().sum()))


def _relative(noise: float, product: float, mine: float, wanted: float) -> tuple[float, float]:
    if mine == wanted == 0:
        return 0.0, 1.0
    error = math.sqrt(noise / wanted) if wanted else math.inf
    return error, product / math.sqrt(mine * wanted) if mine and wanted else 0.0


def _total(outcome: Outcome, plain: Outcome) -> tuple[float, float]:
    sums = [0.0] * 4
    for name, g in outcome.gradients.items():
        a, b = g.double(), plain.gradients[name].double()
        for i, t in enumerate(((a - b).square(), a * b, a.square(), b.square())):
            sums[i] += float(t.sum())
    return _relative(*sums)


def _bad(x: Tensor) -> int:
    return int((~torch.isfinite(x)).sum())


def _nonfinite(step: Step, context: Context, gemms: list[GemmError], outcome: Outcome) -> list[NonFinite]:
    weights = {f"{linear.site.name}.weight" for linear in context.linears}
    found = []
    for index, known in step.captured.inputs.items():
        value = step.arguments[index]
        if isinstance(value, Tensor) and value.is_floating_point() and known.name not in weights:
            found.append(NonFinite(known.name, "", "value", _bad(value), value.numel()))
    for g in gemms:
        found += [NonFinite(g.linear, g.role, o.name, o.nonfinite, o.elements) for o in g.operands]
        found.append(NonFinite(g.linear, g.role, g.result, g.nonfinite, g.elements))
    found.append(NonFinite("loss", "", "", _bad(outcome.loss), 1))
    found += [NonFinite(n, "", "gradient", _bad(g), g.numel()) for n, g in outcome.gradients.items() if n not in weights]
    return [f for f in found if f.count]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2g} %"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
