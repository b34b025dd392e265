"""Layers that repeat: which names differ in a layer's number alone, so that equal layers can be shown once."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

_LAYER = re.compile(r"^((?:[^.]+\.)*?)(\d+)((?:\..*)?)$")


@dataclass(frozen=True)
class Run:
    """Consecutive layers `first` to `last` of `prefix` that are alike."""

    prefix: str
    first: int
    last: int

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    @property
    def label(self) -> str:
        """model.layers.0-26, or model.layers.27."""
        return f"{self.prefix}{self.first}" + (f"-{self.last}" if self.count > 1 else "")

    def name(self, rest: str) -> str:
        """A name inside the layers: model.layers.0-26.mlp.up_proj."""
        return self.label + rest


def split(name: str) -> tuple[str, int, str] | None:
    """("model.layers.", 3, ".mlp.up_proj"); None for a name without a layer's number."""
    found = _LAYER.match(name)
    return (found[1], int(found[2]), found[3]) if found else None


def runs(signatures: Mapping[str, Hashable]) -> dict[str, Run]:
    """Name of each row -> the run its layer belongs to. signatures: what makes rows equal, by name, in order.

    Layers are alike when their rows, named without the layer's number, have equal signatures in the same order.
    """
    layers: dict[str, dict[int, list[tuple[str, Hashable]]]] = defaultdict(lambda: defaultdict(list))
    for name, signature in signatures.items():
        parts = split(name)
        if parts:
            layers[parts[0]][parts[1]].append((parts[2], signature))
    found: dict[tuple[str, int], Run] = {}
    for prefix, by_number in layers.items():
        for group in _groups(by_number):
            run = Run(prefix, group[0], group[-1])
            found.update({(prefix, number): run for number in group})
    return {name: found[parts[:2]] for name in signatures if (parts := split(name))}


def _groups(by_number: Mapping[int, Sequence[tuple[str, Hashable]]]) -> list[list[int]]:
    groups: list[list[int]] = []
    for number in sorted(by_number):
        alike = groups and groups[-1][-1] == number - 1 and by_number[groups[-1][-1]] == by_number[number]
        if alike:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups
