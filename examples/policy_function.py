"""A policy as a function of the linear: narrow layers and the first block in BF16, the rest in NVFP4."""

import torch
from torch import nn

import fp4

NEAREST = fp4.NVFP4()
STOCHASTIC = fp4.NVFP4(rounding="stochastic", range_guard=True)


@fp4.policy
def wide_ones(site: fp4.LinearSite) -> fp4.LinearPrecision:
    if site.name.startswith("0.") or (site.n is not None and site.n < 256):
        return fp4.LinearPrecision()  # BF16 in all three GEMMs
    return fp4.LinearPrecision(
        fprop=fp4.GemmPrecision(NEAREST, NEAREST),
        dgrad=fp4.GemmPrecision(STOCHASTIC, NEAREST),
        wgrad=fp4.GemmPrecision(STOCHASTIC, NEAREST, rotation=fp4.Rotation(16, signs="fixed")),
    )


def main() -> None:
    block = [nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(2)]
    model = nn.Sequential(*block)
    compiled = torch.compile(model, backend="fp4", options={"policy": wide_ones})
    compiled(torch.randn(64, 128)).square().mean().backward()
    print(fp4.report(compiled))


if __name__ == "__main__":
    main()
