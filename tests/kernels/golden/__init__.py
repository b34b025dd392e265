"""The generated source of a few kernels, to read and to compare with: what a change of the generator changes shows in a diff.

``python -m tests.kernels.golden`` writes the files anew.
"""

from __future__ import annotations

from pathlib import Path

from fp4.kernels.codegen import source
from fp4.kernels.fp8 import fp8_spec
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.target import Target
from fp4.runtime.spec import FP8, MXFP4, MXFP8, NVFP4, Rotation

FOLDER = Path(__file__).parent
H16, H128 = Rotation(16, signs="fixed"), Rotation(128, signs="fresh", bf16=False)

CASES: dict[str, tuple[KernelSpec, str]] = {
    "nvfp4_packed": (KernelSpec(NVFP4()), "sm_90"),
    "nvfp4_packed_blackwell": (KernelSpec(NVFP4()), "sm_100a"),
    "nvfp4_decoded": (KernelSpec(NVFP4(), output="decoded"), "sm_90"),
    "nvfp4_decoded_blackwell": (KernelSpec(NVFP4(), output="decoded"), "sm_120a"),
    "nvfp4_16x16_swizzled": (KernelSpec(NVFP4(block=(16, 16)), scale_layout="swizzled"), "sm_100a"),
    "nvfp4_stochastic": (KernelSpec(NVFP4(rounding="stochastic")), "sm_90"),
    "nvfp4_stochastic_unaligned": (KernelSpec(NVFP4(rounding="stochastic"), aligned=False, input="fp32"), "sm_90"),
    "nvfp4_stochastic_native": (KernelSpec(NVFP4(rounding="stochastic"), native_draws=True), "sm_100a"),
    "nvfp4_four_six": (KernelSpec(NVFP4(four_six=True), output="decoded"), "sm_90"),
    "nvfp4_h16_columns": (KernelSpec(NVFP4(), H16, memory="columns"), "sm_90"),
    "nvfp4_ms_eden_h128": (KernelSpec(NVFP4(rounding="ms_eden"), H128), "sm_90"),
    "nvfp4_outer": (KernelSpec(NVFP4(outer=128), output="decoded", scaled=True), "sm_90"),
    "mxfp4_quest_h32": (KernelSpec(MXFP4(scale_rule="quest"), Rotation(32, bf16=False)), "sm_90"),
    "mxfp4_to_e5m2": (KernelSpec(MXFP4(), output="decoded", dtype="e5m2"), "sm_90"),
    "mxfp4_codes_to_e4m3": (fp8_spec(MXFP4(), "e4m3"), "sm_90"),
    "mxfp8": (KernelSpec(MXFP8()), "sm_90"),
    "fp8_128x128": (KernelSpec(FP8(block=(128, 128))), "sm_90"),
    "amax_h128": (KernelSpec(None, H128, output="amax"), "sm_90"),
    "rotated_interpreted": (KernelSpec(None, H16, output="rotated"), "interpreter"),
}


def generated(name: str) -> str:
    """The source of a case, as the generator writes it now."""
    spec, target = CASES[name]
    return source(spec, Target(target))


def path(name: str) -> Path:
    return FOLDER / f"{name}.py"


def write() -> None:
    """Write the source of every case, and remove the files of cases that are gone."""
    for old in FOLDER.glob("[!_]*.py"):
        if old.stem not in CASES:
            old.unlink()
    for name in CASES:
        path(name).write_text(generated(name))
