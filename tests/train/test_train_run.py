"""Whole runs of a very small Llama through the real backend."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from fp4.train import Settings, TrainError, checkpoint, data, loop, run

STEPS = 6


def small(text: str, out: Path, **values: Any) -> Settings:
    # Every operand is 64 x 64, so that there are few kernels to compile.
    size = {"layers": 1, "hidden": 64, "intermediate": 64, "heads": 2, "kv_heads": 2, "vocab": 320, "batch": 2, "seq": 32}
    rest = {"data": (text,), "steps": STEPS, "eval_every": 2, "eval_batches": 2, "device": "cpu", "out": str(out)}
    return Settings(**{**size, **rest, **values})


def state_digest(out: Path, recipe: str, steps: int) -> str:
    """Of all bits a checkpoint holds but the timings."""
    folder = out / recipe / f"step-{steps:08d}"
    state = torch.load(folder / "trainer.pt", weights_only=True)
    tensors = [state["rng"]["cpu"]]
    for _, values in sorted(state["optimizer"]["state"].items()):
        tensors += [values[name] for name in sorted(values)]
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes())
    for tensor in tensors:
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def whole(text: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A finished run of both recipes, never stopped: results, folder, and the digests of the batches each recipe saw."""
    out = tmp_path_factory.mktemp("whole") / "run"
    seen: list[tuple[int, bytes]] = []
    take = data.Batches.training

    def training(self: data.Batches, step: int) -> Any:
        batch = take(self, step)
        seen.append((step, batch[0].numpy().tobytes()))
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.Batches, "training", training)
        results = run(small(text, out))
    return {"results": results, "out": out, "seen": seen}


def test_run_json_holds_what_the_call_returns(whole: dict[str, Any]) -> None:
    document = json.loads((whole["out"] / "run.json").read_text())
    assert document == whole["results"]
    assert list(document) == ["format", "status", "settings", "machine", "versions", "corpus", "recipes"]
    assert document["status"] == "finished"
    assert Settings(**document["settings"]) == Settings.load(whole["out"])
    assert {"device", "cpu", "cores", "threads", "gpu", "system"} == set(document["machine"])
    assert document["machine"]["device"] == "cpu"
    assert {"python", "torch", "triton", "transformers", "tokenizers", "torch-fp4"} == set(document["versions"])
    assert document["versions"]["torch"] == torch.__version__
    assert list(document["recipes"]) == ["bf16", "nvfp4"]
    for entry in document["recipes"].values():
        assert entry["steps"] == len(entry["losses"]) == len(entry["seconds"]) == STEPS
        assert [step for step, _ in entry["evals"]] == [2, 4, 6]
        assert all(math.isfinite(loss) and loss > 0 for loss in entry["losses"])
        assert entry["eval_loss"] == entry["evals"][-1][1]
        assert entry["train_loss"] == entry["losses"][-1]  # 6 steps: the window is one step
        assert entry["tokens_per_second"] == pytest.approx(64 / sorted(entry["seconds"])[2], rel=1)
        assert entry["compile_seconds"] > 0
        assert entry["coverage"]["graphs"]


def test_gaps_are_differences_to_bf16(whole: dict[str, Any]) -> None:
    bf16, nvfp4 = whole["results"]["recipes"]["bf16"], whole["results"]["recipes"]["nvfp4"]
    assert bf16["gap_to_bf16"] is None
    assert nvfp4["gap_to_bf16"] == {
        "train": nvfp4["losses"][-1] - bf16["losses"][-1],
        "eval": nvfp4["eval_loss"] - bf16["eval_loss"],
    }


def test_the_recipes_compute_different_things_from_the_same_weights(whole: dict[str, Any]) -> None:
    bf16, nvfp4 = (whole["results"]["recipes"][name]["losses"] for name in ("bf16", "nvfp4"))
    assert all(a != b for a, b in zip(bf16, nvfp4, strict=True))
    assert abs(bf16[0] - nvfp4[0]) < 0.05  # the same weights, so the untrained losses are close
    assert bf16[-1] < bf16[0]
    assert nvfp4[-1] < nvfp4[0]


def test_every_recipe_sees_the_same_batches_in_the_same_order(whole: dict[str, Any]) -> None:
    seen, each = whole["seen"], STEPS + 1  # one more for the compilation
    assert [step for step, _ in seen[:each]] == [0, *range(STEPS)]
    assert seen[:each] == seen[each:]
    assert len({batch for _, batch in seen}) == STEPS


def test_the_picture_is_a_png(whole: dict[str, Any]) -> None:
    from PIL import Image

    with Image.open(whole["out"] / "loss.png") as image:
        assert image.format == "PNG"
        assert image.width > image.height > 300  # two panels side by side
        colors = image.convert("RGB").getcolors(1 << 20)
        assert colors is not None
        assert len(colors) > 50


def test_transformers_reads_the_checkpoint(whole: dict[str, Any], text: str) -> None:
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

    folder = whole["out"] / "bf16" / f"step-{STEPS:08d}"
    assert checkpoint.latest(whole["out"] / "bf16") == folder
    assert [p.name for p in (whole["out"] / "bf16").iterdir()] == [folder.name]
    model = LlamaForCausalLM.from_pretrained(folder)
    corpus = data.prepare([], 320, whole["out"] / "data", reuse=True)
    inputs, targets = data.Batches("held-out", corpus.held_out, 4, 32, 0).training(0)
    with torch.no_grad():
        loss = model(input_ids=inputs, labels=targets, shift_labels=targets).loss
    assert abs(loss.item() - whole["results"]["recipes"]["bf16"]["eval_loss"]) < 0.5
    tokenizer = Tokenizer.from_file(str(whole["out"] / "data" / "tokenizer.json"))
    assert tokenizer.token_to_id(data.END_OF_TEXT) == model.config.eos_token_id


def test_a_stopped_and_resumed_run_is_bit_for_bit_the_whole_run(
    whole: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    step = loop.Trainer.step

    def interrupted(self: loop.Trainer, batch: Any) -> float:
        if self.recipe == "nvfp4" and self.done == 2:
            signal.raise_signal(signal.SIGINT)  # as Ctrl-C does; the step is finished all the same
        return step(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "step", interrupted)
        stopped = run(small(text, out))
    assert stopped["status"] == json.loads((out / "run.json").read_text())["status"] == "interrupted"
    assert stopped["recipes"]["bf16"]["steps"] == STEPS
    assert stopped["recipes"]["nvfp4"]["steps"] == 3
    assert checkpoint.latest(out / "nvfp4") == out / "nvfp4" / "step-00000003"
    torch.manual_seed(12345)  # what else happened in the process must not matter
    resumed = run(Settings.load(out), resume=True)
    assert resumed["status"] == "finished"
    for recipe in ("bf16", "nvfp4"):
        for curve in ("losses", "evals"):
            assert resumed["recipes"][recipe][curve] == whole["results"]["recipes"][recipe][curve], (recipe, curve)
        assert state_digest(out, recipe, STEPS) == state_digest(whole["out"], recipe, STEPS), recipe


def test_resuming_a_finished_run_changes_nothing(whole: dict[str, Any]) -> None:
    before = state_digest(whole["out"], "nvfp4", STEPS)
    assert run(Settings.load(whole["out"]), resume=True) == whole["results"]
    assert state_digest(whole["out"], "nvfp4", STEPS) == before


@pytest.fixture(scope="module")
def trainer(text: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An nvfp4 trainer at step 0, compiled, with its batches."""
    out = tmp_path_factory.mktemp("trainer")
    settings = small(text, out)
    corpus = data.prepare(settings.data, settings.vocab, out / "data")
    batches = data.Batches("training", corpus.train, settings.batch, settings.seq, settings.seed)
    with loop.deterministic():
        made = loop.Trainer("nvfp4", settings, torch.device("cpu"), out / "nvfp4")
        made.start(batches.training(0), resume=False)
        yield made, batches


def test_a_step_draws_and_an_evaluation_leaves_no_trace(trainer: Any) -> None:
    made, batches = trainer
    before = torch.get_rng_state()
    made.evaluate(batches)
    made.curves.evals.clear()
    assert torch.equal(torch.get_rng_state(), before)
    made.loss(*batches.training(0)).backward()
    assert not torch.equal(torch.get_rng_state(), before)  # so evaluate had something to put back
    made.optimizer.zero_grad()


def test_a_loss_that_is_not_finite_stops_the_run(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, batches = trainer
    parameter = next(made.model.parameters())
    monkeypatch.setattr(made, "loss", lambda inputs, targets: parameter.sum() * float("nan"))
    before = parameter.detach().clone()
    with pytest.raises(TrainError, match=r"recipe nvfp4: the loss of step 1 is nan; write a smaller --lr"):
        made.step(batches.training(0))
    assert torch.equal(parameter, before)
    made.optimizer.zero_grad()


def test_a_crash_while_saving_leaves_the_last_checkpoint(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = trainer
    first = made.save()
    made.curves.losses.append(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
        with pytest.raises(OSError, match="no space left"):
            made.save()
    assert checkpoint.latest(made.folder) == first
    second = made.save()
    assert checkpoint.latest(made.folder) == second
    assert sorted(p.name for p in made.folder.iterdir()) == [second.name]
    made.curves.losses.clear()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"recipes": ("bf16", "nvfp5")}, r"unknown recipe nvfp5; write one or several of all_the_way, bf16, .*nvfp4"),
        ({"mode": "fast"}, r"mode='fast'; write one of default, "),
        ({"options": {"stricter": True}}, r"backend fp4 has no option 'stricter'; its options: recipe, "),
        ({"data": ("/absent",)}, r"--data /absent does not exist"),
        ({"seq": 100000}, r"the held-out text has \d+ tokens, --seq 100000 needs 100001"),
    ],
)
def test_what_cannot_run_is_refused_and_leaves_no_run(text: str, tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(small(text, tmp_path / "run", **values))
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none(text: str, tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="torch sees no CUDA device here; write --device cpu or auto"):
        run(small(text, tmp_path / "run", device="cuda"))


def test_a_folder_with_a_run_is_not_written_over(whole: dict[str, Any], text: str) -> None:
    settings = small(text, whole["out"])
    with pytest.raises(TrainError, match=r"holds a run already; write --resume to go on with it, or another --out"):
        run(settings)
    with pytest.raises(TrainError, match=r"these differ: steps \(6, now 7\), lr \(0.002, now 0.1\)"):
        run(dataclasses.replace(settings, steps=7, lr=0.1), resume=True)


@pytest.mark.parametrize("was", [False, True])
def test_global_settings_are_put_back(was: bool) -> None:
    debug: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(was)
    try:
        with loop.deterministic():
            assert torch.are_deterministic_algorithms_enabled()
            assert not debug.fill_uninitialized_memory
        assert torch.are_deterministic_algorithms_enabled() == was
    finally:
        torch.use_deterministic_algorithms(before)
    handler = signal.getsignal(signal.SIGINT)
    with loop.Stop().installed() as stop:
        assert signal.getsignal(signal.SIGINT) is stop
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_ctrl_c_stops_at_once() -> None:
    with loop.Stop().installed() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
