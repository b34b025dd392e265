"""fp4.explain at scale: seconds and peak memory for a 32-layer Llama of 1B parameters, none of which is allocated.

    python -m benchmarks.explain_scale

The model is on the meta device, 4 x 2048 tokens, autocast to BF16. Seconds are of one process, imports left out: on the clock,
and of its processor time, which other load on the machine lengthens less. The peak is the process's resident memory, imports
included.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import write

BATCH, LENGTH, LAYERS = 4, 2048, 32
LIMIT_SECONDS, LIMIT_GIB = 60, 4


def model() -> torch.nn.Module:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1536,
        intermediate_size=5120,
        num_hidden_layers=LAYERS,
        num_attention_heads=24,
        num_key_value_heads=8,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    import fp4

    llama = model()
    tokens = torch.empty((BATCH, LENGTH), dtype=torch.int64, device="meta")
    seconds: dict[str, float] = {}
    processor: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        start, spent = time.perf_counter(), time.process_time()
        result = call()
        seconds[name], processor[name] = time.perf_counter() - start, time.process_time() - spent
        return result

    before = peak_gib()
    explained = timed(
        "explain", lambda: fp4.explain(llama, input_ids=tokens, labels=tokens, recipe="nvfp4", autocast=torch.bfloat16)
    )
    after = peak_gib()
    table = timed("table", lambda: explained.table(collapse=True))
    timed("table as text", lambda: str(table))
    timed("drawing as SVG", lambda: explained.draw().svg())
    timed("code of the rewritten graph", lambda: explained.fx("rewritten"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        timed("html page, with MLIR and the lowered graphs", lambda: explained.html(path))
        page = path.stat().st_size
    parts = [name for name in seconds if not name.startswith("html")]
    clock, spent = (sum(d[name] for name in parts) for d in (seconds, processor))
    write(
        "explain_scale",
        {
            "setting": f"Llama, {LAYERS} layers of 1536, {BATCH} x {LENGTH} tokens, meta, autocast to BF16, recipe nvfp4",
            "parameters": sum(p.numel() for p in llama.parameters()),
            "cores": os.cpu_count(),
            "load average": os.getloadavg()[0],
            "nodes of the rewritten graph": len(explained.graphs[0].rewritten.nodes),
            "linears": table.totals().linears,
            "seconds": {name: round(s, 2) for name, s in seconds.items()},
            "processor seconds": {name: round(s, 2) for name, s in processor.items()},
            "explain, table, drawing and code": {"seconds": round(clock, 2), "processor seconds": round(spent, 2)},
            "peak GiB before, after explain, at the end": [round(x, 2) for x in (before, after, peak_gib())],
            "page bytes": page,
            "limits": {"seconds": LIMIT_SECONDS, "GiB": LIMIT_GIB},
            "within the limits": {
                "seconds": clock < LIMIT_SECONDS,
                "processor seconds": spent < LIMIT_SECONDS,
                "GiB": peak_gib() < LIMIT_GIB,
            },
        },
    )


if __name__ == "__main__":
    main()
