"""The passes on a two-layer Hugging Face Llama: every product found, the recipe's linears kept, exact counts."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.fx import Node

import fp4
from fp4.compiler.sites import ROLES, Role, find_gemms
from tests.graphs import LLAMA, LLAMA_KEPT, Captured, fp4_nodes, llama, ops, quantizers, rewritten, tokens, trios
from tests.oracle_recipes import OracleModel

QUANTIZED = [name for name in LLAMA if name not in LLAMA_KEPT]  # 11


def loss(output: object) -> Tensor:
    return output.logits.float().square().mean()  # type: ignore[attr-defined]


@cache
def captured(autocast: bool) -> Captured:
    return rewritten(llama(), tokens(), loss=loss, autocast=autocast)


@pytest.mark.parametrize("autocast", [False, True])
def test_every_product_has_its_role(autocast: bool) -> None:
    got = captured(autocast)
    assert trios(got) == [(name, tuple(map(str, ROLES))) for name in LLAMA]
    assert got.joint.context.unknown == []
    assert got.report.unknown == {}
    # 15 linears, three products each, and no product elsewhere: attention is one op.
    assert len(find_gemms(got.joint.stages["captured"])) == 45


@pytest.mark.parametrize("autocast", [False, True])
def test_the_head_and_the_last_layers_stay(autocast: bool) -> None:
    got = captured(autocast)
    reasons = {x.name: {(g.quantized, g.reason.partition("(")[0]) for g in x.gemms} for x in got.report.linears}
    assert {name for name, seen in reasons.items() if seen == {(True, "")}} == set(QUANTIZED)
    assert {name for name, seen in reasons.items() if seen == {(False, "keep_last")}} == set(LLAMA_KEPT[:-1])
    assert reasons["lm_head"] == {(False, "keep heads and routers")}
    # 11 quantized linears and 4 kept ones, three products each.
    count = ops(got.joint.final)
    assert (count["fp4::mm"], count["aten::mm"]) == (33, 12)
    assert not got.report.warnings


@pytest.mark.parametrize("autocast", [False, True])
def test_quantize_counts(autocast: bool) -> None:
    """Equal activations are quantized once.

    Quantized linears: 7 of layer 0, and q, k, v, o of layer 1. Their inputs: q, k, v read one; o one; gate and up one; down
    one: 4 + 2 = 6 activations, each once by rows (fprop) and once rotated, by columns (wgrad): 12. Weights: 11 for fprop, and
    11 again in backward for dgrad: 22. Gradients: 11 by rows (dgrad) and 11 rotated, by columns (wgrad): 22. In all 56, where
    one quantize an operand would be 66.
    """
    joint = captured(autocast).joint
    expected = {"nvfp4": 12, "nvfp4[block=16x16]": 22, "nvfp4[rounding=stochastic]": 22}
    assert quantizers(joint.final) == expected
    assert sum(quantizers(joint.stages["insert_quantize"]).values()) == 66
    # Rotated: 6 activations and 11 gradients. Before sharing, each of 11 wgrads rotated both its operands.
    assert ops(joint.final)["fp4::rotate"] == 17
    assert ops(joint.stages["insert_rotation"])["fp4::rotate"] == 22


def test_q_k_v_read_one_quantized_activation() -> None:
    got = captured(False)
    mms = {n.name: n for n in fp4_nodes(got.joint.final, "mm")}

    def operand(name: str, role: Role, which: int) -> Node:
        (linear,) = [x for x in got.linears if x.site.name == name]
        gemm = linear.gemms[role]
        return mms[gemm.node.name].args[gemm.slot(which)]  # type: ignore[return-value]

    for layer in (0, 1):
        q, k, v, o = (f"model.layers.{layer}.self_attn.{n}_proj" for n in "qkvo")
        for role, which in ((Role.FPROP, 0), (Role.WGRAD, 1)):
            codes = {operand(n, role, which).args[0] for n in (q, k, v)}
            assert len(codes) == 1
            assert operand(o, role, which).args[0] not in codes


def test_without_the_pass_nothing_is_quantized() -> None:
    got = rewritten(llama(), tokens(), policy=fp4.recipe("bf16"), loss=loss)
    assert not list(fp4_nodes(got.joint.final))
    assert len(find_gemms(got.joint.final)) == 45


def test_a_tied_head_is_kept_by_its_own_name() -> None:
    """The tied weight is first met as the embedding's; a recipe that keeps lm_head must keep it all the same."""
    got = rewritten(llama(tie_word_embeddings=True), tokens(), loss=loss)
    assert trios(got)[-1][0] == "lm_head"
    assert [x.name for x in got.report.linears if not any(g.quantized for g in x.gemms)] == LLAMA_KEPT
    weight = got.model._orig_mod.lm_head.weight
    assert weight is got.model._orig_mod.model.embed_tokens.weight
    assert weight.grad is not None


def test_the_rewritten_graph_computes_the_recipe() -> None:
    """Forward and all gradients equal an eager Llama with the oracle's linears, bit for bit.

    As many key heads as query heads: the sum over a group's heads is the decomposition's, not eager's.
    """
    model = llama(num_key_value_heads=4)
    plain = copy.deepcopy(model)
    got = rewritten(model, tokens(), loss=loss, autocast=True, seed=5, inductor={"fallback_random": True})
    oracle = OracleModel(plain, LLAMA, LLAMA_KEPT)
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(5)
        output = oracle(tokens())
    loss(output).backward()
    assert torch.equal(got.output.logits, output.logits)
    assert [
        n for (n, p), q in zip(model.named_parameters(), plain.parameters(), strict=True) if not torch.equal(p.grad, q.grad)
    ] == []
