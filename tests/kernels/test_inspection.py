"""A kernel that must not be used is named with its reason, and `fp4 kernels` fails on it."""

from __future__ import annotations

import dataclasses
import json

import pytest
from typer.testing import CliRunner

import fp4
import fp4.kernel_table as table
from fp4.cli import app
from fp4.kernels.compile import candidate, describe
from fp4.kernels.inspection import Candidate, Compiled, examine, faults
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.target import Target
from fp4.runtime.spec import NVFP4

GOOD = Compiled(registers=32, shared=0, spills=0, stack=0, conversions=0, instructions={"STG.E.64": 1}, ptx="", ttgir="")
NEEDS = {"FP4 MMA": ("UTCOMMA", 2)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"spills": 8}, "spills: 8 bytes a thread of local memory"),
        ({"stack": 16}, "stack: 16 bytes a thread"),
        ({"instructions": {"EXIT": 1}}, "empty: it stores nothing"),
        ({"shared": 110_000}, "shared memory: 110000 bytes, sm_120a has 101376"),
    ],
)
def test_faults_by_name(change: dict, reason: str) -> None:
    assert faults(GOOD, Target("sm_120a"), {}) == ()
    assert faults(dataclasses.replace(GOOD, **change), Target("sm_120a"), {}) == (reason,)


@pytest.mark.parametrize(("count", "fault"), [(0, True), (1, True), (2, False)])
def test_an_instruction_that_is_missing(count: int, fault: bool) -> None:
    compiled = dataclasses.replace(GOOD, instructions={"STG": 1, "UTCOMMA.4X": count})
    assert bool(faults(compiled, Target("sm_100a"), NEEDS)) == fault


def test_a_kernel_that_does_not_compile_is_a_fault() -> None:
    def refuse(target: Target) -> Compiled:
        raise RuntimeError("ptxas: no such instruction\nmore")

    row = examine(Candidate("k", "quantize", refuse, lambda target: ""), Target("sm_90"))
    assert row.faults == ("does not compile: RuntimeError: ptxas: no such instruction",)


def test_every_operand_of_every_recipe_is_listed_once() -> None:
    names = [describe(spec) for spec in table.quantize_specs(fp4.recipes(), Target("sm_100a"))]
    assert len(names) == len(set(names))
    one = [describe(spec) for spec in table.quantize_specs(["quartet2"], Target("sm_90"))]
    assert "decoded bf16 nvfp4[four_six=yes]" in one
    assert "packed nvfp4[rounding=ms_eden] after hadamard[size=128,signs=fresh,bf16=no], columns" in one
    assert "amax after hadamard[size=128,signs=fresh,bf16=no]" in one
    assert not [name for name in one if "swizzled" in name]


@pytest.fixture
def one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "quantize_specs", lambda recipes, target: [KernelSpec(NVFP4()), KernelSpec(None, output="amax")])


@pytest.mark.usefixtures("one_kernel")
def test_the_command_prints_figures_and_sources() -> None:
    run = CliRunner().invoke
    done = run(app, ["kernels", "--target", "sm_90", "--json"])
    assert done.exit_code == 0, done.output
    first, second = json.loads(done.stdout)["kernels"]
    assert (first["kernel"], first["target"], first["spills"], first["stack"]) == ("packed nvfp4", "sm_90", 0, 0)
    assert first["registers"] > 16
    assert second["kernel"] == "amax"
    plain = run(app, ["kernels", "--target", "sm_90", "--only", "packed"]).stdout.splitlines()
    assert [line.split("  ")[0] for line in plain] == ["kernel", "packed nvfp4"]
    assert run(app, ["kernels", "--target", "sm_90", "--markdown"]).stdout.startswith("| kernel | registers |")
    for level, word in (("source", "@triton.jit"), ("ttgir", "ttg."), ("ptx", ".target sm_90"), ("sass", "STG.E")):
        assert word in run(app, ["kernels", "--target", "sm_90", "--source", "packed nvfp4", "--level", level]).stdout


def test_an_unknown_recipe() -> None:
    done = CliRunner().invoke(app, ["kernels", "--recipe", "nosuch"])
    assert (done.exit_code, "nosuch" in done.output) == (2, True)


@pytest.mark.usefixtures("one_kernel")
def test_the_command_fails_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    run = CliRunner().invoke
    for arguments, words in (
        (["--target", "sm_42"], "write one of"),
        (["--source", "nosuch"], "no kernel's name"),
        (["--source", "a"], "write more of one of"),
        (["--source", "amax", "--level", "c"], "write one of"),
    ):
        done = run(app, ["kernels", *arguments])
        assert (done.exit_code, words in done.output) == (2, True), done.output
    bad = dataclasses.replace(
        candidate(KernelSpec(NVFP4()), Target("sm_90")), compile=lambda target: dataclasses.replace(GOOD, stack=8)
    )
    monkeypatch.setattr(table, "candidates", lambda recipes, target, shapes: [bad])
    done = run(app, ["kernels"])
    assert done.exit_code == 1
    assert "packed nvfp4: stack: 8 bytes a thread" in done.output
