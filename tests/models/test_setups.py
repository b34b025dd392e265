"""Ways of training a model, each equal to the eager oracle in the same set-up, bit for bit; files and exports.

Activation checkpointing, frozen weights, inference, dynamic shapes, nested regions and the compile caches have files of their
own under ``tests/regress/``.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp4
from tests.graphs import Captured, capturing, compiled, ops, unequal
from tests.models.oracle import Calls, oracle
from tests.models.test_models import USUAL, compare, everything

ALL = everything()


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(40, 48, dtype=dtype), nn.Linear(48, 40, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu()) + x


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(dtype) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def data(i: int = 0, dtype: torch.dtype = torch.float32, rows: int = 33) -> Tensor:
    return torch.randn(rows, 40, generator=torch.Generator().manual_seed(i)).to(dtype)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def both(
    train: Callable[[nn.Module, Any, Callable[[], None]], dict[str, Tensor]], make: Callable[[], nn.Module] = Model
) -> Any:
    """What `train` returns for the compiled model and for the oracle's; train(model, run, start): start before each forward."""
    torch._dynamo.reset()
    model = make()
    with capturing(Captured()):
        torch.manual_seed(7)
        ours = train(model, compiled(model, policy=ALL, inductor=USUAL), lambda: None)
    calls = Calls(len(fp4.report(model).graphs[0].linears), "nvfp4")
    other = make()
    with oracle(calls):
        torch.manual_seed(7)
        theirs = train(other, other, calls.start)
    return ours, theirs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtype_of_the_parameters(dtype: torch.dtype) -> None:
    report = compare(Model(dtype), {"x": data(dtype=dtype)}, settings=USUAL)
    assert {linear.dtype for linear in report.graphs[0].linears} == {str(dtype).removeprefix("torch.")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_a_gradient_scaler(dtype: torch.dtype) -> None:
    """Three steps of SGD; the scaled loss is another dY, and its scale is found and divided out again."""

    def train(model: nn.Module, run: Any, start: Callable[[], None]) -> dict[str, Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        for i in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                start()
                loss = run(data(i)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
        return parameters(model) | {"losses": torch.stack(losses), "scale": torch.tensor(scaler.get_scale())}

    ours, theirs = both(train)
    assert unequal(ours, theirs) == []
    assert len(set(ours["losses"].tolist())) == 3


def test_gradient_accumulation() -> None:
    """Four micro-batches a step, two steps of AdamW: each micro-batch draws anew."""

    def train(model: nn.Module, run: Any, start: Callable[[], None]) -> dict[str, Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            for i in range(4):
                start()
                (run(data(i)).square().mean() / 4).backward()
            optimizer.step()
            found = {f"grad {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            optimizer.zero_grad()
        return parameters(model) | found

    ours, theirs = both(train)
    assert unequal(ours, theirs) == []


class Twice(Model):
    """One block called three times, so that its gradients sum."""

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.blocks[0](self.blocks[0](x)))


def test_a_module_called_three_times() -> None:
    report = compare(Twice(blocks=1), {"x": data()}, settings=USUAL)
    assert [linear.name for linear in report.graphs[0].linears] == ["blocks.0.a", "blocks.0.b"] * 3


class Frozen(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[1].get_parameter("b.weight").requires_grad_(False)


def test_frozen_layers() -> None:
    report = compare(Frozen(), {"x": data()}, settings=USUAL)
    absent = [g.role for linear in report.graphs[0].linears for g in linear.gemms if not g.quantized]
    assert absent == ["dgrad", "wgrad", "dgrad", "wgrad", "dgrad", "wgrad"]


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "eval"])
def test_inference(how: str) -> None:
    model = Model().eval()
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "eval": torch.enable_grad}[how]
    torch._dynamo.reset()
    with capturing(Captured()), context():
        ours = compiled(model, policy=ALL, inductor=USUAL)(data())
    calls = Calls(4, "nvfp4")
    with oracle(calls):
        assert torch.equal(ours, model(data()))


@pytest.mark.parametrize("how", [{"fullgraph": True}, {"dynamic": True}, {"dynamic": False}, {"mode": "reduce-overhead"},
                                 {"mode": "max-autotune-no-cudagraphs"}, {"cudagraphs": True}], ids=str)  # fmt: skip
def test_arguments_of_torch_compile(how: dict[str, Any]) -> None:
    """Also what only a GPU honours, such as CUDA graphs, is taken and changes nothing on a CPU."""
    given = dict(how)
    options: dict[str, Any] = {"policy": ALL, "inductor": dict(USUAL)}
    if given.pop("cudagraphs", False):
        options["inductor"]["triton.cudagraphs"] = True
    if "mode" in given:  # torch.compile takes either mode or options
        options["mode"] = given.pop("mode")
    model = Model()
    torch._dynamo.reset()
    with capturing(Captured()):
        run = torch.compile(model, backend="fp4", options=options, **given)
        ours = [_gradients(model, run, data(rows=rows)) for rows in (33, 17)]
    calls = Calls(4, "nvfp4")
    other = Model()
    with oracle(calls):
        theirs = [_gradients(other, other, data(rows=rows), calls.start) for rows in (33, 17)]
    assert [unequal(a, b) for a, b in zip(ours, theirs, strict=True)] == [[], []]


def _gradients(model: nn.Module, run: Any, x: Tensor, start: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(7)
    start()
    y = run(x)
    y.square().sum().backward()
    return {"output": y.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_model_compile() -> None:
    """``model.compile`` in place, as a Trainer does: names and parameters are the model's own."""
    torch._dynamo.reset()
    model, other = Model(), Model()
    with capturing(Captured()):
        model.compile(backend="fp4", options={"policy": ALL, "inductor": USUAL})
        ours = _gradients(model, model, data())
    calls = Calls(4, "nvfp4")
    with oracle(calls):
        assert unequal(ours, _gradients(other, other, data(), calls.start)) == []
    assert [linear.name for linear in fp4.report(model).graphs[0].linears] == [f"blocks.{i}.{n}" for i in (0, 1) for n in "ab"]


def test_blocks_compiled_one_by_one() -> None:
    """Regional compilation: one graph, compiled once, serves all blocks, each call with a draw of its own."""
    torch._dynamo.reset()
    model, got = Model(blocks=3), Captured()
    with capturing(got):
        for block in model.blocks:
            block.compile(backend="fp4", options={"policy": ALL, "inductor": USUAL})
        ours = _gradients(model, model, data().requires_grad_())
    assert len(got.reports) == 1
    assert fp4.report(model).uncaptured == []
    other, calls = Model(blocks=3), Calls(2, "nvfp4")
    for block in other.blocks:
        block.register_forward_pre_hook(lambda module, args: calls.start())
    with oracle(calls):
        assert unequal(ours, _gradients(other, other, data().requires_grad_())) == []


def test_files_know_nothing_of_the_backend(tmp_path: Path) -> None:
    """state_dict, torch.save of the model and safetensors: before, after, and loaded into a model never compiled."""
    safetensors = pytest.importorskip("safetensors.torch")
    torch._dynamo.reset()
    model = Model()
    before = copy.deepcopy(model.state_dict())
    with capturing(Captured()):
        model.compile(backend="fp4", options={"policy": ALL, "inductor": USUAL})
        first = _gradients(model, model, data())
        state = model.state_dict()
        assert list(state) == list(before)
        assert all(torch.equal(state[n], before[n]) and state[n].dtype == before[n].dtype for n in before)
        torch.save(model, tmp_path / "model.pt")
        safetensors.save_file(state, tmp_path / "model.safetensors")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        other = Model()
        for p in other.parameters():
            nn.init.zeros_(p)
        other.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
        for again in (loaded, other):
            torch._dynamo.reset()
            run = compiled(again, policy=ALL, inductor=USUAL)
            assert unequal(_gradients(again, run, data()), first) == []
    assert not any("fp4" in line for line in str(other.state_dict()).splitlines())


def test_the_compiled_wrapper_loads_into_the_plain_model(tmp_path: Path) -> None:
    model = Model()
    wrapper: Any = torch.compile(model, backend="fp4")
    torch.save(wrapper.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    assert list(state) == [f"_orig_mod.{n}" for n in model.state_dict()]  # torch.compile's own prefix, for any backend


def test_export_is_of_the_model_in_high_precision() -> None:
    """torch.export reads the model, which no backend has changed: it works, and has no op of ours."""
    model = Model()
    compiled(model, policy=ALL)
    program = torch.export.export(model, (data(),))
    assert not any(name.startswith("fp4::") for name in ops(program.graph))
    assert torch.equal(program.module()(data()), model(data()))


EXPORTED = """
import torch, fp4
from tests.models.test_setups import Model, data
program = torch.export.export(Model(), (data(),))
path = torch._inductor.aoti_compile_and_package(program, package_path={path!r})
assert torch.allclose(torch._inductor.aoti_load_package(path)(data()), Model()(data()), atol=1e-5)
print("ran in high precision")
"""


@pytest.mark.slow
def test_aot_inductor_packages_the_model_in_high_precision(tmp_path: Path) -> None:
    """AOTInductor compiles an exported program without asking a backend of torch.compile."""
    root = Path(__file__).parents[2]
    script = EXPORTED.format(path=str(tmp_path / "model.pt2"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "ran in high precision"


@pytest.mark.slow
def test_a_model_trained_through_inductor_s_code() -> None:
    """GPT-2's (K, N) weights and biases through generated code, against the rewritten graph run op by op."""
    from tests.models import zoo

    found = []
    for generated in (True, False):
        torch._dynamo.reset()
        model = zoo.make("gpt2")
        run = compiled(model, policy=ALL, inductor=USUAL)
        if generated:
            found.append(_logits(model, run))
        else:
            with capturing(Captured()):
                found.append(_logits(model, run))
    ours, theirs = found
    assert ours.keys() == theirs.keys()
    # Generated code adds up a norm and a bias gradient in another order: a code or two of a gradient may round the other way.
    for name, value in ours.items():
        assert float((value - theirs[name]).norm()) <= 0.02 * float(theirs[name].norm()), name


def _logits(model: nn.Module, run: Any) -> dict[str, Tensor]:
    from tests.models import zoo

    torch.manual_seed(7)
    y = run(**zoo.inputs("gpt2")).logits
    y.square().mean().backward()
    return {"output": y.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
