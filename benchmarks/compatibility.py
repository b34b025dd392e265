"""The matrix of docs/compatibility.md: runs the tests behind every row and writes what came of them.

    python -m benchmarks.compatibility run [--fast] [--log FILE]    # in each PyTorch: results/compatibility_torch_X.json
    python -m benchmarks.compatibility docs                           # the page, from all of those files

--fast leaves out the slow tests. --log reads the output of `pytest -vv` in place of running it. A row passes only where all
of its tests that ran did.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, write

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
MODELS, CONSTRUCTS, SETUPS = (f"tests/models/test_{name}.py" for name in ("models", "constructs", "setups"))
REGRESS = "tests/regress/test_"
BAD = "tests/compiler/test_bad_input.py"


@dataclass(frozen=True)
class Row:
    """what: the first column. tests: prefixes of "file::function[parameter". said: what a passing row is."""

    what: str
    tests: tuple[str, ...]
    said: str = "equal to the oracle, bit for bit"


def model(what: str, name: str) -> Row:
    return Row(what, (f"{MODELS}::test_model[{name}-",))


SECTIONS: dict[str, tuple[Row, ...]] = {
    "Models": (
        *(model(what, what.lower()) for what in ("Llama", "Qwen3", "Mistral", "Gemma", "BERT", "ViT", "T5")),
        model("GPT-2, weights stored (K, N)", "gpt2"),
        model("Mixtral, experts by grouped_mm", "mixtral, grouped_mm"),
        model("Qwen3-MoE, experts by grouped_mm", "qwen3_moe, grouped_mm"),
        model("Mamba-2", "mamba2"),
        model("LoRA (peft) on a frozen Llama", "lora"),
        Row("experts gathered a token (`batched_mm`)", (f"{MODELS}::test_experts_gathered",), "stays in BF16, reported"),
        Row("experts in a loop over hit experts (`eager`)", (f"{MODELS}::test_experts_as_a_loop",), "not captured, reported"),
    ),
    "Layers": (
        Row(
            "stacks of experts of any group size, 0 included",
            (f"{CONSTRUCTS}::test_experts_of_any", f"{CONSTRUCTS}::test_experts_with"),
        ),
        Row("stacks of experts with every kind of recipe", (f"{CONSTRUCTS}::test_experts_of_every",)),
        Row("stacks of experts stored (E, K, N)", (f"{CONSTRUCTS}::test_experts_stored",)),
        Row("a loop over all experts, each a part of one parameter", (f"{CONSTRUCTS}::test_a_loop",)),
        Row("nn.MultiheadAttention, self and cross", (f"{CONSTRUCTS}::test_multi_head",)),
        Row("tied embedding and head", (f"{CONSTRUCTS}::test_tied", f"{REGRESS}compile_hf_37905")),
        Row("convolution, 1x1 included", (f"{CONSTRUCTS}::test_a_convolution",), "left alone, reported"),
        Row("nn.LSTM, nn.GRU, nn.RNN", (f"{CONSTRUCTS}::test_a_recurrent",), "not captured by Dynamo, reported"),
    ),
    "Training": (
        Row("FP32, BF16 and FP16 parameters", (f"{SETUPS}::test_dtype",)),
        Row("autocast with a GradScaler", (f"{SETUPS}::test_autocast",)),
        Row("gradient accumulation", (f"{SETUPS}::test_gradient_acc",)),
        Row("activation checkpointing, whole and selective", (f"{REGRESS}compile_titan_1971",)),
        Row("activation memory budget", (f"{REGRESS}compile_pytorch_190758",)),
        Row("frozen layers", (f"{SETUPS}::test_frozen", f"{REGRESS}compile_torchao_frozen")),
        Row("a module called several times", (f"{SETUPS}::test_a_module",)),
        Row("no_grad, inference_mode, eval", (f"{SETUPS}::test_inference", f"{REGRESS}compile_te_2811")),
        Row("odd shapes and strides, no rows", (f"{REGRESS}compile_shapes",)),
        Row("zeros and extremes", (f"{REGRESS}compile_zeros",)),
        Row("random stacks of linears", ("tests/test_fuzz.py::test_a_random", "tests/test_fuzz.py::test_the_check")),
    ),
    "torch.compile": (
        Row("fullgraph, dynamic, modes, CUDA graphs asked for on a CPU", (f"{SETUPS}::test_arguments",)),
        Row("dynamic batch sizes", (f"{REGRESS}compile_dynamic",)),
        Row("`model.compile()`", (f"{SETUPS}::test_model_compile",)),
        Row("a block at a time: one graph serves all", (f"{SETUPS}::test_blocks",)),
        Row("`nested_compile_region`", (f"{REGRESS}compile_nested",), "each GEMM rewritten once"),
        Row("graph breaks", (f"{REGRESS}compile_fsdp2_uncaptured",), "names are the model's; what no graph has is reported"),
        Row("compile cache in a second process", (f"{REGRESS}compile_cache",), "a hit, with equal results"),
        Row(
            "torch.save, torch.load, safetensors",
            (f"{SETUPS}::test_files", f"{SETUPS}::test_the_compiled"),
            "files are the model's own",
        ),
        Row(
            "torch.export",
            (f"{SETUPS}::test_export",),
            "works, and is the model in high precision: export asks no backend of torch.compile",
        ),
    ),
    "Refused": (
        Row(
            "unknown recipe, option or phase; a policy of the wrong type",
            (f"{BAD}::test_options", f"{BAD}::test_a_policy_f"),
            "an error lists what can be written",
        ),
        Row("a policy changed in place", (f"{BAD}::test_a_policy_changed",), "an error says how to make another"),
        Row("devices other than CPU and CUDA", (f"{BAD}::test_a_device",), "an error says where to move the model"),
        Row("PyTorch before 2.11", (f"{BAD}::test_an_old",), "an error says what to install"),
        Row("a second derivative", (f"{BAD}::test_double",), "PyTorch's error: no compiled graph has one"),
        Row("a package that is missing", (f"{BAD}::test_mlir_w", f"{BAD}::test_training_w"), "an error says what to install"),
        Row(
            "`strict=True` and something left in high precision",
            (f"{BAD}::test_strict", f"{REGRESS}compile_fsdp2_uncaptured"),
            "an error lists it",
        ),
    ),
}


def files() -> list[str]:
    """The test files behind the rows."""
    found = []
    for test in (t for rows in SECTIONS.values() for row in rows for t in row.tests):
        path = test.partition("::")[0]
        found += [path] if path.endswith(".py") else [str(p.relative_to(ROOT)) for p in sorted(ROOT.glob(f"{path}*.py"))]
    return list(dict.fromkeys(found))


def results(log: str) -> dict[str, str]:
    """Test -> passed, failed or skipped, of the lines of ``pytest -vv``; tests that a time limit cut off are not among them."""
    found = re.findall(r"^(tests/\S+\.py::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", log, re.MULTILINE)
    words = {"PASSED": "passed", "FAILED": "failed", "ERROR": "failed"}
    return {test: words.get(word, "skipped") for test, word in found}


def run(fast: bool, logs: list[Path] | None) -> int:
    if logs is None:
        command = [sys.executable, "-m", "pytest", "-v", "-vv", *files(), *(["-m", "not slow"] if fast else [])]
        text = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True).stdout
    else:
        text = "\n".join(path.read_text() for path in logs)
    wanted = tuple(t for rows in SECTIONS.values() for row in rows for t in row.tests)
    outcomes = {test: outcome for test, outcome in results(text).items() if test.startswith(wanted)}
    version = torch.__version__.partition("+")[0]
    write(f"compatibility_torch_{version}", {"torch": version, "tests": dict(sorted(outcomes.items()))})
    return int("failed" in outcomes.values())


def outcome(row: Row, tests: dict[str, str]) -> str:
    """Of the row's tests that ran: "yes", how many failed, or "" where none ran."""
    ran = [o for test, o in tests.items() if test.startswith(row.tests) and o != "skipped"]
    failed = ran.count("failed")
    return "" if not ran else f"{failed} of {len(ran)} fail" if failed else f"yes ({len(ran)})"


def docs() -> int:
    found: list[dict[str, Any]] = [json.loads(p.read_text()) for p in RESULTS.glob("compatibility_torch_*.json")]
    found.sort(key=lambda r: [int(n) for n in r["torch"].split(".")])
    lines = [
        "# Compatibility",
        "",
        "Written by `python -m benchmarks.compatibility docs` from the tests' results in `benchmarks/results/`; do not edit. A",
        'cell says whether the tests of a row pass with that version of PyTorch, and how many ran; "yes" means what the second',
        "column says. The models are small and have random weights; graphs are run op by op on a CPU, and compared with an",
        "eager model written from the recipe with the oracle: output and every gradient. Empty: not run there.",
        "",
    ]
    versions = [r["torch"] for r in found]
    for title, rows in SECTIONS.items():
        lines += [f"## {title}", "", f"| | what a pass means | {' | '.join(versions)} |", "|---|---|" + "---|" * len(versions)]
        lines += [f"| {row.what} | {row.said} | {' | '.join(outcome(row, r['tests']) for r in found)} |" for row in rows]
        lines.append("")
    lines += ["## What fails", ""]
    failures = [f"- {r['torch']}: `{t}`" for r in found for t, o in r["tests"].items() if o == "failed"]
    lines += failures or ["Nothing of what ran."]
    lines += ["", *NOTES.strip().splitlines()]
    PAGE.write_text("\n".join(lines) + "\n")
    return 0


NOTES = """
## Notes

- Products of a tensor with a size of 1 (one token and one feature, say) reach the passes as a multiply and a sum, written so
  by Inductor: they stay in high precision, and the report says so.
- A stack of experts is one op a GEMM, which loops over the experts: each is a linear of its own, with scales, blocks and draws
  of its own. Group sizes are read on the host. X is saved for backward as the model has it, not as codes.
- With mode "lite" Inductor hands the passes a graph without names of modules and sequence numbers. Linears that read one
  activation are then told apart by their gradients; where that is impossible the products are counted in the report.
- AOTInductor compiles what torch.export captured and asks no backend of torch.compile, so its package computes in high
  precision (`tests/models/test_setups.py` has a slow test of it, not in this table).
- Each version ran a part of the tests within a time limit: an empty cell is no failure. PyTorch 2.15 has not been tried.
- CUDA graphs, two GPUs and Inductor's generated code on a GPU have scripts and results of their own ([kernels.md](kernels.md)).
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("do", choices=("run", "docs"))
    parser.add_argument("--fast", action="store_true", help="leave out the slow tests")
    parser.add_argument("--log", type=Path, action="append", help="output of pytest -vv, in place of running it")
    asked = parser.parse_args()
    return docs() if asked.do == "docs" else run(asked.fast, asked.log)


if __name__ == "__main__":
    sys.exit(main())
