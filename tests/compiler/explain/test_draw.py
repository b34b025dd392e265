"""The networkx graphs and the drawing: what is a node, what flows, what is drawn in which colour."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

import fp4
from fp4.compiler.explain.draw import COLORS, chip
from fp4.compiler.explain.scene import Box, Curve, Scene, Text
from tests.graphs import MLP


@pytest.fixture(scope="module")
def mlp() -> fp4.Explanation:
    return fp4.explain(MLP(), torch.empty(32, 64, requires_grad=True), recipe="nvfp4")


def test_linears_and_the_steps_between_them(mlp: fp4.Explanation) -> None:
    (graph,) = mlp.graph()
    assert list(graph) == ["a", "#0", "b", "#1", "c"]
    forward = [(a, b) for a, b, d in graph.edges(data="direction") if d == "forward"]
    assert forward == [("a", "#0"), ("#0", "b"), ("b", "#1"), ("#1", "c")]
    assert [(a, b) for a, b, d in graph.edges(data="direction") if d == "backward"] == [(b, a) for a, b in forward]
    assert graph.edges["a", "#0", "forward"]["bytes"] == 32 * 96 * 4
    row = graph.nodes["b"]["row"]
    assert [x for x in row.saved if x[1] == "X"] == [("nvfp4", "X", 1536), ("nvfp4", "X", 192), ("nvfp4", "X", 4)]


def test_q_k_and_v_share_what_q_saves(explained: fp4.Explanation) -> None:
    (graph,) = explained.graph()
    q, k, v = (f"model.layers.0.self_attn.{x}_proj" for x in "qkv")
    for other in (k, v):
        assert graph.nodes[other]["row"].shared == [("X", q)]
        assert graph.edges[q, other, "forward"]["format"] == "nvfp4"
    residual = graph.edges["model.embed_tokens.#0", "model.layers.0.#0", "forward"]
    assert (residual["bytes"], residual["format"]) == (64 * 64 * 4, "f32")


def test_gradients_of_the_residual_stream_flow_a_block_at_a_time(explained: fp4.Explanation) -> None:
    (graph,) = explained.graph()
    order = graph.nodes(data="order")
    up = [order[a] - order[b] for a, b, d in graph.edges(data="direction") if d == "backward"]
    assert min(up) > 0
    assert max(up) <= 8


def test_layers_that_are_alike_are_one(explained: fp4.Explanation) -> None:
    (graph,) = explained.graph(collapse=True)
    runs = {row.run.label for _, row in graph.nodes(data="row") if row.run}
    assert runs == {"model.layers.0-2", "model.layers.3"}
    assert "model.layers.1.mlp.up_proj" in graph
    assert "model.layers.0.mlp.up_proj" not in graph


def test_ops_graph_is_the_fx_graph(mlp: fp4.Explanation) -> None:
    (graph,) = mlp.graph("ops")
    nodes = mlp.graphs[0].rewritten.nodes
    assert graph.number_of_nodes() == len(nodes)
    assert {(a, b) for a, b in graph.edges} == {(i.name, n.name) for n in nodes for i in n.all_input_nodes}
    gemms = {(d["linear"], d["role"]) for _, d in graph.nodes(data=True) if d["role"]}
    assert gemms == {(x, r) for x in "abc" for r in ("fprop", "dgrad", "wgrad")}
    with pytest.raises(fp4.ExplainError, match="write 'linears' or 'ops'"):
        mlp.graph("modules")


def test_operands_have_the_colour_of_their_format(mlp: fp4.Explanation) -> None:
    scene = mlp.draw()
    chips = {b.tip: b.fill for b in scene.shapes if isinstance(b, Box) and b.tip.startswith(("fprop", "dgrad", "wgrad"))}
    assert chips["fprop X: nvfp4"] == COLORS["nvfp4"]
    assert chips["wgrad dY: nvfp4[rounding=stochastic] hadamard[signs=fixed]"] == COLORS["nvfp4"]
    assert chips["fprop X: high precision"] == COLORS["f32"]
    texts = [t.text for t in scene.shapes if isinstance(t, Text)]
    assert texts.count("dY nvfp4 SR H16") == 2
    assert "X nvfp4 1.69 KiB" in texts


def test_wider_is_more_bytes(mlp: fp4.Explanation) -> None:
    curves = [c for c in mlp.draw().shapes if isinstance(c, Curve)]
    size = {c.width: int(c.tip.rpartition(", ")[2].split()[0].replace(",", "")) for c in curves}
    assert len(size) > 1
    assert sorted(size, key=lambda w: size[w]) == sorted(size)


def test_nothing_overlaps_and_all_is_inside(explained: fp4.Explanation) -> None:
    scene = explained.draw()
    rows = [b for b in scene.shapes if isinstance(b, Box) and b.key]
    assert all(a.y + a.height <= b.y for a, b in itertools.pairwise(rows))
    for shape in scene.shapes:
        if isinstance(shape, Box):
            assert 0 <= shape.x < shape.x + shape.width <= scene.width
            assert 0 <= shape.y < shape.y + shape.height <= scene.height


def test_chips() -> None:
    assert chip("W", "nvfp4[block=16x16]", "", "bf16") == ("nvfp4", "W nvfp4 16x16")
    forward = "nvfp4[rounding=ms_eden] of the forward copy"
    assert chip("X", forward, "hadamard[size=128,signs=fresh,bf16=no]", "bf16") == ("nvfp4", "X nvfp4* MS H128")
    assert chip("dY", "high precision", "", "bf16") == ("bf16", "dY bf16")
    assert chip("X", "mxfp4[scale_rule=quest], gradient clipped", "hadamard[size=32]", "bf16")[0] == "mxfp4"


def test_files(mlp: fp4.Explanation, tmp_path: Path) -> None:
    mlp.draw(tmp_path / "m.svg")
    root = ET.parse(tmp_path / "m.svg").getroot()
    assert {e.get("data-name") for e in root.iter() if e.get("data-name")} == {"a", "b", "c", "the model"}
    mlp.draw(tmp_path / "m.png")
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(fp4.ExplainError, match=r"ends in \.svg or \.png"):
        mlp.draw(tmp_path / "m.pdf")


def test_one_layer(explained: fp4.Explanation) -> None:
    keys = {b.key for b in explained.draw(layer="model.layers.2").shapes if isinstance(b, Box) and b.key}
    assert keys
    assert all(k.startswith("model.layers.2") for k in keys)
    with pytest.raises(fp4.ExplainError, match=r"no module 'layers\.2' in the graph; its linears: model\.layers\.0"):
        explained.draw(layer="layers.2")


def test_text_is_escaped() -> None:
    assert "&lt;computed weight 0&gt;" in Scene(10, 10, [Text(0, 0, "<computed weight 0>")]).svg()
