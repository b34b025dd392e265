"""The pictures of docs/inspection.md: drawings of an MLP, a Llama block and a 32-layer Llama, and the page in a browser.

    python -m benchmarks.explain_pictures

Writes docs/pictures/*.png. The page's screenshot needs Chromium and is left as it is without one.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import fp4
from benchmarks import explain_scale

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
SIZE = (1500, 960)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(512, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 512)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.mid(self.up(x).relu()).relu())


def screenshot(explained: fp4.Explanation, place: str, path: Path) -> None:
    browser = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)
    if browser is None:
        print(f"no Chromium: {path} is left as it is")
        return
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        explained.html(page)
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=10000"]
        size = f"--window-size={SIZE[0]},{SIZE[1]}"
        command = [browser, *flags, size, f"--screenshot={path}", f"{page.as_uri()}#{place}"]
        subprocess.run(command, check=True, capture_output=True, timeout=300)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    mlp = fp4.explain(MLP(), torch.empty(4096, 512, requires_grad=True), recipe="nvfp4", autocast=torch.bfloat16)
    mlp.draw(FOLDER / "mlp.png")
    llama = explain_scale.model()
    tokens = torch.empty((explain_scale.BATCH, explain_scale.LENGTH), dtype=torch.int64, device="meta")
    deep = fp4.explain(llama, input_ids=tokens, labels=tokens, recipe="nvfp4", autocast=torch.bfloat16)
    deep.draw(FOLDER / "llama_32.png")
    deep.draw(FOLDER / "llama_block.png", layer="model.layers.1")
    place = "tab=stages&left=tagged&right=rewritten&search=layers.0.self_attn.q_proj"
    screenshot(deep, place, FOLDER / "page.png")


if __name__ == "__main__":
    main()
