"""What a kernel is generated for: a GPU architecture, or Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100a", "sm_103a", "sm_120a", "sm_121a")
BLACKWELL = ("sm_100a", "sm_103a", "sm_120a", "sm_121a")
INTERPRETER = "interpreter"


class TargetError(ValueError):
    """A target that is unknown, or cannot do what is asked."""


@dataclass(frozen=True)
class Target:
    """name: of `TARGETS`, or "interpreter" (the CPU, for tests). models: the architecture whose conversion instructions the
    interpreter runs a model of, or "" for none.
    """

    name: str
    models: str = ""

    def __post_init__(self) -> None:
        if self.name not in (*TARGETS, INTERPRETER):
            raise TargetError(f"target {self.name!r}; write one of {', '.join((*TARGETS, INTERPRETER))}")
        if self.models and (self.name != INTERPRETER or self.models not in TARGETS):
            raise TargetError(
                f"models={self.models!r} of {self.name}; it is for the interpreter, and one of {', '.join(TARGETS)}"
            )

    @property
    def rounds_e2m1(self) -> bool:
        """Does it have cvt.rn.satfinite.e2m1x2.f32 and its inverse?"""
        return (self.models or self.name) in BLACKWELL

    @property
    def draws_e2m1(self) -> bool:
        """Does it have cvt.rs.satfinite.e2m1x4.f32? sm_120a and sm_121a do not."""
        return (self.models or self.name) in BLACKWELL[:2]

    @property
    def capability(self) -> int:
        """Compute capability times ten, e.g. 90. Raises TargetError for the interpreter."""
        if self.name == INTERPRETER:
            raise TargetError("the interpreter has no compute capability; name a GPU architecture such as sm_90")
        return int(self.name.removeprefix("sm_").removesuffix("a"))


def target_of(device: torch.device) -> Target:
    """The target of a tensor's device. Raises TargetError for a device that no kernel is generated for."""
    if device.type == "cuda" and torch.version.cuda is not None:
        major, minor = torch.cuda.get_device_capability(device)
        name = f"sm_{major}{minor}"
        return Target(name + "a" if major >= 10 else name)
    if device.type == "cpu":
        import triton

        if triton.knobs.runtime.interpret:
            return Target(INTERPRETER)
        raise TargetError("a tensor on the CPU; move it to a CUDA device, or set TRITON_INTERPRET=1 before triton is imported")
    raise TargetError(f"no kernels for {device}; move the tensor to a CUDA device of compute capability 8.0 or higher")
