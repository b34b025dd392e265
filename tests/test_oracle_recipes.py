"""The eager models of the recipes: structure with lossless quantizers, error with real ones, draws, masks, what stays plain."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp4.runtime import reference
from fp4.runtime.spec import Quantizer, Rotation
from tests import oracle_recipes
from tests.oracle_recipes import RECIPES, OracleModel

# Recipe, flags, and the interval of the largest relative error among output and gradients of an MLP of two linears.
CASES: tuple[tuple[str, dict[str, Any], float, float], ...] = (
    ("nvfp4", {}, 0.15, 0.35),
    ("quartet2", {}, 0.12, 0.3),
    ("quartet", {}, 0.3, 0.65),  # clips at 1.46 to 2.92 standard deviations, and gives what it clipped no gradient
    ("quartet", {"gradient_rounding": "stochastic"}, 0.3, 0.7),
    ("quartet", {"clip_gradient": False}, 0.2, 0.45),
    ("mxfp4_h16", {}, 0.15, 0.4),
    ("mxfp4_h16", {"signs": "fresh", "gradient_rounding": "stochastic"}, 0.15, 0.45),
    ("mxfp4_h16", {"gemms": ("fprop",), "rest": "mxfp8"}, 0.15, 0.35),
    ("mxfp4_h16", {"gemms": ("fprop", "dgrad")}, 0.15, 0.4),
    ("mxfp4_h16", {"gemms": ("wgrad",), "rest": "bf16", "size": 32, "signs": "fixed"}, 0.05, 0.25),
    ("mxfp4_h16", {"rotate": "wgrad"}, 0.15, 0.4),
    ("all_the_way", {}, 0.15, 0.35),
    ("all_the_way", {"scale": "e5m2", "block": 32, "tensor_scale": False}, 0.15, 0.4),
    ("all_the_way", {"phase": "qaf"}, 0.1, 0.25),
    ("mxfp4_rht", {}, 0.15, 0.4),
    ("tetrajet2", {}, 0.15, 0.45),
    ("fp8", {}, 0.03, 0.08),
    ("mxfp8", {}, 0.03, 0.08),
    ("fp4_forward", {}, 0.1, 0.25),
    ("bf16", {}, 0.0, 0.0),
)
STRUCTURES = [case[:2] for case in CASES]
NAMES = [f"{name} {flags}" for name, flags in STRUCTURES]


def _mlp() -> nn.Sequential:
    """K = 40 and 56: no multiple of 16, 32, 64 or 128 among the features and, with 17 rows, the tokens."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 56), nn.GELU(), nn.Linear(56, 24, bias=False))


def _step(run: nn.Module, model: nn.Module, x: Tensor, seed: int = 1) -> dict[str, Tensor]:
    """Output and gradients of one step from random state `seed`."""
    model.zero_grad()
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    y = run(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype))
    found = {"output": y.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return found | {"x": x.grad}


def _pair(name: str, flags: dict[str, Any], x: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of the plain model and of the recipe's."""
    model = _mlp()
    oracle = OracleModel(copy.deepcopy(model), ["0", "2"], (), name, **flags)
    return _step(model, model, x), _step(oracle, oracle.model, x)


def _errors(want: dict[str, Tensor], got: dict[str, Tensor]) -> dict[str, float]:
    assert got.keys() == want.keys()
    assert all(got[n].shape == want[n].shape and got[n].dtype == want[n].dtype for n in want)
    return {n: float((got[n] - want[n]).norm() / want[n].norm()) for n in want}


def _x(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(("name", "flags", "low", "high"), CASES, ids=NAMES)
def test_error_is_that_of_its_precision(name: str, flags: dict[str, Any], low: float, high: float) -> None:
    for shape in ((17, 40), (2, 3, 40), (1, 40)):
        want, got = _pair(name, flags, _x(*shape))
        assert all(t.isfinite().all() for t in got.values())
        worst = max(_errors(want, got).values())
        assert worst <= high * (1 if shape == (17, 40) else 1.6), shape
        assert worst >= low or shape != (17, 40)


@pytest.fixture
def lossless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantizers that keep every bit. Those with a tensor scale halve the value and say so, so that a lost factor shows."""

    def quantize(x: Tensor, q: Quantizer, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        factor = torch.tensor(2.0 if q.has_tensor_scale else 1.0)
        return x.float() / factor, torch.empty(0), factor

    def decode(codes: Tensor, scales: Tensor, q: Quantizer, columns: int, dtype: torch.dtype) -> Tensor:
        assert columns == codes.shape[1]
        return codes

    def ones(x: Tensor, scales: Tensor, q: Quantizer) -> Tensor:
        return torch.full((x.shape[0], -(-x.shape[1] // 32) * 4), 0xFF, dtype=torch.uint8)

    monkeypatch.setattr(reference, "quantize", quantize)
    monkeypatch.setattr(reference, "decode", decode)
    monkeypatch.setattr(reference, "dequantize", lambda codes, scales, factor, q, columns, dtype: codes)
    monkeypatch.setattr(reference, "clip_mask", ones)


@pytest.mark.usefixtures("lossless")
@pytest.mark.parametrize(("name", "flags"), STRUCTURES, ids=NAMES)
def test_without_loss_it_is_the_plain_linear(name: str, flags: dict[str, Any]) -> None:
    """Rotations cancel or are undone, padding is cut, every tensor scale is multiplied in, whatever the shape."""
    for shape in ((17, 40), (2, 3, 40)):
        bound = 2e-2 if name == "nvfp4" else 2e-6  # nvfp4's rotation rounds to BF16
        errors = _errors(*_pair(name, flags, _x(*shape)))
        assert max(errors.values()) < bound, errors


@pytest.mark.parametrize(("autocast", "bias"), [(False, False), (False, True), (True, False), (True, True)])
def test_bf16_is_the_plain_linear_bit_for_bit(autocast: bool, bias: bool) -> None:
    model = nn.Sequential(nn.Linear(40, 24, bias=bias))
    for shape in ((17, 40), (2, 3, 40)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            want = _step(model, model, _x(*shape))
            oracle = OracleModel(copy.deepcopy(model), ["0"], (), "bf16")
            got = _step(oracle, oracle.model, _x(*shape))
        assert all(torch.equal(got[n], want[n]) for n in want)


def test_quartet_of_representable_operands_is_exact() -> None:
    """Rows sqrt(32) e_j: rotated they are rows of +-1, which MXFP4 has, and the rotation cancels in their product."""
    k = torch.arange(1, 32)  # row 0 of the Hadamard matrix has no variance
    linear = nn.Linear(64, 31, bias=False)
    linear.weight.data = torch.zeros(31, 64)
    linear.weight.data[k - 1, k] = 32**0.5
    oracle = OracleModel(nn.Sequential(linear), ["0"], (), "quartet")
    x = torch.zeros(5, 64)
    x[torch.arange(4), torch.tensor([1, 7, 30, 31])] = 32**0.5
    x[4, 40] = 32**0.5  # in the other block of 32
    want = torch.zeros(5, 31)
    want[torch.arange(4), torch.tensor([0, 6, 29, 30])] = 32.0
    assert torch.equal(oracle(x), want)


def test_quartet_gives_no_gradient_to_what_it_clipped() -> None:
    """Rotated as the forward was, the gradient of X (and of W) is zero exactly where the mask is, and only there."""
    h = Rotation(32, "none", bf16=False)
    q = oracle_recipes.quartet().fprop.first
    assert q is not None
    found = {}
    for clip in (True, False):
        linear = nn.Linear(64, 24)
        torch.manual_seed(4)
        linear.weight.data = torch.randn(24, 64)
        model = nn.Sequential(linear)
        found[clip] = _step(OracleModel(model, ["0"], (), "quartet", clip_gradient=clip), model, _x(17, 64))
    for value, name in ((_x(17, 64), "x"), (linear.weight.data, "0.weight")):
        rotated = reference.rotate(value, h, None, 0)
        mask = reference.clip_mask(rotated, reference.quantize(rotated, q)[1], q)
        kept = reference.apply_mask(torch.ones_like(rotated), mask) > 0
        assert 0.01 < 1 - kept.float().mean() < 0.2
        masked, whole = (reference.rotate(found[clip][name], h, None, 0) for clip in (True, False))
        noise = 1e-5 * whole.abs().max()
        assert (masked[~kept].abs() < noise).all()
        assert (whole[~kept].abs() > noise).float().mean() > 0.9
        assert ((masked - whole)[kept].abs() < noise).all()


Draws = list[tuple[str, int]]


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> dict[str, Draws]:
    """(specification, site) of every quantize and every rotate, in order."""
    found: dict[str, Draws] = {"quantize": [], "rotate": []}
    quantize, rotate = reference.quantize, reference.rotate

    def recorded(x: Tensor, q: Quantizer, amax: Tensor | None = None, seed: Tensor | None = None, site: int = 0) -> Any:
        found["quantize"].append((str(q), site))
        return quantize(x, q, amax, seed, site)

    def rotated(x: Tensor, rotation: Rotation, seed: Tensor | None, site: int) -> Tensor:
        found["rotate"].append((str(rotation), site))
        return rotate(x, rotation, seed, site)

    monkeypatch.setattr(reference, "quantize", recorded)
    monkeypatch.setattr(reference, "rotate", rotated)
    return found


def _third_linear(name: str, x: Tensor, frozen: bool = False, **flags: Any) -> nn.Module:
    """A step of a model whose third linear alone is quantized: its sites start at 32."""
    model = nn.ModuleDict({"c": nn.Linear(40, 24)}).requires_grad_(not frozen)
    oracle = OracleModel(model, ["a", "b", "c"], {"a", "b"}, name, **flags)
    oracle.linears[0].seed = torch.tensor([5])
    oracle.linears[0](x).sum().backward()
    return model


def _at(spec: str, *sites: int) -> Draws:
    return [(spec, site) for site in sites]


FOUR_SIX, QUEST, EVEN = "nvfp4[four_six=yes]", "mxfp4[scale_rule=quest]", "mxfp4[scale_rule=even]"
EVEN_SR = "mxfp4[rounding=stochastic,scale_rule=even,allow_clipping=yes]"
SR, SR32 = "nvfp4[rounding=stochastic]", "nvfp4[block=1x32,rounding=stochastic]"
SR_OUTER = "nvfp4[rounding=stochastic,outer=128]"
LADDER = {"gemms": ("fprop", "wgrad"), "gradient_rounding": "stochastic", "rotate": "wgrad", "size": 32, "signs": "fresh"}
FRESH32 = "hadamard[size=32,signs=fresh,bf16=no]"

# Sites from that of the linear: fprop 0, 1 and signs 8; dgrad 2, 3 and 9; wgrad 4, 5 and 10.
DRAWS: tuple[tuple[str, dict[str, Any], Draws, Draws], ...] = (
    (
        "nvfp4",
        {},
        [*_at("nvfp4", 0), *_at("nvfp4[block=16x16]", 1), *_at(SR, 2, 4), *_at("nvfp4", 5)],
        _at("hadamard[signs=fixed]", 10, 10),
    ),
    (
        "quartet2",
        {},
        [*_at(FOUR_SIX, 0, 1), *_at("nvfp4[rounding=ms_eden]", 2, 3, 4, 5)],
        _at("hadamard[size=128,signs=fresh,bf16=no]", 9, 9, 10, 10),
    ),
    (
        "quartet",
        {},
        [*_at(QUEST, 0, 1), *_at("mxfp4[scale_rule=range_fit]", 2, 3, 4, 5)],
        [*_at("hadamard[size=32,bf16=no]", 8, 8), *_at(FRESH32, 9, 9, 10, 10)],
    ),
    ("mxfp4_h16", {}, _at(EVEN, 0, 1, 2, 3, 4, 5), _at("hadamard[bf16=no]", 8, 8, 9, 9, 10, 10)),
    (
        "mxfp4_h16",
        LADDER,
        [*_at(EVEN, 0), *_at("mxfp4[block=32x32,scale_rule=even]", 1), *_at("fp8", 2), *_at(EVEN_SR, 4), *_at(EVEN, 5)],
        _at(FRESH32, 10, 10),
    ),
    (
        "all_the_way",
        {"block": 32},
        [*_at("nvfp4[block=1x32]", 0, 1), *_at(SR32, 2), *_at("nvfp4[block=1x32]", 3), *_at(SR32, 4, 5)],
        [],
    ),
    (
        "mxfp4_rht",
        {},
        _at("mxfp4[rounding=stochastic,prescale=0.75]", 2, 3, 4, 5),
        _at("hadamard[size=64,signs=fresh,bf16=no]", 9, 9, 10, 10),
    ),
    (
        "tetrajet2",
        {},
        [*_at("nvfp4[outer=128]", 0, 1), *_at(SR_OUTER, 2, 3, 4, 5)],
        _at("hadamard[signs=fresh,bf16=no]", 9, 9, 10, 10),
    ),
    ("fp8", {}, [*_at("fp8", 0), *_at("fp8[block=128x128]", 1), *_at("fp8", 2, 4, 5)], []),
    ("mxfp8", {}, _at("mxfp8", 0, 1, 2, 3, 4, 5), []),
    ("fp4_forward", {}, _at(FOUR_SIX, 0, 1), []),
    ("bf16", {}, [], []),
)


@pytest.mark.parametrize(("name", "flags", "quantized", "rotated"), DRAWS, ids=[f"{d[0]} {d[1]}" for d in DRAWS])
def test_quantizers_and_their_draws(
    name: str, flags: dict[str, Any], quantized: Draws, rotated: Draws, draws: dict[str, Draws]
) -> None:
    _third_linear(name, _x(17, 40).requires_grad_(), **flags)
    assert draws["quantize"] == [(q, 32 + site) for q, site in quantized]
    assert draws["rotate"] == [(h, 32 + site) for h, site in rotated]


@pytest.mark.parametrize("name", ["nvfp4", "quartet", "fp8"])
def test_no_gemm_without_a_gradient_to_compute(name: str, draws: dict[str, Draws]) -> None:
    x = _x(17, 40)
    model = _third_linear(name, x)
    assert {site // 2 for _, site in draws["quantize"]} == {16, 18}
    assert model.get_parameter("c.weight").grad is not None
    draws["quantize"].clear()
    model = _third_linear(name, x.requires_grad_(), frozen=True)
    assert {site // 2 for _, site in draws["quantize"]} == {16, 17}
    assert x.grad is not None
    assert model.get_parameter("c.weight").grad is None


@pytest.mark.parametrize(
    ("name", "flags", "plain"),
    [
        ("all_the_way", {"phase": "qaf"}, ("dgrad", "wgrad")),
        ("fp4_forward", {}, ("dgrad", "wgrad")),
        ("mxfp4_rht", {}, ("fprop",)),
        ("mxfp4_h16", {"gemms": ("dgrad",), "rest": "bf16"}, ("fprop", "wgrad")),
        ("mxfp4_h16", {"gemms": ("fprop", "wgrad"), "rest": "bf16"}, ("dgrad",)),
    ],
)
def test_gemms_left_in_bf16_are_plain(name: str, flags: dict[str, Any], plain: tuple[str, ...]) -> None:
    model = nn.Sequential(nn.Linear(40, 24))
    oracle = OracleModel(copy.deepcopy(model), ["0"], (), name, **flags)
    want, got = _step(model, model, _x(17, 40)), _step(oracle, oracle.model, _x(17, 40))
    for key, gemm in (("output", "fprop"), ("x", "dgrad"), ("0.weight", "wgrad")):
        assert torch.equal(got[key], want[key]) == (gemm in plain), gemm
    assert torch.equal(got["0.bias"], want["0.bias"])


@pytest.mark.parametrize("name", RECIPES)
def test_the_seed_decides(name: str) -> None:
    oracle = OracleModel(_mlp(), ["0", "2"], (), name)
    first, again, other = (_step(oracle, oracle.model, _x(17, 40), seed) for seed in (1, 1, 8))
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert torch.equal(first["output"], other["output"])
    random = name not in ("mxfp4_h16", "fp8", "mxfp8", "fp4_forward", "bf16")
    assert torch.equal(first["x"], other["x"]) != random
    assert torch.equal(first["2.weight"], other["2.weight"]) != random


def test_mxfp4_rht_is_unbiased() -> None:
    """The mean of 256 draws has 1/16 of one draw's error; a bias would be left over."""
    model = nn.Sequential(nn.Linear(40, 24, bias=False))
    want = _step(model, model, _x(17, 40))
    oracle = OracleModel(copy.deepcopy(model), ["0"], (), "mxfp4_rht")
    steps = [_step(oracle, oracle.model, _x(17, 40), seed) for seed in range(256)]
    for name in ("x", "0.weight"):
        one = float(torch.stack([(s[name] - want[name]).norm() for s in steps]).mean())
        mean = torch.stack([s[name] for s in steps]).mean(0)
        assert (mean - want[name]).norm() < 1.2 * one / 16


def test_kept_linears_count_and_stay() -> None:
    model = _mlp()
    first = model[0]
    oracle = OracleModel(model, ["0", "2"], {"0"}, "mxfp8")
    assert model[0] is first
    assert [linear.index for linear in oracle.linears] == [1]
