"""The error report against independent computations, and on input that is hostile."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import fp4
from fp4.compiler.explain.measure import measure_step
from fp4.compiler.explain.step import Capture, Step
from fp4.compiler.explain.taps import TAPS
from fp4.runtime import reference
from fp4.runtime.spec import Rotation
from tests.graphs import MLP, equal, interpreted, llama, tokens

SEED = 7


def everything(name: str) -> fp4.Policy:
    """The recipe with nothing kept in high precision."""
    return fp4.recipe(name) if name == "bf16" else fp4.recipe(name, keep_heads=False, high_precision_tail=0.0)


def squares(model: Any, batch: Any) -> Tensor:
    return model(batch).float().square().sum()


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sqnr(x: Tensor, decoded: Tensor) -> float:
    return float(10 * torch.log10(x.double().square().sum() / (decoded.double() - x.double()).square().sum()))


def decoded(x: Tensor, q: fp4.Quantizer, site: int = 0) -> Tensor:
    """The operand quantized along its last dimension and decoded, tensor scale included."""
    codes, scales, tensor_scale = reference.quantize(x, q, None, torch.tensor([SEED]), site)
    return reference.dequantize(codes, scales, tensor_scale, q, x.shape[1], torch.float32)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def cosine(a: Tensor, b: Tensor) -> float:
    return float(F.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


def test_every_figure_of_a_linear_under_nvfp4_is_the_direct_computation() -> None:
    model, x = nn.Linear(96, 64), gaussian(48, 96).requires_grad_()
    found = fp4.measure(nn.Sequential(model), x, everything("nvfp4"), loss=squares, seed=SEED)
    w, xd = model.weight.detach(), x.detach()
    nearest, square = fp4.NVFP4(), fp4.NVFP4(block=(16, 16))
    stochastic = fp4.NVFP4(rounding="stochastic")
    y = decoded(xd, nearest) @ decoded(w, square).t() + model.bias.detach()
    dy = 2 * y
    h16 = Rotation(16, signs="fixed")
    # The draw sites of the compiler: dgrad's first operand is 2, wgrad's is 4.
    dyq, wq = decoded(dy, stochastic, 2), decoded(w.t(), square)
    dytq = decoded(reference.rotate(dy.t(), h16, None, 0), stochastic, 4)
    xtq = decoded(reference.rotate(xd.t(), h16, None, 0), nearest)
    exact = Rotation(16, signs="fixed", bf16=False)
    dyt, xt = (reference.rotate(t.t(), exact, None, 0) for t in (dy, xd))
    expected = {
        "fprop": [(xd, decoded(xd, nearest)), (w, decoded(w, square)), (F.linear(xd, w, model.bias.detach()), y)],
        "dgrad": [(dy, dyq), (w.t(), wq), (dy @ w, dyq @ wq.t())],
        "wgrad": [(dyt, dytq), (xt, xtq), (dy.t() @ xd, dytq @ xtq.t())],
    }
    for role, (first, second, (wanted, got)) in expected.items():
        gemm = found.gemm("0", role)
        assert [o.sqnr_db for o in gemm.operands] == pytest.approx([sqnr(*first), sqnr(*second)], abs=1e-3), role
        assert gemm.relative_error == pytest.approx(relative(got, wanted), rel=1e-4)
        assert gemm.cosine == pytest.approx(cosine(got, wanted), abs=1e-6)
        assert (gemm.m, gemm.n, gemm.k, gemm.nonfinite) == (48, 64, 96, 0)
    assert found.loss == pytest.approx(float(y.square().sum()), rel=1e-5)
    assert found.reference_loss == pytest.approx(float(F.linear(xd, w, model.bias.detach()).square().sum()), rel=1e-5)
    # The gradient of the step against the unquantized step's: there, dY is that of the unquantized Y.
    plain = 2 * F.linear(xd, w, model.bias.detach())
    assert found.gradients["0.weight"][0] == pytest.approx(relative(dytq @ xtq.t(), plain.t() @ xd), rel=1e-4)
    assert found.gradients["0.bias"][1] == pytest.approx(cosine(dy.sum(0), plain.sum(0)), abs=1e-5)


def test_operands_read_from_the_forward_copy_are_compared_with_the_models_tensor() -> None:
    """quartet2's dgrad quantizes W a second time: its error counts both."""
    model, x = nn.Linear(128, 64, bias=False), gaussian(64, 128).requires_grad_()
    found = fp4.measure(nn.Sequential(model), x, everything("quartet2"), loss=squares, seed=SEED)
    w = model.weight.detach()
    copy = decoded(w, fp4.NVFP4(four_six=True))
    rotation = Rotation(128, signs="fresh", bf16=False)
    signs_site = 9  # the compiler's: 8 + dgrad
    again = decoded(reference.rotate(copy.t(), rotation, torch.tensor([SEED]), signs_site), fp4.NVFP4(rounding="ms_eden"), 3)
    wanted = reference.rotate(w.t(), rotation, torch.tensor([SEED]), signs_site)
    (_, operand), (_, forward) = found.gemm("0", "dgrad").operands, found.gemm("0", "fprop").operands
    assert operand.sqnr_db is not None
    assert forward.sqnr_db is not None
    assert operand.sqnr_db == pytest.approx(sqnr(wanted, again), abs=0.01)
    assert operand.sqnr_db < forward.sqnr_db - 2
    assert operand.precision == "nvfp4[rounding=ms_eden] of the forward copy"


def test_scales_underflow_and_saturation() -> None:
    """One block of 16 whose values are known: scale 448 * 2^0 of the tensor scale; 0.1 of 6 rounds to zero, 7 would clip."""
    x = torch.zeros(2, 32)
    x[0, :16] = torch.tensor([6.0, 0.1, 0.1, 3.0] + [1.0] * 12)
    x[1, 16:] = 2.0**-12  # a block far below: E4M3 of 2^-12/6 * 448 is subnormal
    policy = fp4.Policy("one", fp4.LinearPrecision(fp4.GemmPrecision(fp4.NVFP4(), None)))
    found = fp4.measure(nn.Linear(32, 16), x, policy, loss=squares)
    operand, weight = found.gemms[0].operands
    assert (weight.precision, weight.sqnr_db, weight.scales) == ("high precision", None, {})
    assert operand.scales == {8: 1, -6: 1}  # 448 and 448 * 2^-12 / 6 = 0.018 -> E4M3 0.0176
    assert operand.zero_scales == 2
    assert operand.underflow == pytest.approx(2 / 32)
    assert operand.amax == 6
    floor = fp4.Policy("two", fp4.LinearPrecision(fp4.GemmPrecision(fp4.MXFP4(scale_rule="floor"), None)))
    clipped = torch.full((1, 32), 7.5)
    operand, _ = fp4.measure(nn.Linear(32, 16), clipped, floor, loss=squares).gemms[0].operands
    assert operand.saturation == 1.0
    assert operand.sqnr_db == pytest.approx(20 * math.log10(7.5 / 1.5))
    assert operand.scales == {0: 1}


@pytest.mark.parametrize("name", list(fp4.recipes()))
def test_the_step_measured_is_the_compilers_bit_for_bit(name: str) -> None:
    """Loss and gradients of the measured run, every recipe: those of the backend's own graphs."""
    model, x, policy = MLP(bias=True), gaussian(2, 16, 64), everything(name)
    wanted = interpreted(model, x, policy)
    torch.manual_seed(0)
    seed = int(torch.ops.fp4.seed.default(torch.device("cpu")))
    tangent = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(4))

    def loss(model: Any, batch: Any) -> Tensor:
        return (model(batch[0]) * batch[1]).sum()

    step = Capture(model, loss)((x.requires_grad_(), tangent))
    graph, _ = step.captured.rewritten(policy, TAPS)
    seen: list[Any] = []
    outcome = step.run(graph, seed, lambda *values: seen.append(values[:2]))
    assert len(seen) == len(set(seen)) == 9
    names = [n for n, _ in model.named_parameters()]
    assert equal([outcome.gradients[n] for n in names], [wanted[n] for n in names])


def recurrent(model: Any, batch: Any) -> Tensor:
    return model(model(batch)).square().mean()


@pytest.fixture(scope="module")
def llama_step() -> Step:
    """A layer with a frozen k_proj and a head, captured under autocast."""
    model = llama(num_hidden_layers=1)
    model.model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        return Capture(model)({"input_ids": tokens(), "labels": tokens()})


@pytest.mark.parametrize("name", list(fp4.recipes()))
def test_every_recipe_on_a_llama_under_autocast(name: str, llama_step: Step) -> None:
    found = measure_step(llama_step, everything(name))
    assert len(found.gemms) == 3 * 8 - 1
    assert found.loss == pytest.approx(found.reference_loss, rel=0.01)
    assert all(math.isfinite(g.relative_error) and g.cosine > 0.8 for g in found.gemms)
    assert not found.nonfinite
    quantized = [g for g in found.gemms if g.quantized]
    assert (len(quantized) == 0) == (name == "bf16")
    # The floor of FP8 and the ceiling of FP4, biased rounding or not.
    assert all(0.01 < g.relative_error < 0.5 for g in quantized), [(g.linear, g.role, g.relative_error) for g in quantized]
    assert (found.gradient_error == 0) == (name == "bf16")
    json.loads(found.to_json())


def test_tied_twice_called_and_three_dimensional() -> None:
    model = llama(num_hidden_layers=1, tie_word_embeddings=True)
    found = fp4.measure(model, {"input_ids": tokens(), "labels": tokens()}, everything("nvfp4"))
    assert {g.role for g in found.linears()["lm_head"]} == {"fprop", "dgrad", "wgrad"}
    twice = fp4.measure(nn.Linear(64, 64), gaussian(2, 8, 64), everything("nvfp4"), loss=recurrent)
    assert [g.role for g in twice.gemms].count("fprop") == 2
    assert {(g.m, g.nonfinite) for g in twice.gemms} == {(16, 0)}


def test_checkpointing_and_half_precision_parameters() -> None:
    """Activations that a compiled step would compute again are measured once; BF16 and FP16 parameters as they are."""

    def recomputed(model: Any, batch: Any) -> Tensor:
        return checkpoint(model, batch, use_reentrant=False).float().square().mean()

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model, x = MLP().to(dtype), gaussian(32, 64).to(dtype)
        found = fp4.measure(model, x, everything("nvfp4"), loss=recomputed)
        assert sorted((g.linear, g.role) for g in found.gemms) == [
            ("a", "fprop"), ("a", "wgrad"), *((n, r) for n in "bc" for r in ("dgrad", "fprop", "wgrad"))
        ]  # fmt: skip
        plain = fp4.measure(model, x, everything("nvfp4"), loss=squares_mean)
        assert found.loss == plain.loss
        assert found.gradient_error == pytest.approx(plain.gradient_error, rel=1e-6)


def squares_mean(model: Any, batch: Any) -> Tensor:
    return model(batch).float().square().mean()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_weight_is_named_first(value: float) -> None:
    model = MLP()
    model.b.weight.data[3, 5] = value
    found = fp4.measure(model, gaussian(32, 64), everything("nvfp4"), loss=squares)
    assert str(found.nonfinite[0]) == "b fprop W: 1 of 6144 elements"
    assert "NaN or Inf first in b fprop W: 1 of 6144 elements, then in" in str(found)
    assert found.gemm("a", "fprop").nonfinite == 0
    assert found.to_dict()["loss"] is None


def test_a_non_finite_gradient_is_named_where_it_starts() -> None:
    """Forward is finite, and so is the loss; the gradient of sqrt at 0 is not."""
    found = fp4.measure(MLP(), gaussian(32, 64), everything("nvfp4"), loss=lambda m, x: (m(x) * 0).sqrt().sum())
    assert math.isfinite(found.loss)
    assert str(found.nonfinite[0]).startswith("c ")
    assert found.nonfinite[0].tensor == "dY"
    assert found.gemm("c", "fprop").nonfinite == 0


def test_a_non_finite_norm_is_named_before_the_linear_it_reaches() -> None:
    norm = nn.LayerNorm(64)
    norm.weight.data[2] = math.nan
    model = nn.Sequential(nn.Linear(64, 64), norm, nn.Linear(64, 64))
    found = fp4.measure(model, gaussian(32, 64), everything("nvfp4"), loss=squares)
    assert [str(n) for n in found.nonfinite[:2]] == ["1.weight value: 1 of 64 elements", "2 fprop X: 32 of 2048 elements"]


def test_nothing_of_the_model_changes() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 64))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    first = fp4.measure(model, gaussian(32, 64), everything("nvfp4"), loss=squares, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    again = fp4.measure(model, gaussian(32, 64), everything("nvfp4"), loss=squares, seed=3)
    other = fp4.measure(model, gaussian(32, 64), everything("nvfp4"), loss=squares, seed=4)
    assert first.to_dict() == again.to_dict() != other.to_dict()
    # Dropout draws alike with and without quantization, so the difference is quantization's.
    assert first.gradient_error < 0.5


def test_many_models_in_one_process() -> None:
    """More than Dynamo's limit of recompilations of one function."""
    for n in range(10):
        assert fp4.measure(nn.Linear(64, 16 + 16 * n), gaussian(16, 64), loss=squares).gemms


unrotated = fp4.rule("*", fprop=fp4.GemmPrecision(fp4.MXFP4(), None))


def test_a_compiled_model_a_module_without_gradient_and_an_exact_operand() -> None:
    model = nn.Linear(64, 64).requires_grad_(False)
    compiled: Any = torch.compile(model, backend="fp4")
    found = fp4.measure(compiled, torch.ones(16, 64), everything("mxfp4_h16").with_rules(unrotated), loss=squares)
    (gemm,) = found.gemms
    assert (gemm.role, gemm.operands[0].sqnr_db, gemm.operands[0].underflow) == ("fprop", math.inf, 0)
    assert found.gradients == {}
    assert found.to_dict()["gemms"][0]["operands"][0]["sqnr_db"] is None


CASES: list[tuple[str, Callable[[], Any], str]] = [
    ("a loss of many elements", lambda: fp4.measure(MLP(), gaussian(32, 64)), r"shape \(32, 64\).*Write loss=lambda"),
    ("no loss", lambda: fp4.measure(llama(num_hidden_layers=1), {"input_ids": tokens()}), "the loss.*Write loss=lambda"),
    ("no module", lambda: fp4.measure(lambda x: x, gaussian(2, 2)), "pass the torch.nn.Module"),  # type: ignore[arg-type]
    ("no function", lambda: fp4.measure(MLP(), gaussian(32, 64), loss="mse"), "write a function of model"),  # type: ignore[arg-type]
    ("no recipe", lambda: fp4.measure(MLP(), gaussian(32, 64), 4), "write a recipe's name"),  # type: ignore[arg-type]
    ("no linear", lambda: fp4.measure(nn.ReLU(), gaussian(32, 64).requires_grad_(), loss=squares), "no linear in the step"),
    ("no values", lambda: fp4.measure(MLP().to("meta"), gaussian(32, 64).to("meta"), loss=squares), "no values.*fp4.explain"),
    ("a subclass", lambda: fp4.measure(MLP(), TwoTensor(gaussian(32, 64), gaussian(32, 64)), loss=squares), "is a TwoTensor"),
    ("a graph break", lambda: fp4.measure(MLP(), gaussian(32, 64), loss=_breaks), "not one graph.*Write|not one graph.*loss="),
]


def _breaks(model: Any, batch: Any) -> Tensor:
    y = model(batch)
    torch._dynamo.graph_break()
    return y.square().sum()


@pytest.mark.parametrize(("what", "call", "message"), CASES, ids=[c[0] for c in CASES])
def test_refusals_say_what_to_write(what: str, call: Callable[[], Any], message: str) -> None:
    with pytest.raises(fp4.StepError, match=f"(?s){message}"):
        call()


def test_unknown_recipe_phase_and_gemm() -> None:
    with pytest.raises(fp4.PolicyError, match="there is no recipe"):
        fp4.measure(MLP(), gaussian(32, 64), "nvfp5", loss=squares)
    found = fp4.measure(MLP(), gaussian(32, 64), "nvfp4", phase="bf16", loss=squares)
    assert not any(g.quantized for g in found.gemms)
    with pytest.raises(KeyError, match="the linears: a, b, c"):
        found.gemm("d", "fprop")


def test_table_markdown_and_plots(tmp_path: Any) -> None:
    found = fp4.measure(MLP(), gaussian(32, 64), "nvfp4", loss=squares)
    rows = list(found.rows())
    assert [r[1] for r in rows if r[0]] == ["fprop"] * 3
    assert len(rows) == 2 * 2 + 3 * 2 + 3  # a has no dgrad; c is kept by the recipe's tail
    assert "keep_last(0.15)" in rows[-1][-1]
    gemm = found.gemm("b", "wgrad")
    (row,) = [r for r in rows if r[2] == f"dW {gemm.relative_error:.2g}" and r[4] == "dY" and r[3] == f"{gemm.cosine:.5f}"]
    assert row[6] == f"{gemm.operands[0].sqnr_db:.1f}"
    lines = found.to_markdown().splitlines()
    assert len(lines) == 2 + 2 + len(rows)
    assert {line.count("|") for line in lines[2:]} == {len(row) + 1}
    assert "nvfp4[rounding=stochastic]" in str(found)
    figure = found.plot(tmp_path / "heat.png")
    image = figure.axes[0].get_images()[0].get_array()
    assert image.shape == (3, 6)
    assert image[1, 4] == pytest.approx(gemm.operands[0].sqnr_db)
    assert image.mask[2].all()  # kept
    assert image.mask[0].tolist() == [False, False, True, True, False, False]
    assert figure.axes[1].get_images()[0].get_array()[1, 2] == pytest.approx(gemm.relative_error)
    scales = found.plot_scales(tmp_path / "scales.svg").axes[0].get_images()[0].get_array()
    assert scales.sum(axis=1).tolist() == pytest.approx([1.0] * 10)
    assert found.plot(only="b").axes[0].get_images()[0].get_array().shape == (1, 6)
    with pytest.raises(fp4.StepError, match="none of the linears: a, b, c"):
        found.plot_scales(only="d")
    assert (tmp_path / "heat.png").stat().st_size > 10_000
    assert "<svg" in (tmp_path / "scales.svg").read_text()
