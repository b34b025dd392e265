"""One precision a GEMM: BF16 fprop, FP4 dgrad and wgrad, over the whole model."""

import torch
from torch import nn

import fp4

STOCHASTIC = fp4.NVFP4(rounding="stochastic", range_guard=True)
BACKWARD = fp4.GemmPrecision(STOCHASTIC, STOCHASTIC, rotation=fp4.Rotation(64, signs="fresh", bf16=False))
POLICY = fp4.Policy("fp4_backward", fp4.LinearPrecision(fprop=fp4.BF16, dgrad=BACKWARD, wgrad=BACKWARD))


def main() -> None:
    model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))
    compiled = torch.compile(model, backend="fp4", options={"policy": POLICY})
    compiled(torch.randn(64, 128)).square().mean().backward()
    print(fp4.report(compiled))


if __name__ == "__main__":
    main()
