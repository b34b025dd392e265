"""Two processes with gloo on the CPU, for the tests of distributed runs."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2


def on_ranks(work: Callable[..., Any], *args: Any, ranks: int = RANKS, port: int = 0) -> list[Any]:
    """What `work(*args)` returns in each of `ranks` processes, which are one process group. A failure in one is raised here.

    work: a function of a module's top level. What it returns is saved with ``torch.save``.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (ranks, folder, work, args), nprocs=ranks)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _rank(rank: int, ranks: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        torch.save(work(*args), Path(folder) / f"{rank}.pt")
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the other rank waits in a collective
    dist.destroy_process_group()
