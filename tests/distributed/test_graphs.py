"""What the passes put into a sharded model's graph: in one process, whose process group pretends to have others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fp4
from fp4.compiler.backend import OptionError, Options
from fp4.compiler.graph import fp4_nodes
from fp4.compiler.shards import Shard, position
from tests.graphs import MLP, Captured, rewritten

TENSOR_SCALED = fp4.GemmPrecision(fp4.NVFP4(rounding="stochastic"), fp4.NVFP4(rounding="stochastic"))
ALL_RANDOM = fp4.Policy("random", fp4.LinearPrecision(TENSOR_SCALED, TENSOR_SCALED, TENSOR_SCALED))


def tokens_of(count: int) -> torch.Tensor:
    return torch.randn(count, 64, requires_grad=True)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Any]:
    """A process group of this process, rank 3, and three others that are not there: collectives do nothing.

    One for all tests: DTensor's caches hold meshes, and a mesh the groups it was made with.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    yield
    dist.destroy_process_group()


def tensor_parallel(model: MLP, **plan: Any) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.device_mesh.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    return parallelize_module(model, mesh, plan or {"a": ColwiseParallel(), "b": RowwiseParallel()})


def by_rank(got: Captured) -> dict[tuple[str, str], tuple[Any, Any]]:
    """(linear, role and operand) -> what its quantize reads: is its amax reduced, and the place its seed names."""
    found = {}
    for linear in got.linears:
        for role, gemm in linear.gemms.items():
            for operand in (0, 1):
                node: Any = gemm.node.args[gemm.slot(operand)]
                while node.target is not torch.ops.fp4.quantize.default:
                    node = node.args[0]
                amax, seed = node.args[1], node.args[3]
                place = seed.args[1:] if seed.target is torch.ops.fp4.locate.default else None
                found[linear.site.name, f"{role}{operand}"] = amax.target is torch.ops.fp4.reduce_amax.default, place
    return found


def test_only_sharded_operands_are_reduced_and_located(ranks: Any) -> None:
    """a: N is in four parts, of which this is the last; b: K is."""
    got = rewritten(tensor_parallel(MLP()), tokens_of(32), policy=ALL_RANDOM)
    whole = (False, None)
    # W and dY of a, (96, 64) and (32, 96); X and W of b, (32, 96) and (64, 96): 24 of 96 in this rank.
    assert by_rank(got) == {
        ("a", "fprop0"): whole,
        ("a", "fprop1"): (True, (24, 3, 64, 0)),
        ("a", "dgrad0"): (True, (32, 0, 96, 72)),
        ("a", "dgrad1"): (True, (64, 0, 96, 72)),
        ("a", "wgrad0"): (True, (24, 3, 32, 0)),
        ("a", "wgrad1"): whole,
        ("b", "fprop0"): (True, (32, 0, 96, 72)),
        ("b", "fprop1"): (True, (64, 0, 96, 72)),
        ("b", "dgrad0"): whole,
        ("b", "dgrad1"): (True, (24, 3, 64, 0)),
        ("b", "wgrad0"): whole,
        ("b", "wgrad1"): (True, (24, 3, 32, 0)),
        **{("c", f"{role}{operand}"): whole for role in ("fprop", "dgrad", "wgrad") for operand in (0, 1)},
    }


def test_ranks_that_share_a_mesh_draw_one_seed(ranks: Any) -> None:
    got = rewritten(tensor_parallel(MLP()), tokens_of(32), policy=ALL_RANDOM)
    (seed,) = fp4_nodes(got.joint.final, "seed")
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    assert seed.args[1] == [group]
    (seed,) = fp4_nodes(rewritten(MLP(), tokens_of(32), policy=ALL_RANDOM).joint.final, "seed")
    assert len(seed.args) == 1
    (seed,) = fp4_nodes(rewritten(MLP(), tokens_of(32), policy=ALL_RANDOM, tensor_group="world").joint.final, "seed")
    assert seed.args[1] == [group]


def test_the_batch_group_divides_the_tokens(ranks: Any) -> None:
    got = rewritten(MLP(), tokens_of(32), policy=ALL_RANDOM, batch_group="world")
    found = by_rank(got)
    assert found["a", "fprop0"] == (True, (32, 3, 64, 0))
    assert found["a", "dgrad0"] == (True, (32, 3, 96, 0))
    assert found["a", "wgrad0"] == (True, (96, 0, 128, 96))
    assert found["a", "wgrad1"] == (True, (64, 0, 128, 96))
    assert not any(found[name, operand][0] for name in "abc" for operand in ("fprop1", "dgrad1"))


@pytest.mark.parametrize("tokens", [33, 36])
def test_a_place_that_no_counter_begins_at_draws_apart(ranks: Any, tokens: int) -> None:
    """The tokens of a rank are no multiple of 8: along them, parts draw differently, though not as on one device."""
    found = by_rank(rewritten(MLP(), tokens_of(tokens), policy=ALL_RANDOM, batch_group="world"))
    assert found["a", "wgrad0"] == (True, (0, 0, 1 << 30, 3 << 48))
    assert found["a", "dgrad0"] == (True, (tokens, 3, 96, 0))


def test_uneven_shards_draw_apart(ranks: Any) -> None:
    """90 columns among 4 ranks: 23, 23, 23, 21."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel

    model = MLP()
    model.a, model.b = nn.Linear(64, 90, bias=False), nn.Linear(90, 64, bias=False)
    model = tensor_parallel(model, a=ColwiseParallel(output_layouts=Replicate()))
    found = by_rank(rewritten(model, tokens_of(32), policy=ALL_RANDOM))
    assert found["a", "fprop1"] == (True, (0, 0, 1 << 30, 3 << 48))
    assert found["a", "dgrad0"] == (True, (0, 0, 1 << 30, 3 << 48))
    assert found["b", "fprop0"] == (False, None)


def test_one_reduction_for_a_weight_in_forward_and_backward(ranks: Any) -> None:
    policy = fp4.recipe("nvfp4", high_precision_tail=0.0, gemms=("fprop", "dgrad"))
    got = rewritten(tensor_parallel(MLP()), tokens_of(32), policy=policy)
    reduced = [n.args[0].args[0] for n in fp4_nodes(got.joint.final, "reduce_amax")]  # type: ignore[union-attr]
    assert len(set(reduced)) == len(reduced) == 4  # W and dY of a, X and W of b
    (backward,) = got.backward
    assert len(list(fp4_nodes(backward.graph, "reduce_amax"))) == 1  # dY of a


def test_position() -> None:
    assert position(()) == (0, 1)
    assert position((Shard("a", 1, 2), Shard("b", 2, 4))) == (6, 8)


@pytest.mark.parametrize("option", ["batch_group", "tensor_group"])
def test_bad_groups(ranks: Any, option: str) -> None:
    for bad, message in (("all", "write 'world'"), (3, "3 is no process group")):
        with pytest.raises(OptionError, match=f"{option}: .*{message}"):
            Options.read({option: bad}, None)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(OptionError, match=r"2 dimensions; write one of them, such as mesh\['dp'\]"):
        Options.read({option: mesh}, None)
    Options.read({option: mesh["dp"]}, None)
