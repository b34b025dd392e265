"""The fp4:: ops: schema, fakes, dynamic shapes, tracing, autograd, errors, and equality with the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import fp4.runtime.ops  # noqa: F401  (registers the ops)
from fp4.runtime import layout, reference
from fp4.runtime.spec import FP8, MXFP4, MXFP8, NVFP4, Quantizer, Rotation
from tests.runtime import cases

ops = torch.ops.fp4
Function = Callable[[torch.Tensor, torch.Tensor], Any]
SEED = torch.tensor([3])
OP_QUANTIZERS: tuple[Quantizer, ...] = (
    NVFP4(),
    NVFP4(block=(16, 16), four_six=True),
    NVFP4(rounding="stochastic", range_guard=True),
    NVFP4(rounding="ms_eden"),
    NVFP4(scale="e2m5", tensor_scale=False),
    NVFP4(outer=32),
    NVFP4(outer=128, rounding="stochastic"),
    MXFP4(),
    MXFP4(scale_rule="range_fit", rounding="stochastic"),
    MXFP4(scale_rule="quest"),
    MXFP8(),
    FP8(),
    FP8(block=(128, 128), format="e5m2"),
)
ROTATIONS = (Rotation(), Rotation(signs="fixed", bf16=False), Rotation(size=128, signs="fresh"))
QUEST = MXFP4(scale_rule="quest")


def _seed(spec: Quantizer | Rotation) -> torch.Tensor | None:
    return SEED if spec.needs_seed else None


def _op_names() -> list[str]:
    return sorted({name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fp4::")})


def test_the_ops_are_all_there() -> None:
    expected = {"amax", "rotate", "unrotate", "quantize", "dequantize", "clip_mask", "apply_mask", "mm", "swizzle", "unswizzle"}
    assert expected <= {name.removeprefix("fp4::") for name in _op_names()}


def test_no_schema_has_a_mutable_argument() -> None:
    for name in _op_names():
        overload = getattr(torch.ops.fp4, name.removeprefix("fp4::").split(".")[0]).default
        assert not overload._schema.is_mutable
        assert all(a.alias_info is None for a in (*overload._schema.arguments, *overload._schema.returns))


def _calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """One call of each op and specification."""
    x = cases.gaussian(19, 40, seed=80)
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {"amax": (ops.amax, (x,))}
    for r in ROTATIONS:
        calls[f"rotate {r}"] = (ops.rotate, (x, str(r), _seed(r), 2))
        rotated = reference.rotate(x, r, _seed(r), 2)
        calls[f"unrotate {r}"] = (ops.unrotate, (rotated, str(r), _seed(r), 2, 40, torch.bfloat16))
    for q in OP_QUANTIZERS:
        amax = reference.amax(x) if q.needs_amax else None
        codes, scales, tensor_scale = reference.quantize(x, q, amax, _seed(q), 1)
        calls[f"quantize {q}"] = (ops.quantize, (x, amax, str(q), _seed(q), 1))
        calls[f"dequantize {q}"] = (ops.dequantize, (codes, scales, tensor_scale, str(q), 40, torch.bfloat16))
        calls[f"decode {q}"] = (ops.dequantize, (codes, scales, None, str(q), 33, torch.float32))
    scales = reference.quantize(x, QUEST)[1]
    calls["clip_mask"] = (ops.clip_mask, (x, scales, str(QUEST)))
    calls["apply_mask"] = (ops.apply_mask, (x.to(torch.bfloat16), reference.clip_mask(x, scales, QUEST)))
    calls["quantize, own amax"] = (ops.quantize, (x.to(torch.bfloat16), None, "nvfp4", None, 0))
    calls["mm"] = (ops.mm, (x, cases.gaussian(7, 40, seed=81), torch.tensor(0.5), torch.ones(7), torch.bfloat16))
    calls["mm, plain"] = (ops.mm, (x.to(torch.bfloat16), x.to(torch.bfloat16), None, None, torch.float32))
    scales = torch.randint(0, 256, (130, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    calls["swizzle"] = (ops.swizzle, (scales,))
    calls["unswizzle"] = (ops.unswizzle, (layout.swizzle(scales), 130, 5))
    return calls


CALLS = _calls()


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    op, arguments = CALLS[name]
    torch.library.opcheck(op, arguments)


@pytest.mark.parametrize("name", CALLS)
def test_fake_has_the_layout_of_the_result(name: str) -> None:
    op, arguments = CALLS[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = op(*arguments)
    results = op(*arguments)
    for fake, real in zip(*((v,) if isinstance(v, torch.Tensor) else v for v in (fakes, results)), strict=True):
        assert real.is_contiguous()
        assert (fake.shape, fake.dtype, fake.stride(), fake.device) == (real.shape, real.dtype, real.stride(), real.device)


@pytest.mark.parametrize("name", [n for n in CALLS if not n.startswith("unswizzle")])
def test_fake_does_not_guard_on_sizes(name: str) -> None:
    op, arguments = CALLS[name]
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)

    def fake(v: Any) -> Any:
        if not isinstance(v, torch.Tensor):
            return v
        context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * v.dim())
        return mode.from_tensor(v, symbolic_context=context)

    fakes = [fake(a) for a in arguments]
    if op is ops.mm:  # an equation between two symbols is no specialisation
        fakes[1] = fakes[0].new_empty((7, fakes[0].shape[1]))
    before = len(env.guards)
    with mode:
        op(*fakes)
    assert len(env.guards) == before


@pytest.mark.parametrize("q", OP_QUANTIZERS, ids=str)
def test_equals_the_reference(q: Quantizer) -> None:
    x = cases.gaussian(33, 50, seed=82)
    got = ops.quantize(x, None, str(q), _seed(q), 4)
    want = reference.quantize(x, q, None, _seed(q), 4)
    for a, b in zip(got, want, strict=True):
        assert cases.same_bits(a, b)
    for dtype in (torch.bfloat16, torch.float32):
        assert cases.same_bits(ops.dequantize(*got, str(q), 50, dtype), reference.dequantize(*want, q, 50, dtype))
        assert cases.same_bits(ops.dequantize(*got[:2], None, str(q), 50, dtype), reference.decode(*want[:2], q, 50, dtype))


@pytest.mark.parametrize("r", ROTATIONS, ids=str)
def test_rotate_equals_the_reference(r: Rotation) -> None:
    x = cases.gaussian(5, 50, seed=83)
    rotated = reference.rotate(x, r, _seed(r), 1)
    assert cases.same_bits(ops.rotate(x, str(r), _seed(r), 1), rotated)
    for dtype in (torch.bfloat16, torch.float32):
        got = ops.unrotate(rotated, str(r), _seed(r), 1, 50, dtype)
        assert cases.same_bits(got, reference.unrotate(rotated, r, _seed(r), 1, 50, dtype))


def test_masks_equal_the_reference() -> None:
    x = 4 * cases.gaussian(5, 50, seed=86)
    scales = reference.quantize(x, QUEST)[1]
    mask = ops.clip_mask(x, scales, str(QUEST))
    assert cases.same_bits(mask, reference.clip_mask(x, scales, QUEST))
    assert cases.same_bits(ops.apply_mask(x, mask), reference.apply_mask(x, mask))


def _quantized(q: Quantizer) -> Function:
    return lambda x, seed: reference.quantize(x, q, None, seed, 1)


def _decoded(q: Quantizer) -> Function:
    def function(x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        values, scales, *_ = reference.quantize_values(x, q, None, seed, 1)
        return reference.decode_values(values, scales, q, x.shape[1], torch.bfloat16)

    return function


def _dequantized(q: Quantizer) -> Function:
    def function(x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        values, scales, _, _, tensor_scale = reference.quantize_values(x, q, None, seed, 1)
        return reference.dequantize_values(values, scales, tensor_scale, q, x.shape[1], torch.float32)

    return function


def _rotated(r: Rotation) -> Function:
    return lambda x, seed: reference.rotate(x, r, seed, 1)


def _unrotated(r: Rotation) -> Function:
    def function(x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        padded = layout.pad_to(x, 1, r.size)
        return reference.unrotate(padded, r, seed, 1, x.shape[1], torch.bfloat16)

    return function


def _masked(x: torch.Tensor, seed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = reference.clip_mask(x, reference.quantize(x, QUEST)[1], QUEST)
    return mask, reference.apply_mask(x + 1.0, mask)


FUNCTIONS: dict[str, Function] = {
    **{str(q): _quantized(q) for q in OP_QUANTIZERS},
    **{f"decoded {q}": _decoded(q) for q in OP_QUANTIZERS},
    **{f"dequantized {q}": _dequantized(q) for q in OP_QUANTIZERS if q.has_outer_scale},
    **{str(r): _rotated(r) for r in ROTATIONS},
    **{f"inverse {r}": _unrotated(r) for r in ROTATIONS},
    "masks": _masked,
    "amax": lambda x, seed: reference.amax(x),
}


def _same(got: Any, want: Any) -> bool:
    pairs = zip(*((v,) if isinstance(v, torch.Tensor) else v for v in (got, want)), strict=True)
    return all(cases.same_bits(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n in ("nvfp4", "fp8") or n not in map(str, OP_QUANTIZERS)])
def test_reference_traces_with_symbolic_sizes(name: str) -> None:
    """The graph has no constants, no read of a value on the host, no mutation, and holds for other sizes."""
    function = FUNCTIONS[name]
    graph = make_fx(function, tracing_mode="symbolic")(cases.gaussian(150, 140, seed=84), SEED)
    for node in graph.graph.nodes:
        assert node.op != "get_attr"
        if isinstance(node.target, torch._ops.OpOverload):
            assert not node.target._schema.is_mutable, node.target
            assert node.target is not torch.ops.aten._local_scalar_dense.default
    for shape in ((150, 140), (34, 67), (5, 257), (130, 16)):
        x = cases.gaussian(*shape, seed=85)
        assert _same(graph(x, SEED + 1), function(x, SEED + 1)), shape


def _inductor_equals_eager(name: str) -> None:
    """Inlined as the CPU lowering inlines it: traced to ATen first, Dynamo never sees the reference's Python."""
    function = FUNCTIONS[name]
    torch._dynamo.reset()
    graph = make_fx(function, tracing_mode="symbolic")(cases.gaussian(150, 140, seed=84), SEED)
    compiled = torch.compile(graph, fullgraph=True, dynamic=True)
    for data in ("gaussian", "quarter_grid", "midpoints", "denormals", "wide", "poisoned", "zero_parts", "huge"):
        x = cases.DATA[data]().float()
        assert _same(compiled(x, SEED), function(x, SEED)), data


def _outer_scales_masks_and_inverse(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q, r = NVFP4(outer=128), Rotation(size=32, bf16=False)
    values, scales, _, _, outer = reference.quantize_values(x, q)
    rotated = reference.rotate(x, r, None, 0)
    mask = reference.clip_mask(rotated, reference.quantize(rotated, QUEST)[1], QUEST)
    half = reference.apply_mask(rotated.to(torch.bfloat16), mask)  # Inductor must round here, before the FP32 butterfly
    return (
        reference.dequantize_values(values, scales, outer, q, x.shape[1], torch.float32),
        outer,
        reference.apply_mask(x, mask),
        reference.unrotate(half, r, None, 0, x.shape[1], torch.bfloat16),
    )


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_inductor_equals_eager_where_columns_are_no_multiple(dynamic: bool) -> None:
    """257 columns: 1 in the third group of 128, in the ninth of 32, in the last byte of a mask."""
    x = cases.gaussian(5, 257, seed=87)
    example = cases.gaussian(150, 140, seed=84) if dynamic else x
    graph = make_fx(_outer_scales_masks_and_inverse, tracing_mode="symbolic" if dynamic else "real")(example)
    torch._dynamo.reset()
    compiled = torch.compile(graph, fullgraph=True, dynamic=dynamic)
    assert _same(compiled(x), _outer_scales_masks_and_inverse(x))


def test_inductor_equals_eager() -> None:
    _inductor_equals_eager("nvfp4")


# Of a quantizer one form, packed or decoded: they share all but the last operations, and take long to compile.
OTHER_FORMS = {*map(str, OP_QUANTIZERS[::2]), *(f"decoded {q}" for q in OP_QUANTIZERS[1::2])}


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n not in OTHER_FORMS])
def test_inductor_equals_eager_for_the_rest(name: str) -> None:
    _inductor_equals_eager(name)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: ops.amax(x),
        lambda x: ops.rotate(x, "hadamard", None, 0),
        lambda x: ops.unrotate(x, "hadamard", None, 0, 16, torch.float32),
        lambda x: ops.apply_mask(x, torch.zeros(2, 4, dtype=torch.uint8)),
        lambda x: ops.mm(x, x, None, None, torch.float32),
        lambda x: ops.dequantize(
            torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8), x.sum(), "nvfp4", 16, torch.float32
        ),
    ],
)
def test_differentiating_is_an_error(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.ones(2, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"fp4::\w+ has no derivative.*x\.detach\(\)"):
        call(x).sum().backward()


def test_no_gradient_is_needed_under_no_grad() -> None:
    x = torch.ones(2, 16, requires_grad=True)
    with torch.no_grad():
        assert ops.amax(x).item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.uint8])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    x = torch.ones(2, 16, dtype=dtype)
    for op, arguments in (
        (ops.amax, ()),
        (ops.quantize, (None, "nvfp4", None, 0)),
        (ops.rotate, ("hadamard", None, 0)),
        (ops.apply_mask, (torch.zeros(2, 4, dtype=torch.uint8),)),
    ):
        with pytest.raises(TypeError, match=rf"{dtype}.*x\.float\(\)"):
            op(x, *arguments)


@pytest.mark.parametrize("shape", [(16,), (2, 3, 16)])
def test_other_ranks_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"dimensions; flatten it to \(rows, contracted dimension\)"):
        ops.quantize(torch.ones(shape), None, "nvfp4", None, 0)


def test_missing_seed_is_refused() -> None:
    for q in ("nvfp4[rounding=stochastic]", "nvfp4[rounding=ms_eden]"):
        with pytest.raises(ValueError, match="pass seed, an int64 tensor of one element"):
            ops.quantize(torch.ones(2, 16), None, q, None, 0)
    with pytest.raises(ValueError, match="pass seed"):
        ops.rotate(torch.ones(2, 16), "hadamard[signs=fresh]", None, 0)


def test_unknown_specification_is_refused() -> None:
    with pytest.raises(ValueError, match="known names: fp8, mxfp4, mxfp8, nvfp4"):
        ops.quantize(torch.ones(2, 16), None, "int4", None, 0)
