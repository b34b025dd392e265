"""What each rank of a distributed run holds of an operand: read from DTensor parameters, and said by the user of the batch.

AOTAutograd hands the passes local tensors and collectives; placements are known to Dynamo's inputs alone. A linear's weight
says which of N and K is sharded and over which process group; the option `batch_group` says that M is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Shard:
    """This rank's part of one dimension: the `index`-th of `count`, over the process group named `group`.

    even: are all parts of one size? Only then is the place of an element in the whole dimension known.
    """

    group: str
    index: int
    count: int
    even: bool = True


Shards = tuple[Shard, ...]  # of one dimension, the outermost division first; () where every rank has all of it


@dataclass(frozen=True)
class Where:
    """What this rank's operand is of the whole one: the shards of its rows and of its columns."""

    rows: Shards = ()
    columns: Shards = ()

    @property
    def groups(self) -> tuple[str, ...]:
        """The process groups whose ranks hold other parts of the operand."""
        return unique(s.group for s in (*self.rows, *self.columns))


def unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def position(shards: Shards) -> tuple[int, int]:
    """(index, count) of a dimension divided by one shard after the other."""
    index, count = 0, 1
    for shard in shards:
        index, count = index * shard.count + shard.index, count * shard.count
    return index, count


def group_shard(group: Any) -> Shard | None:
    """This rank's part of what the ranks of `group` divide among them in rank order; None for a group of one.

    group: a ProcessGroup, a DeviceMesh of one dimension, or "world". Raises TypeError or ValueError for anything else.
    """
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("torch.distributed is not initialized; call torch.distributed.init_process_group before compiling")
    if isinstance(group, str):
        if group != "world":
            raise ValueError(f"{group!r} is no process group; write 'world', a ProcessGroup or a DeviceMesh of one dimension")
        group = dist.group.WORLD
    if isinstance(group, dist.device_mesh.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"the mesh has {group.ndim} dimensions; write one of them, such as mesh['dp']")
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{group!r} is no process group; write 'world', a ProcessGroup or a DeviceMesh of one dimension")
    count = dist.get_world_size(group)
    return Shard(group.group_name, dist.get_rank(group), count) if count > 1 else None


def placed(value: Any) -> tuple[tuple[Shards, ...], tuple[str, ...]]:
    """Shards of each dimension of a graph input, and the names of the groups of its mesh; ((), ()) unless it is a DTensor."""
    if not (torch.distributed.is_available() and isinstance(value, torch.Tensor)):
        return (), ()
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as ShardedDim

    if not isinstance(value, DTensor):
        return (), ()
    mesh = value.device_mesh
    dimensions: list[Shards] = [()] * value.dim()
    groups = []
    for i, placement in enumerate(value.placements):
        group, count = mesh.get_group(i).group_name, mesh.size(i)
        if count == 1:
            continue
        groups.append(group)
        if placement.is_shard() or type(placement).__name__ == "_StridedShard":
            dim: int = placement.dim  # type: ignore[attr-defined]
            before = position(dimensions[dim])[1]
            even = type(placement) is ShardedDim and value.shape[dim] % (before * count) == 0
            dimensions[dim] = (*dimensions[dim], Shard(group, mesh.get_local_rank(i), count, even))
    return tuple(dimensions), tuple(groups)
