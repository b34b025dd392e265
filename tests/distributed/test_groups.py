"""Groups that are none."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fp4.compiler.backend import OptionError, Options
from fp4.compiler.shards import group_shard
from tests.graphs import MLP, rewritten


def test_one_rank_is_one_device() -> None:
    """A group of one rank changes no graph."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    alone = rewritten(MLP(), torch.randn(32, 64)).joint.final
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        assert group_shard("world") is None
        grouped = rewritten(MLP(), torch.randn(32, 64), batch_group="world").joint.final
    finally:
        dist.destroy_process_group()
    assert str(grouped) == str(alone)


def test_a_group_before_torch_distributed() -> None:
    with pytest.raises(OptionError, match="init_process_group"):
        Options.read({"batch_group": "world"}, None)
