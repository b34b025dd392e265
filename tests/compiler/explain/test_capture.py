"""fp4.explain captures what the backend compiles, with nothing run, on any device, and leaves the user's state alone."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

import fp4
from fp4.compiler import backend
from fp4.compiler.joint_pass import LowerPass
from fp4.compiler.lowering import LoweringOptions
from tests.filecheck.cases import Tied
from tests.graphs import MLP, compiled, nbytes, ops, rewritten, saved


def _meta() -> MLP:
    with torch.device("meta"):
        return MLP()


@pytest.mark.parametrize("recipe", ["nvfp4", "quartet2"])
def test_the_graphs_are_the_backend_s(recipe: str) -> None:
    x = torch.randn(32, 64)
    got = rewritten(MLP(), x, recipe=recipe)
    (graph,) = fp4.explain(MLP(), x, recipe=recipe).graphs
    assert list(graph.stages) == list(got.joint.stages)
    assert {stage: ops(g) for stage, g in graph.stages.items()} == {stage: ops(g) for stage, g in got.joint.stages.items()}
    assert graph.forward is not None
    assert graph.backward is not None
    assert ops(graph.forward.graph) == ops(got.forward[0].graph)
    assert ops(graph.backward.graph) == ops(got.backward[0].graph)
    assert graph.report == got.report


@pytest.mark.parametrize(
    ("recipe", "options", "shown"),
    [
        ("mxfp4_h16", {"target": "sm_90", "exact": False}, "fp4.fp8_mm.default"),
        ("fp8", {"target": "sm_90", "exact": False}, "fp4.fp8_block_mm.default"),
        ("mxfp8", {"target": "sm_121a", "library": True}, "fp4.library_scaled_mm.default"),
        ("nvfp4", {"target": "sm_100a", "native_draws": True}, "True"),
        ("nvfp4", {"target": "sm_90", "save_weights": True}, "fp4.rotate_quantize.default"),
        ("nvfp4", {}, "invoke_subgraph"),
    ],
    ids=str,
)
def test_the_lowered_graphs_are_the_backend_s(
    recipe: str, options: dict[str, Any], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[LowerPass] = []

    def recorded(options: LoweringOptions) -> LowerPass:
        made.append(LowerPass(options))
        return made[-1]

    monkeypatch.setattr(backend, "LowerPass", recorded)
    x = torch.randn(32, 64)
    got = rewritten(MLP(), x, recipe=recipe, **options)
    pair = got.forward[0].graph, got.backward[0].graph
    for graph in pair:
        made[0](graph)
    e = fp4.explain(MLP(), x, recipe=recipe, **options)
    assert [_calls(gm.graph) for gm in e._lowered[0].values()] == [_calls(graph) for graph in pair]
    assert any(shown in call for graph in pair for call in _calls(graph))
    assert e.graphs[0].report == got.report


def _calls(graph: Graph) -> Counter[tuple[str, ...]]:
    """Every call's target and constants: the order of the graph inputs is not the same, so nor are the nodes' names."""
    calls = (n for n in graph.nodes if n.op == "call_function")
    return Counter((str(n.target), *(str(a) for a in n.args if not isinstance(a, Node))) for n in calls)


@pytest.mark.parametrize("recipe", ["nvfp4", "quartet2", "fp8", "bf16"])
def test_saved_bytes_are_the_forward_graph_s(recipe: str) -> None:
    """Against the sum over the forward graph's own outputs, parameters and inputs left out, a storage counted once."""
    x = torch.randn(32, 64)
    got = rewritten(MLP(), x, recipe=recipe)
    bases = {}
    for node in saved(got):
        while node.op == "call_function" and str(node.target).startswith(("aten.permute", "aten.view", "aten.alias")):
            node = node.args[0]  # type: ignore[assignment]
        bases[node] = nbytes(node)
    expected = sum(n for node, n in bases.items() if node.op != "placeholder")
    totals = fp4.explain(MLP(), x, recipe=recipe).table().totals()
    assert sum(totals.saved_for_linears.values()) + sum(totals.saved_elsewhere.values()) == expected


def test_a_meta_model_gives_the_same_as_a_real_one() -> None:
    x = torch.randn(32, 64)
    assert fp4.explain(_meta(), x.to("meta")).fx() == fp4.explain(MLP(), x).fx()


def test_nothing_runs_and_nothing_changes() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)  # type: ignore[operator]
            return self.linear(x)

    model = Counting()
    before = copy.deepcopy(model.state_dict())
    drawn = torch.get_rng_state()
    fp4.explain(model, torch.randn(4, 64).requires_grad_())
    torch.set_rng_state(drawn)
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in before.items())
    assert all(p.grad is None for p in model.parameters())
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_the_user_s_compiled_code_stays() -> None:
    torch._dynamo.reset()
    count = 0

    def backend(gm: torch.fx.GraphModule, _: object) -> object:
        nonlocal count
        count += 1
        return gm.forward

    model = nn.Sequential(nn.Linear(64, 64))
    run = torch.compile(model, backend=backend)
    x = torch.randn(4, 64)
    run(x)
    for _ in range(10):  # more than Dynamo's limit of recompiles
        fp4.explain(model, x)
    run(x)
    assert count == 1


def test_inference_has_no_backward() -> None:
    with torch.no_grad():
        e = fp4.explain(MLP(), torch.randn(32, 64))
    assert e.graphs[0].backward is None
    assert e.table().totals().gemms == {"fprop": (2, 3)}  # the recipe keeps the last linear


def test_autocast_given_or_around() -> None:
    x = torch.randn(32, 64)
    given = fp4.explain(MLP(), x, autocast=torch.bfloat16).fx()
    with torch.autocast("cpu", torch.bfloat16):
        around = fp4.explain(MLP(), x).fx()
    assert given == around != fp4.explain(MLP(), x).fx()
    assert "fp4.mm(" in given
    assert "torch.bfloat16)  # a fprop" in given


def test_tied_parameters_stay_one() -> None:
    text = fp4.explain(Tied(), torch.empty(2, 16, dtype=torch.int64)).fx("captured")
    assert text.count("# embed.weight") == 1
    assert "# lm_head.weight" not in text


def test_graph_breaks_give_several_graphs() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            torch._dynamo.graph_break()
            return self.b(y)

    e = fp4.explain(Broken(), torch.randn(4, 64), recipe="quartet2")
    assert [x.name for g in e.graphs for x in g.report.linears] == ["a", "b"]  # type: ignore[union-attr]


def test_a_compiled_model_is_explained_as_the_model() -> None:
    x = torch.randn(4, 64)
    assert fp4.explain(compiled(MLP()), x).fx() == fp4.explain(MLP(), x).fx()


def test_errors_say_what_to_write() -> None:
    class Needs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum().item() > 0 else -x

    with pytest.raises(fp4.ExplainError, match=r"takes a torch\.nn\.Module, got function"):
        fp4.explain(lambda x: x, torch.randn(4))  # type: ignore[arg-type]
    with pytest.raises(fp4.ExplainError, match="needs the values of a tensor"):
        fp4.explain(Needs(), torch.randn(4))
    with pytest.raises(fp4.ExplainError, match="no matrix product"):
        fp4.explain(nn.ReLU(), torch.randn(4, requires_grad=True))
    with pytest.raises(fp4.ExplainError, match="no stage 'tokens'; write one of captured, tagged"):
        fp4.explain(MLP(), torch.randn(4, 64)).fx("tokens")
    with pytest.raises(fp4.PolicyError, match="nvfp5"):
        fp4.explain(MLP(), torch.randn(4, 64), recipe="nvfp5")
    with pytest.raises(ValueError, match="sm_100a"):
        fp4.explain(MLP(), torch.randn(4, 64), target="sm_10")
    for target in ("cpu", "sm_90"):
        with pytest.raises(ValueError, match="native_draws=True.*sm_100a and sm_103a"):
            fp4.explain(MLP(), torch.randn(4, 64), target=target, native_draws=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'recip'"):
        fp4.explain(MLP(), torch.randn(4, 64), recip="nvfp4")
