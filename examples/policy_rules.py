"""A policy from rules: a published recipe, some layers kept, one GEMM of one kind of layer changed."""

import torch
from torch import nn

import fp4

POLICY = fp4.recipe("quartet2").with_rules(
    fp4.keep("0.down"),  # all three GEMMs in BF16
    fp4.rule("*.up", wgrad=fp4.BF16),  # wgrad alone
    fp4.rule("1.down", dgrad=fp4.GemmPrecision(fp4.MXFP8(), fp4.MXFP8()), wgrad=fp4.GemmPrecision(fp4.FP8(), fp4.FP8())),
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def main() -> None:
    model = nn.Sequential(Block(), Block())
    compiled = torch.compile(model, backend="fp4", options={"policy": POLICY})
    compiled(torch.randn(64, 128)).square().mean().backward()
    print(fp4.report(compiled))


if __name__ == "__main__":
    main()
