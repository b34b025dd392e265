"""A recipe from scratch: MXFP4 forward by QuEST, NVFP4 backward by MS-EDEN on the forward's codes, BF16 to end with."""

import torch
from torch import nn

import fp4


def mixed(*, rotation: int = 64, tail: float = 0.1) -> fp4.Policy:
    """MXFP4 forward, NVFP4 backward. rotation: size of the backward's. tail: share of the last linears in BF16."""
    forward = fp4.Operand(fp4.MXFP4(scale_rule="quest"), clip_gradient=True)
    eden = fp4.NVFP4(rounding="ms_eden")
    backward = fp4.GemmPrecision(
        first=eden,
        second=fp4.Operand(eden, source="forward"),  # the forward's codes, decoded: W in dgrad, X in wgrad
        rotation=fp4.Rotation(rotation, signs="fresh", bf16=False),
    )
    linear = fp4.LinearPrecision(fp4.GemmPrecision(forward, forward), backward, backward)
    policy = fp4.Policy("mixed", linear, (fp4.keep("lm_head", optional=True), fp4.keep_last(tail)))
    return policy.with_phase("bf16", fp4.recipe("bf16"))


def main() -> None:
    model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))
    compiled = torch.compile(model, backend="fp4", options={"policy": mixed(tail=0.0)})
    compiled(torch.randn(64, 128)).square().mean().backward()
    print(fp4.report(compiled))
    fp4.switch(compiled, "bf16")
    compiled(torch.randn(64, 128)).square().mean().backward()


if __name__ == "__main__":
    main()
