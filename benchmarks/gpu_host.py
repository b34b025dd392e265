"""On a CUDA GPU: what the host does in a compiled step of one small linear, which is all that such a step takes.

    python -m benchmarks.gpu_host RESULT.json

256 tokens, 512 by 512, forward and backward, without CUDA graphs: microseconds of a step, with backward in autograd's thread
and in forward's; and of each statement of the code that Inductor generated, in the step and when nothing runs between two calls
of that code. Medians; a host's times vary from one to the next, and with what else runs there.
"""

from __future__ import annotations

import ast
import json
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._inductor.codecache import PyCodeCache
from torch._inductor.output_code import CompiledFxGraph

from benchmarks.gpu_step import RECIPES, bare, plain

TOKENS, WIDTH, STEPS, TURNS = 256, 512, 100, 5
WARM = 50
CALL = re.compile(r"= (fp4_[a-z0-9_]+?)_buf\d+\(|(triton)_\w+\.run\(|(extern_kernels\.\w+)\(|(empty_strided_cuda)\(")


def microseconds(step: Callable[[], None]) -> float:
    """Of a step, the least of a few turns."""
    found = []
    for _ in range(TURNS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / STEPS * 1e6)
    return round(min(found), 1)


class Stamped:
    """The function `call` of a module of Inductor's, with the time taken after each statement."""

    def __init__(self, module: Any) -> None:
        self.times: list[float] = []
        self.names: list[str] = []
        functions = [n for n in ast.walk(ast.parse(Path(module.__file__).read_text())) if isinstance(n, ast.FunctionDef)]
        found = next(f for f in functions if f.name == "call" and any(isinstance(s, ast.With) for s in f.body))
        found.body = [*ast.parse("_times.append(_now())").body, *self.stamped(found.body)]
        scope = {**vars(module), "_times": self.times, "_now": time.perf_counter}
        exec(compile(ast.fix_missing_locations(ast.Module([found], [])), module.__file__, "exec"), scope)
        self.call = scope["call"]

    def stamped(self, body: list[ast.stmt]) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for statement in body:
            made.append(statement)
            if isinstance(statement, ast.With):
                statement.body = self.stamped(statement.body)
            if not isinstance(statement, ast.Return):
                made += ast.parse("_times.append(_now())").body
                self.names.append("leave" if isinstance(statement, ast.With) else ast.unparse(statement))
        return made

    def microseconds(self, run: Callable[[], Any]) -> list[float]:
        """Of each statement while `run` runs, which calls this once."""
        rows = []
        for _ in range(STEPS):
            self.times.clear()
            run()
            rows.append([(b - a) * 1e6 for a, b in zip(self.times, self.times[1:], strict=False)])
        torch.cuda.synchronize()
        return [statistics.median(column) for column in zip(*rows, strict=True)]


def by_call(names: list[str], times: list[float]) -> dict[str, list[float]]:
    """The times of each kind of call, and of the rest together, in order."""
    found: dict[str, list[float]] = {}
    rest = 0.0
    for name, us in zip(names, times, strict=True):
        match = CALL.search(name)
        if match:
            found.setdefault(next(filter(None, match.groups())), []).append(round(us, 1))
        else:
            rest += us
    return {**found, "rest": [round(rest, 1)]}


def measure(name: str, policy: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    layer = nn.Linear(WIDTH, WIDTH, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(layer, backend="fp4", options={"policy": policy})

    def step() -> None:
        x.grad = layer.weight.grad = None
        compiled(x).backward(dy)

    for _ in range(WARM):
        step()
    result: dict[str, Any] = {"recipe": name, "us": microseconds(step)}
    with torch.autograd.set_multithreading_enabled(False):
        result["us in one thread"] = microseconds(step)
    called: list[tuple[Any, list[Any]]] = []
    original = CompiledFxGraph.__call__

    def watched(self: Any, inputs: Any) -> Any:
        called.append((self, [t.detach() if isinstance(t, torch.Tensor) else t for t in inputs]))
        return original(self, inputs)

    CompiledFxGraph.__call__ = watched  # type: ignore[method-assign]
    step()
    CompiledFxGraph.__call__ = original  # type: ignore[method-assign]
    for stage, (graph, inputs) in zip(("forward", "backward"), called, strict=True):
        module = next(m for m in PyCodeCache.modules if str(graph.cache_key) in m.__file__)
        code, kept = Stamped(module), graph.current_callable
        graph.current_callable = lambda given, code=code: code.call(None, given)
        in_step = code.microseconds(step)
        graph.current_callable = kept
        with torch.no_grad():
            alone = code.microseconds(lambda code=code, inputs=inputs: code.call(None, list(inputs)))  # type: ignore[misc]
        result[stage] = {
            "in the step": by_call(code.names, in_step),
            "alone": by_call(code.names, alone),
            "us": [round(sum(in_step), 1), round(sum(alone), 1)],
        }
    return result


def main() -> None:
    policies = {**{name: bare(name) for name in ("bf16", *RECIPES)}, "plain": plain()}
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "steps": [measure(name, policy) for name, policy in policies.items()],
    }
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
    for row in result["steps"]:
        print(row["recipe"], row["us"], row["us in one thread"], row["forward"]["us"], row["backward"]["us"])


if __name__ == "__main__":
    main()
