"""Two GPUs of one host over NCCL: do the distributed engines equal one device, and what do they cost?

    python -m benchmarks.gpu_two RESULT.json [--gloo] [equality] [resume] [speed]

Recipes `nvfp4` and `quartet2`; DDP, FSDP2 (blocks compiled inside ``fully_shard``), tensor and sequence parallelism by DTensor.

Equality: 20 training steps on one global batch, on two ranks and on one device: outputs and gradients of the first step, losses
of all. Where the order of additions differs, equality in bits cannot be asked. The measures are then the floor (how far apart
two runs of one device are whose initial weights differ by one rounding in FP32), and the same methods in BF16 without fp4's
rewrite. It also says whether data-parallel ranks draw differently and tensor-parallel ranks alike. Resume: the distributed
checkpoint that FSDP2 wrote half-way on 2 ranks, taken up on 2 (equal in bits) and on 1. Speed: time and peak memory of a
forward and backward against BF16.

Every job is processes of its own; one that fails or takes too long costs its own figures alone. ``--gloo``: tiny, on the CPU,
the rewritten graphs run op by op.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

RECIPES = ("nvfp4", "quartet2")
STEPS = 20
LIMIT = 465  # seconds, all of it
JOB_LIMIT = 170


def main() -> None:
    arguments = [a for a in sys.argv[1:] if a != "--gloo"]
    if arguments[:1] == ["--worker"]:
        return worker(json.loads(arguments[1]))
    gloo = "--gloo" in sys.argv
    parts = arguments[1:] or ["equality", "resume", "speed"]
    run = Run(Path(arguments[0]), gloo)
    for part in parts:
        getattr(run, part)()
    run.write()
    print(run.path.read_text())


class Run:
    """The parent: starts jobs, compares what they left, keeps the result file up to date."""

    def __init__(self, path: Path, gloo: bool) -> None:
        import torch

        from fp4.train.results import machine, versions

        self.path, self.gloo = path, gloo
        self.start = time.monotonic()
        self.folder = Path(tempfile.mkdtemp(prefix="fp4-two-"))
        self.at_once = 1 if gloo else 4
        device = torch.device("cpu" if gloo else "cuda")
        self.result: dict[str, Any] = {"machine": machine(device), "versions": versions(), "failed": {}, "seconds": {}}

    def write(self) -> None:
        self.result["seconds"]["all"] = round(time.monotonic() - self.start, 1)
        self.path.write_text(json.dumps(self.result, indent=1) + "\n")

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.start:5.0f} s] {text}", flush=True)

    def jobs(self, jobs: list[dict[str, Any]]) -> None:
        """Run jobs, some at once, each in `ranks` processes, until done or out of time."""
        waiting, running = list(jobs), []
        limit = 3600 if self.gloo else LIMIT
        while waiting or running:
            while waiting and len(running) < self.at_once and time.monotonic() - self.start < limit - 20:
                running.append(self.begin(waiting.pop(0)))
            if waiting and not running:
                for job in waiting:
                    self.result["failed"][job["name"]] = "not started: out of time"
                return
            time.sleep(0.2)
            for entry in list(running):
                job, began, processes = entry
                codes = [p.poll() for p in processes]
                late = time.monotonic() - self.start > limit or time.monotonic() - began > (3000 if self.gloo else JOB_LIMIT)
                broken = any(c not in (None, 0) for c in codes)
                if all(c == 0 for c in codes) or late or broken:
                    for p in processes:
                        if p.poll() is None:
                            p.kill()
                        p.wait()
                    running.remove(entry)
                    seconds = round(time.monotonic() - began, 1)
                    self.result["seconds"][job["name"]] = seconds
                    if late or broken:
                        logs = "\n".join(log.read_text()[-1500:] for log in sorted(self.folder.glob(f"{job['name']}.*.log")))
                        self.result["failed"][job["name"]] = ("out of time\n" if late else "") + logs
                    self.say(f"{job['name']}: {'failed' if late or broken else 'done'} in {seconds} s")
                    self.write()

    def begin(self, job: dict[str, Any]) -> tuple[dict[str, Any], float, list[subprocess.Popen[bytes]]]:
        processes = []
        for rank in range(job["ranks"]):
            full = {**job, "rank": rank, "folder": str(self.folder), "gloo": self.gloo}
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(job["ranks"]), "LOCAL_RANK": str(rank)}
            environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1" if self.gloo else "4")
            if self.gloo:
                environment["OMP_NUM_THREADS"] = "1"
            log = (self.folder / f"{job['name']}.{rank}.log").open("wb")
            command = [sys.executable, "-m", "benchmarks.gpu_two", "--worker", json.dumps(full)]
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        return job, time.monotonic(), processes

    def load(self, name: str) -> Any:
        import torch

        path = self.folder / f"{name}.pt"
        return torch.load(path, weights_only=False) if path.exists() else None

    def equality(self) -> None:
        from tests.distributed.setups import METHODS

        names = (*RECIPES, "bf16")
        self.jobs([{"name": f"one-{r}", "work": "one", "recipe": r, "ranks": 1, "gpu": i % 2} for i, r in enumerate(names)])
        pairs = [(m, r) for m in METHODS for r in RECIPES] + [("fsdp2", "bf16"), ("tp", "bf16")]
        self.jobs([{"name": f"{m}-{r}", "work": "pair", "recipe": r, "method": m, "ranks": 2} for m, r in pairs])
        rows = []
        for method, recipe in pairs:
            one, two = self.load(f"one-{recipe}"), self.load(f"{method}-{recipe}")
            if one is not None and two is not None:
                rows.append({"recipe": recipe, "method": method, **compared(one, two), **two["draws"]})
        self.result["equality"] = rows
        self.result["floor"] = [
            {"recipe": r, **compared(one, one["nudged"])} for r in names if (one := self.load(f"one-{r}")) is not None
        ]

    def resume(self) -> None:
        jobs = [
            {"name": f"resume{n}-{r}", "work": "resume", "recipe": r, "method": "fsdp2" if n == 2 else "one", "ranks": n}
            for n in (2, 1)
            for r in RECIPES
        ]
        self.jobs([j for j in jobs if (self.folder / f"checkpoint-{j['recipe']}").exists()])
        rows = []
        for job in jobs:
            saved, resumed = self.load(f"fsdp2-{job['recipe']}"), self.load(job["name"])
            if saved is None or resumed is None:
                continue
            tail = saved["losses"][-len(resumed["losses"]) :]
            one = self.load(f"one-{job['recipe']}")
            rows.append(
                {
                    "recipe": job["recipe"],
                    "resumed on": job["ranks"],
                    "first loss equal": resumed["losses"][0] == tail[0],
                    "losses equal": resumed["losses"] == tail,
                    "parameters equal": unequal(saved["parameters"], resumed["parameters"]) == [],
                    "largest loss difference": max(abs(a - b) for a, b in zip(resumed["losses"], tail, strict=True)),
                    "floor of it": max(loss_differences(one, one["nudged"])) if one else None,
                }
            )
        self.result["resume"] = rows

    def speed(self) -> None:
        self.at_once, at_once = 1, self.at_once
        names = ("bf16", *RECIPES)
        self.jobs([{"name": f"speed-{r}", "work": "speed", "recipe": r, "ranks": 2} for r in names])
        self.at_once = at_once
        rows = [row for r in names for row in (self.load(f"speed-{r}") or [])]
        base = {row["method"]: row for row in rows if row["recipe"] == "bf16" and "ms" in row}
        for row in rows:
            if "ms" in row and row["method"] in base:
                row["over bf16"] = row["ms"] / base[row["method"]]["ms"]
                row["memory over bf16"] = row["peak GiB"] / max(base[row["method"]]["peak GiB"], 1e-9)
        self.result["speed"] = rows


def unequal(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names of the tensors that differ in a bit."""
    return [n for n in a if n not in b or a[n].shape != b[n].shape or not bool((a[n] == b[n]).all())]


def distance(a: Any, b: Any) -> float:
    """|a - b| / |a|, over all elements."""
    return float((a.double() - b.double()).norm() / a.double().norm().clamp(min=1e-300))


def loss_differences(one: dict[str, Any], two: dict[str, Any]) -> list[float]:
    return [abs(a - b) for a, b in zip(one["losses"], two["losses"], strict=True)]


def compared(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    """One device's run and another: what is equal in bits, and how far the rest is off."""
    import torch

    differ = unequal(one["gradients"], two["gradients"])
    flat = [torch.cat([run["gradients"][n].flatten() for n in one["gradients"]]) for run in (one, two)]
    return {
        "outputs equal": bool((one["logits"] == two["logits"]).all()),
        "outputs off": distance(one["logits"], two["logits"]),
        "gradients equal": f"{len(one['gradients']) - len(differ)} of {len(one['gradients'])}",
        "gradients off": distance(*flat),
        "losses equal": sum(d == 0 for d in loss_differences(one, two)),
        "largest loss difference": max(loss_differences(one, two)),
        "first and last loss": [two["losses"][0], two["losses"][-1]],
    }


# -- what runs in a job's processes


def worker(job: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast over NVLink, which a lent slice of a host may not have
    device = "cpu" if job["gloo"] else f"cuda:{job['rank'] if job['ranks'] > 1 else job.get('gpu', 0)}"
    if job["gloo"]:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # the one attention kernel of a varying algorithm
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if job["ranks"] > 1:
        store = f"file://{job['folder']}/{job['name']}.store"
        ids = None if job["gloo"] else torch.device(device)
        backend = "gloo" if job["gloo"] else "nccl"
        dist.init_process_group(backend, init_method=store, rank=job["rank"], world_size=job["ranks"], device_id=ids)
    try:
        with captured() if job["gloo"] else nullcontext():
            found = {"one": one, "pair": pair, "resume": resume, "speed": speed}[job["work"]](job, device)
        if job["rank"] == 0:
            path = Path(job["folder"]) / f"{job['name']}.pt"
            torch.save(found, path.with_suffix(".partial"))
            path.with_suffix(".partial").replace(path)
        if job["ranks"] > 1:
            dist.barrier()
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # the other rank waits in a collective
    sys.stdout.flush()
    os._exit(0)


def captured() -> Any:
    from tests.graphs import Captured, capturing

    return capturing(Captured())


def size_of(job: dict[str, Any]) -> Any:
    from tests.distributed.setups import Size

    return Size() if job["gloo"] else Size(width=512, ffn=1024, layers=2, batch=8, seq=256)


def steps_of(job: dict[str, Any]) -> int:
    return 4 if job["gloo"] else STEPS


def saved_of(job: dict[str, Any]) -> int:
    return steps_of(job) // 2


def one(job: dict[str, Any], device: str) -> dict[str, Any]:
    """One device; and once more from weights that differ by one rounding."""
    import torch

    from tests.distributed import setups

    size, runs = size_of(job), []
    for nudge in (0.0, 2.0**-23):
        model = setups.build(size, device)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.0 + nudge)
        setups.compile_blocks(model, job["recipe"])
        runs.append(setups.train(model, size, range(steps_of(job)), "one", device))
    return {**runs[0], "nudged": runs[1]}


def pair(job: dict[str, Any], device: str) -> dict[str, Any]:
    """Two ranks; FSDP2 writes a checkpoint half-way."""
    from tests.distributed import setups

    size = size_of(job)
    model = setups.distribute(setups.build(size, device), job["method"], job["recipe"], device)
    opt = setups.optimizer(model)

    def after(step: int) -> None:
        if job["method"] == "fsdp2" and step == saved_of(job) - 1:
            save(job, model, opt)

    found = setups.train(model, size, range(steps_of(job)), job["method"], device, opt, after=after)
    return {**found, "parameters": setups.parameters(model), "draws": draws(job, device)}


def draws(job: dict[str, Any], device: str) -> dict[str, Any]:
    """Is the same batch quantized by other draws on the other rank? Data-parallel ranks: yes; tensor-parallel ones: no."""
    import torch
    import torch.distributed as dist

    from tests.distributed import setups

    if job["method"] not in ("ddp", "tp"):
        return {}
    torch._dynamo.reset()
    size = size_of(job)
    model = setups.build(size, device)
    if job["method"] == "tp":
        model = setups.distribute(model, "tp", job["recipe"], device)  # type: ignore[assignment]
    else:
        setups.compile_blocks(model, job["recipe"])
    torch.manual_seed(50)
    inputs, targets = setups.batch(size, 0, device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        logits = model(inputs)
    torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).backward()
    norm = model.embed.weight.grad  # below every quantized linear
    assert norm is not None
    equal = []
    for t in (logits.detach().float(), norm):
        other = [torch.empty_like(t) for _ in range(2)]
        dist.all_gather(other, t.contiguous())
        equal.append(torch.equal(*other))
    return {"both ranks' outputs of one batch equal": equal[0], "both ranks' gradients of one batch equal": equal[1]}


def state(model: Any, opt: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, opt)
    return {"model": model_state, "optimizer": optimizer_state}


def save(job: dict[str, Any], model: Any, opt: Any) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state(model, opt), checkpoint_id=f"{job['folder']}/checkpoint-{job['recipe']}")


def resume(job: dict[str, Any], device: str) -> dict[str, Any]:
    """The second half, from the checkpoint, by a model of other initial weights."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    from tests.distributed import setups

    size = size_of(job)
    model: Any = setups.build(size, device, seed=9)
    if job["ranks"] > 1:
        model = setups.distribute(model, job["method"], job["recipe"], device)
    else:
        setups.compile_blocks(model, job["recipe"])
    opt = setups.optimizer(model)
    held = state(model, opt)
    dcp.load(held, checkpoint_id=f"{job['folder']}/checkpoint-{job['recipe']}", no_dist=job["ranks"] == 1)
    set_state_dict(model, opt, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
    found = setups.train(model, size, range(saved_of(job), steps_of(job)), job["method"], device, opt)
    return {**found, "parameters": setups.parameters(model)}


def speed(job: dict[str, Any], device: str) -> list[dict[str, Any]]:
    """Time and memory of forward and backward under each method; data-parallel ranks draw their own, as by default."""
    import gc

    import torch

    from tests.distributed import setups

    gloo = job["gloo"]
    size = setups.Size() if gloo else setups.Size(width=2048, ffn=5632, layers=4, batch=8, seq=2048)
    rows: list[dict[str, Any]] = []
    torch.use_deterministic_algorithms(False)
    cases = [(m, False) for m in setups.METHODS] + ([] if job["recipe"] == "bf16" else [("fsdp2", True)])
    for method, whole in cases:
        torch._dynamo.reset()
        gc.collect()
        if not gloo:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        model = setups.distribute(setups.build(size, device), method, job["recipe"], device, whole)
        inputs, targets = setups.share(method, *setups.batch(size, 0, device))
        times = []
        for i in range(3 if gloo else 13):
            torch.distributed.barrier()
            began = time.perf_counter()
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                logits = model(inputs)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            for p in model.parameters():
                p.grad = None
            del logits, loss
            if not gloo:
                torch.cuda.synchronize()
            if i >= (1 if gloo else 5):
                times.append((time.perf_counter() - began) * 1e3)
        peak = 0.0 if gloo else torch.cuda.max_memory_allocated() / 2**30
        label = f"{method}, amax of the whole batch" if whole else method
        rows.append({"recipe": job["recipe"], "method": label, "ms": statistics.median(times), "peak GiB": peak})
        if job["rank"] == 0:
            torch.save(rows, Path(job["folder"]) / f"{job['name']}.pt")  # kept if the time ends
        print(rows[-1], flush=True)
        del model
    return rows


if __name__ == "__main__":
    main()
