"""Lines of a kernel, and how tiles are viewed in them.

A tile is (U, TR * TB): U columns of each unit, the units numbered along memory. One value a unit is flat, (TR * TB,); one a
block is flat too, in the same order.
"""

from __future__ import annotations

import struct

from fp4.kernels.helpers import HELPERS, used
from fp4.kernels.kernelspec import KernelSpec
from fp4.kernels.target import INTERPRETER, Target

INF_BITS = "0x7F800000"
CONSTANTS = tuple(f"{name}: tl.constexpr" for name in ("TR", "TB", "WHOLE"))  # of a tile (tiles.Tile.constants)


def f32(value: float) -> str:
    """The literal of `value` rounded to FP32."""
    return repr(struct.unpack("f", struct.pack("f", value))[0])


class Writer:
    """The lines of a kernel so far, the helpers that they call, and its parameters in the order of their first use."""

    loops = True  # does the kernel take its tiles one after the other?

    def __init__(self, spec: KernelSpec, target: Target) -> None:
        self.spec, self.target = spec, target
        self.functions: list[str] = []  # of this kernel alone
        self.before: list[str] = []  # what is the same for all tiles of a program
        self.start: list[str] = []  # of the first tile
        self.lines: list[str] = []  # of a tile
        self.finish: list[str] = []  # of a tile, at last
        self.after: list[str] = []
        self.helpers: list[str] = []
        self.pointers = ["x_ptr"]
        self.scalars = ["rows", "columns", "stride_r", "stride_c"]

    def module(self, title: str, name: str) -> str:
        """The text of the module: helpers, then the kernel of the lines so far, under the name that a profiler shows."""
        functions = "\n\n\n".join([*(HELPERS[name] for name in used(self.helpers)), *self.functions])
        parameters = ", ".join([*self.pointers, *self.scalars, *CONSTANTS])
        fixed = [s for s in self.scalars if s.endswith("site")]
        decorator = f"@triton.jit(do_not_specialize={fixed!r})" if fixed else "@triton.jit"
        head = f'"""{title}"""\n\nimport triton\nimport triton.language as tl'
        body = [*self.before, *self.over_tiles(), *self.after]
        kernel = "\n".join([decorator, f"def {name}({parameters}):", *("    " + line if line.strip() else "" for line in body)])
        return "\n\n\n".join(filter(None, (head, functions, kernel, f"kernel = {name}"))) + "\n"

    @property
    def lifted(self) -> bool:
        """Has the kernel two loops, one of which does not multiply by a `lift` of 1?"""
        return False

    def over_tiles(self) -> list[str]:
        """The loop over the program's tiles."""
        loop = self.loop(self.lines)
        if not self.lifted:
            return loop
        plain = ["    " + line.replace(" * lift", "") for line in loop]
        return ["if lift == 1.0:", *plain, "else:", *("    " + line for line in loop)]

    def loop(self, lines: list[str]) -> list[str]:
        """The program's tiles, one after the other, of each the lines."""
        slow, quick = self.order
        steps = [*([] if self.finish else self.advance()), *self.finish, "down, across = next_down, next_across"]
        return [
            *self.place("tl.program_id(0)"),
            f"{slow}_step, {quick}_step = tl.num_programs(0) // tiles, tl.num_programs(0) % tiles",
            *self.start,
            "for tile in range(tl.program_id(0), total, tl.num_programs(0)):",
            *("    " + line if line else "" for line in [*lines, *steps]),
        ]

    def advance(self) -> list[str]:
        """Lines that find the place of the program's next tile."""
        slow, quick = self.order
        return [
            f"next_{quick} = {quick} + {quick}_step",
            f"wraps = next_{quick} >= tiles",
            f"next_{slow} = {slow} + {slow}_step + wraps.to(tl.int32)",
            f"next_{quick} = next_{quick} - tl.where(wraps, tiles, 0)",
        ]

    @property
    def down_first(self) -> bool:
        """Are tiles numbered down the columns, not along the rows?"""
        return False

    @property
    def order(self) -> tuple[str, str]:
        """Of a tile's coordinates, `down` and `across`, the one that changes slowly with its number, and the other."""
        return ("across", "down") if self.down_first else ("down", "across")

    def place(self, tile: str) -> list[str]:
        """`down` and `across` of a tile's number."""
        slow, quick = self.order
        return [f"{slow}, {quick} = {tile} // tiles, {tile} % tiles"]

    def add(self, *lines: str) -> None:
        self.lines.extend(lines)

    def once(self, *lines: str) -> None:
        """Lines before the loop over tiles."""
        self.before.extend(lines)

    def section(self, comment: str) -> None:
        self.lines.extend(["", f"# {comment}"])

    def call(self, name: str) -> str:
        """The name of a helper, noted as used."""
        if name not in self.helpers:
            self.helpers.append(name)
        return name

    def where(self, inside: str) -> str:
        """A mask of loads or stores; no mask at all where tiles are whole."""
        return f"({inside}) | WHOLE"

    def pointer(self, name: str) -> str:
        if name not in self.pointers:
            self.pointers.append(name)
        return name

    def scalar(self, name: str) -> str:
        if name not in self.scalars:
            self.scalars.append(name)
        return name

    @property
    def interpreted(self) -> bool:
        return self.target.name == INTERPRETER

    @property
    def held(self) -> int:
        """Units of a row that a thread holds."""
        return self.spec.units_held

    @property
    def by_rows(self) -> bool:
        return self.spec.memory == "rows"

    def row_axis(self) -> tuple[int, str]:
        """(N, B) that view a flat tensor of one value for `block_units` units as (A, N, B), N the rows of a block."""
        rows, units = self.spec.block[0], self.spec.block_units
        return rows, (f"TB // {units}" if units > 1 else "TB") if self.by_rows else "1"

    def unit_axis(self, units: int) -> tuple[int, str]:
        """(N, B) that view a flat tensor of one value a unit as (A, N, B), N the given count of neighbouring units."""
        return units, "1" if self.by_rows else "TR"

    def distance(self, units: int) -> str:
        """How far apart, in their numbers, units are that lie `units` apart in a row."""
        return f"{units}" if self.by_rows else f"{units} * TR"

    def block_reduce(self, name: str, function: str = "group_max") -> None:
        """From one value a unit to one a block."""
        if self.spec.block_units > 1:
            n, b = self.unit_axis(self.spec.block_units)
            self.add(f"{name} = {self.call(function)}({name}, {n}, {b})")
        if self.spec.block[0] > 1:
            n, b = self.row_axis()
            self.add(f"{name} = {self.call(function)}({name}, {n}, {b})")

    def spread(self, name: str) -> str:
        """The expression that turns one value a block into one a unit."""
        if self.spec.block[0] > 1:
            n, b = self.row_axis()
            name = f"{self.call('repeat')}({name}, {n}, {b})"
        if self.spec.block_units > 1:
            n, b = self.unit_axis(self.spec.block_units)
            name = f"{self.call('repeat')}({name}, {n}, {b})"
        return name

    def over(self, name: str) -> str:
        """One value a unit, to broadcast over the tile."""
        return f"{name}[None, :]" if name.isidentifier() else f"({name})[None, :]"

    def tree(self, name: str, value: str, half: str) -> None:
        """From a tile to one value a unit, pairwise, by a function of two halves."""
        self.add(f"{name} = tl.reshape({value}, ({self.spec.unit} * TR * TB,))")
        unit = self.spec.unit
        while unit > 1:
            unit //= 2
            self.add(f"{name} = {half}({name}, {unit} * TR * TB)")

    def tree_sum(self, name: str, value: str) -> None:
        """The pairwise sum of a tile over each block, of the oracle's shape: columns are halved, then rows."""
        self.add(f"{name} = tl.reshape({value}, ({self.spec.unit} * TR * TB,))")
        half = self.call("add_halves")
        units, unit = self.spec.block_units, self.spec.unit
        inner = "" if self.by_rows else " * TR"
        across = f"TR * TB // {units}" if units > 1 else "TR * TB"
        j = units
        while j > 1:
            j //= 2
            self.add(f"{name} = {half}({name}, {j}{inner})")
        while unit > 1:
            unit //= 2
            self.add(f"{name} = {half}({name}, {unit} * {across})")
        rows = self.spec.block[0]
        while rows > 1:
            rows //= 2
            b = self.row_axis()[1]
            self.add(f"{name} = {half}({name}, {rows} * {b})" if b != "1" else f"{name} = {half}({name}, {rows})")

    def transposed(self, flat: str, rows: str, columns: str) -> str:
        """The expression for values numbered down the columns as a matrix, so that neighbours in a row are stored together."""
        return f"tl.trans(tl.reshape({flat}, ({columns}, {rows})))"

    def stored(self, value: str) -> tuple[str, str, str]:
        """Row, unit and value of one value a unit, as it is stored: neighbours in a row together."""
        if self.by_rows:
            return "row", "unit", value
        if not any(line.startswith("stored_row =") for line in self.lines):
            self.coordinates("stored_row", "stored_unit", 1, 1, flat=False)
        return "stored_row", "stored_unit", self.transposed(value, "TR", "TB")

    def blocks(self, block_rows: int, units: int) -> tuple[str, str]:
        """Rows and columns of a tile's blocks of `block_rows` rows x `units` units."""
        return f"TR // {block_rows}" if block_rows > 1 else "TR", f"TB // {units}" if units > 1 else "TB"

    def coordinates(self, row: str, column: str, block_rows: int, units: int, flat: bool = True) -> None:
        """Row and column of the blocks of `block_rows` rows x `units` units: flat, or (rows, 1) and (1, columns)."""
        tr, tb = self.blocks(block_rows, units)
        if not flat:
            self.add(
                f"{row} = (down * ({tr}) + tl.arange(0, {tr})[:, None]).to(tl.int64)",
                f"{column} = across * ({tb}) + tl.arange(0, {tb})[None, :]",
            )
            return
        if block_rows == units == 1:
            self.add(f"{row}, {column} = row, unit")
            return
        self.add(f"b = tl.arange(0, ({tr}) * ({tb}))")
        r, c = (f"b // ({tb})", f"b % ({tb})") if self.by_rows else (f"b % ({tr})", f"b // ({tr})")
        self.add(f"{row} = (down * ({tr}) + {r}).to(tl.int64)", f"{column} = across * ({tb}) + {c}")
