"""Option native_draws: kernels round stochastically by the GPU's own instruction, as the oracle of those draws does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph

from fp4.compiler import backend
from fp4.compiler.backend import OptionError, Options
from fp4.compiler.graph import fp4_nodes
from fp4.compiler.joint_pass import LowerPass
from fp4.compiler.lowering import LoweringOptions
from fp4.passes import lowering
from fp4.passes.lower_reference import LowerReference
from fp4.runtime import reference
from fp4.runtime.spec import MXFP4, NVFP4, Quantizer, Rotation
from tests.graphs import MLP, equal, evaluate, rewritten
from tests.passes.test_lower_blackwell import graphs, inputs_of, lowered, policy, recipe

KERNELS = ("rotate_quantize", "fake_quantize", "requantize", "fake_requantize", "quantize_masked")
DRAWN, MASKED = NVFP4(rounding="stochastic"), MXFP4(rounding="stochastic", scale_rule="range_fit")


def passes(native_draws: bool, **options: Any) -> list[Any]:
    found = lowering(LoweringOptions(target="sm_100a", native_draws=native_draws, **options))
    return [p for p in found if not isinstance(p, LowerReference)]


def drawn(graph: Graph) -> set[tuple[str, bool]]:
    """Rounding of each kernel's quantizer, and whether the instruction draws."""
    found = set()
    for name in KERNELS:
        for node in fp4_nodes(graph, name):
            names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
            given = dict(zip(names, node.args, strict=False))
            found.add((Quantizer.parse(str(given["quantizer"])).rounding, bool(given["native_draws"])))
    return found


CASES = {
    "nvfp4": recipe("nvfp4"),
    "tetrajet2": recipe("tetrajet2"),
    "quartet2": recipe("quartet2"),
    "rotated": policy(DRAWN, DRAWN, Rotation(16, signs="fixed")),
    "mxfp4": policy(MASKED, MASKED),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [64, 40])
def test_the_oracle_of_the_instruction(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal, bit for bit, to the graph whose quantize ops are the oracle with native draws; to the plain one if none draws."""
    values = reference.quantize_values

    def native(x: Any, q: Any, amax: Any = None, seed: Any = None, site: Any = 0, native_draws: bool = False) -> Any:
        return values(x, q, amax, seed, site, True)

    draws = False
    for graph in graphs(CASES[name], rows):
        new = lowered(graph, passes(native_draws=True))
        assert all(by_instruction == (rounding == "stochastic") for rounding, by_instruction in drawn(new))
        assert not any(by_instruction for _, by_instruction in drawn(lowered(graph, passes(native_draws=False))))
        here = ("stochastic", True) in drawn(new)
        draws |= here
        inputs = inputs_of(graph)
        got, plain = evaluate(new, inputs), evaluate(graph, inputs)
        with monkeypatch.context() as patch:
            patch.setattr(reference, "quantize_values", native)
            assert equal(got, evaluate(graph, inputs))
        assert equal(got, plain) == (not here)
    assert draws == (name != "quartet2")


def test_beside_the_clip_mask() -> None:
    x, seed = torch.randn(40, 64), torch.tensor([5])
    got = torch.ops.fp4.quantize_masked(x, None, str(MASKED), "", seed, 3, 0, True)
    assert equal(got[:3], reference.quantize(x, MASKED, None, seed, 3, native_draws=True))
    assert torch.equal(got[3], reference.clip_mask(x, got[1], MASKED))
    assert not torch.equal(got[0], reference.quantize(x, MASKED, None, seed, 3)[0])


def test_where_there_is_no_such_instruction() -> None:
    x = torch.zeros(2)
    for options in ({"target": "sm_90"}, {"target": "sm_120a"}, {}, {"kernels": False}):
        with pytest.raises(OptionError, match="native_draws=True.*sm_100a and sm_103a.*Leave native_draws out"):
            Options.read({"native_draws": True, **options}, None).check_draws([x])
    Options.read({"native_draws": True, "target": "sm_103a"}, None).check_draws([x])
    Options.read({"target": "sm_90"}, None).check_draws([x])
    with pytest.raises(OptionError, match="True or False"):
        Options.read({"native_draws": "yes"}, None)
    with pytest.raises(Exception, match="Leave native_draws out"):
        rewritten(MLP(), torch.randn(32, 64), policy=recipe("nvfp4"), native_draws=True)


def test_the_option_reaches_the_pass_and_the_cache_key(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[LowerPass] = []

    def recorded(options: LoweringOptions) -> LowerPass:
        made.append(LowerPass(options))
        return made[-1]

    monkeypatch.setattr(backend, "LowerPass", recorded)
    rewritten(MLP(), torch.randn(40, 64), policy=recipe("nvfp4"), train=False, target="sm_100a", native_draws=True)
    assert [p.options for p in made] == [LoweringOptions(target="sm_100a", native_draws=True)]
    assert made[0].uuid() != LowerPass(LoweringOptions(target="sm_100a")).uuid()
