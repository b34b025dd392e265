"""PyTorch's own engines on two processes with gloo: training against one device, checkpoints, generated code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp4
from tests.distributed import setups
from tests.distributed.ranks import on_ranks
from tests.distributed.setups import METHODS, Size
from tests.graphs import Captured, capturing, unequal
from tests.graphs import compiled as compiled_by

SIZE = Size()
STEPS = 4


def interpreted() -> Any:
    return capturing(Captured())


def trained(method: str, recipe: str, nudge: float = 0.0) -> dict[str, Any]:
    torch._dynamo.reset()
    with interpreted():
        model: nn.Module = setups.build(SIZE, "cpu")
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.0 + nudge)
        if method == "one":
            setups.compile_blocks(model, recipe)  # type: ignore[arg-type]
        else:
            model = setups.distribute(model, method, recipe, "cpu")  # type: ignore[arg-type]
        found = setups.train(model, SIZE, range(STEPS), method)
        return {**found, "parameters": setups.parameters(model)}


def engines(recipe: str) -> dict[str, Any]:
    return {m: trained(m, recipe) for m in METHODS}


def off(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    """|one - two| / |one| over all tensors."""
    a, b = (torch.cat([run[n].flatten().double() for n in one]) for run in (one, two))
    return float((a - b).norm() / a.norm())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["nvfp4", "quartet2"])
def test_training_is_that_of_one_device(recipe: str) -> None:
    """BF16 autocast. Data parallelism changes no bit of the first forward; partial sums rounded to BF16 are within 2^-8 of what
    they sum to, which moves what is quantized next by up to a step: there the measure is a nudge of one device's weights by
    as much."""
    one, ranks = trained("one", recipe), on_ranks(engines, recipe)
    nudged = trained("one", recipe, 2.0**-8)
    floor = max(abs(a - b) for a, b in zip(one["losses"], nudged["losses"], strict=True))
    assert floor > 0
    for method in METHODS:
        first, second = (r[method] for r in ranks)
        assert first["losses"] == second["losses"]
        assert unequal(first["parameters"], second["parameters"]) == []
        assert max(abs(a - b) for a, b in zip(one["losses"], first["losses"], strict=True)) <= 2 * floor
        if method in ("ddp", "fsdp2"):
            assert torch.equal(one["logits"], first["logits"])
            # Each half of a weight's gradient is rounded to BF16, and so is one device's whole.
            assert off(one["gradients"], first["gradients"]) < 2.0**-8
        else:
            assert off(one["gradients"], first["gradients"]) < 2 * off(one["gradients"], nudged["gradients"])
    assert unequal(ranks[0]["ddp"]["gradients"], ranks[0]["fsdp2"]["gradients"]) == []


# -- checkpoints


def saving(folder: str) -> list[dict[str, Tensor]]:
    """Four steps, with a checkpoint after two; and the last two again from it, by a model of other weights."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    found = []
    for resumed in (False, True):
        torch._dynamo.reset()
        with interpreted():
            model = setups.distribute(setups.build(SIZE, "cpu", seed=int(resumed)), "fsdp2", "quartet2", "cpu")
            opt = setups.optimizer(model)
            if resumed:
                state, optimizer_state = get_state_dict(model, opt)
                dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
                set_state_dict(model, opt, model_state_dict=state, optim_state_dict=optimizer_state)
            else:
                setups.train(model, SIZE, range(2), "fsdp2", "cpu", opt)
                state, optimizer_state = get_state_dict(model, opt)
                dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
            setups.train(model, SIZE, range(2, 4), "fsdp2", "cpu", opt)
            found.append(setups.parameters(model))
    return found


@pytest.mark.slow
def test_a_distributed_checkpoint_resumes_in_every_bit(tmp_path: Path) -> None:
    """On the two ranks that wrote it; and one device reads it, under the names that the model was written with."""
    import torch.distributed.checkpoint as dcp

    (whole, resumed), _ = on_ranks(saving, str(tmp_path))
    assert unequal(whole, resumed) == []
    state = setups.build(SIZE, "cpu").state_dict()
    before = {n: t.clone() for n, t in state.items()}
    dcp.load({"model": state}, checkpoint_id=str(tmp_path), no_dist=True)
    assert set(unequal(before, state)) == set(state)


# -- four ranks, pipeline stages, generated code


def two_dimensional(recipe: str) -> dict[str, Any]:
    """FSDP2 over two pairs of ranks, tensor parallelism within each."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = setups.build(SIZE, "cpu")
    setups.tensor_parallel(model, mesh["tp"], sequence=False)
    setups.compile_blocks(model, recipe, batch_group=mesh["dp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    inputs, targets = (t.chunk(2)[mesh["dp"].get_local_rank()] for t in setups.batch(SIZE, 0, "cpu"))
    torch.manual_seed(1000)
    with interpreted():
        logits = model(inputs)
        nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    return {"logits": logits.detach(), "gradients": setups.gradients(model)}


@pytest.mark.slow
def test_fsdp2_and_tensor_parallelism() -> None:
    """FP32: the sums of two partial sums are off by roundings, and nothing that is quantized after them by more than a few
    steps."""
    ranks = on_ranks(two_dimensional, "nvfp4", ranks=4)
    torch._dynamo.reset()
    model = setups.build(SIZE, "cpu")
    setups.compile_blocks(model, "nvfp4")
    with interpreted():
        one = setups.train(model, SIZE, range(1), autocast=False)
    logits = torch.cat([ranks[0]["logits"], ranks[2]["logits"]])
    assert torch.equal(ranks[0]["logits"], ranks[1]["logits"])
    assert off({"y": one["logits"]}, {"y": logits}) < 1e-3
    assert off(one["gradients"], ranks[0]["gradients"]) < 2e-2
    assert all(unequal(ranks[0]["gradients"], r["gradients"]) == [] for r in ranks)


class Stage(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


POLICY = fp4.recipe("nvfp4", keep_heads=False, high_precision_tail=0.0, gradient_rounding="nearest")


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def pipeline() -> dict[str, Tensor]:
    """Two stages, four micro-batches."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank = dist.get_rank()
    stage = Stage(rank)
    with interpreted():
        compiled: Any = compiled_by(stage, policy=POLICY)
        pipe = ScheduleGPipe(PipelineStage(compiled, rank, 2, torch.device("cpu")), 4, loss_fn=squares, scale_grads=False)
        x, target = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(2))
        if rank == 0:
            pipe.step(x)
        else:
            pipe.step(target=target)
    return {n: p.grad for n, p in stage.named_parameters() if p.grad is not None}


@pytest.mark.slow
def test_pipeline_stages() -> None:
    """Every micro-batch is quantized by itself, as one device that accumulates over the same micro-batches does."""
    ranks = on_ranks(pipeline)
    torch._dynamo.reset()
    stages = [Stage(0), Stage(1)]
    x, target = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(2))
    with interpreted():
        compiled = [compiled_by(s, policy=POLICY) for s in stages]
        for x_, target_ in zip(x.chunk(4), target.chunk(4), strict=True):
            squares(compiled[1](compiled[0](x_)), target_).backward()
    for stage, got in zip(stages, ranks, strict=True):
        assert unequal({n: p.grad for n, p in stage.named_parameters() if p.grad is not None}, got) == []


def generated(case: str) -> list[dict[str, Any]]:
    """Tensor or data parallelism by Inductor's code, and op by op."""
    from tests.distributed.test_one_device import Pair, data

    found = []
    ways: tuple[Callable[[], Any], ...] = contextlib.nullcontext, interpreted
    for way in ways:
        torch._dynamo.reset()
        model: Any = Pair()
        options: dict[str, Any] = {"batch_group": "world"}
        if case == "tensor":
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

            mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
            model = parallelize_module(model, mesh, {"a": ColwiseParallel(), "b": RowwiseParallel()})
            options = {}
        else:  # one linear says it in half the time
            model = model.a
        settings = {"policy": setups.policy("nvfp4"), "inductor": {"fallback_random": True}, **options}
        with way():
            x, dy = data()
            leaf = x.requires_grad_()
            torch.manual_seed(5)
            y = compiled_by(model, **settings)(leaf)
            y.backward(dy if case == "tensor" else torch.cat((dy, dy), -1))
        found.append({"y": y.detach(), "x": leaf.grad} | {n: setups.whole(p.grad) for n, p in model.named_parameters()})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tensor", "batch"])
def test_generated_code_is_what_the_graphs_say(case: str) -> None:
    for by_inductor, op_by_op in on_ranks(generated, case):
        assert unequal(by_inductor, op_by_op) == []


def whole_model() -> dict[str, Any]:
    """DDP over a model compiled whole, whose graph DDPOptimizer cuts at the buckets."""
    torch._dynamo.reset()
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 14
    got = Captured()
    with capturing(got):
        model = nn.parallel.DistributedDataParallel(nn.Sequential(Stage(0), Stage(1)), bucket_cap_mb=0.03)
        compiled: Any = compiled_by(model, policy=POLICY, batch_group="world")
        x = torch.randn(128, 64, generator=torch.Generator().manual_seed(2)).chunk(2)[dist.get_rank()]
        compiled(x).square().sum().backward()
    grads = {n.removeprefix("module."): p.grad for n, p in model.named_parameters()}
    quantized = sum(g.quantized for r in got.reports for linear in r.linears for g in linear.gemms)
    return {"graphs": len(got.joints), "quantized": quantized, "gradients": grads}


@pytest.mark.slow
def test_ddp_around_a_model_compiled_whole() -> None:
    first, second = on_ranks(whole_model)
    assert first["graphs"] > 1
    assert first["quantized"] == 12 - 1  # the first linear's input has no gradient
    assert unequal(first["gradients"], second["gradients"]) == []
    torch._dynamo.reset()
    model = nn.Sequential(Stage(0), Stage(1))
    with interpreted():
        compiled: Any = compiled_by(model, policy=POLICY)
        (compiled(torch.randn(128, 64, generator=torch.Generator().manual_seed(2))).square().sum() / 2).backward()
    one = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert off(one, first["gradients"]) < 1e-6
