"""Random words of generated kernels: Philox4x32-10, keyed by seed, site and element (runtime/rng.py)."""

from __future__ import annotations

from fp4.kernels.helpers import NEEDS, helper
from fp4.kernels.writer import Writer
from fp4.runtime.rng import STREAM_ELEMENT

NEEDS.update(
    {
        "element_words": ("philox", "interleave"),
        "any_words": ("philox",),
        "block_words": ("philox",),
        "pair_words": ("philox",),
        "element_draws": ("philox", "interleave"),
        "any_draws": ("any_words",),
    }
)

helper(
    "philox",
    '''
@triton.jit
def philox(counter, stream, seed, site):
    """Philox4x32-10: four random words (uint32) of each counter (int64)."""
    c0, c1 = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    c2 = tl.full(counter.shape, stream, tl.uint32)
    c3 = tl.zeros(counter.shape, tl.uint32)
    k0, k1 = seed, site
    for _ in tl.static_range(10):
        p0, p1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, p1.to(tl.uint32)
        c2, c3 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1, p0.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3
''',
)
helper(
    "interleave",
    '''
@triton.jit
def interleave(a, b, c, d, N: tl.constexpr, G: tl.constexpr):
    """Four (N, G): row 4i + j of the result (4N, G) is row i of the j-th."""
    return tl.reshape(tl.permute(tl.join(tl.join(a, b), tl.join(c, d)), (0, 3, 2, 1)), (4 * N, G))
''',
)
helper(
    "element_words",
    '''
@triton.jit
def element_words(first, stream, seed, site, U: tl.constexpr):
    """Random words of U consecutive elements from each index of `first` (G,), multiples of 4: (U, G)."""
    counter = (first // 4)[None, :] + tl.arange(0, U // 4)[:, None]
    a, b, c, d = philox(counter, stream, seed, site)
    return interleave(a, b, c, d, U // 4, first.shape[0])
''',
)
helper(
    "block_words",
    '''
@triton.jit
def block_words(row, unit, units, stream, seed, site, B: tl.constexpr):
    """Random words of blocks of a unit each, four neighbours of one counter; row, unit: of all blocks, seen as (A, 4, B)."""
    first = tl.reshape(row * units + unit, (row.shape[0] // (4 * B), 4, B))
    counter = tl.reshape(tl.min(first, 1), (row.shape[0] // 4,)) // 4
    a, b, c, d = philox(counter, stream, seed, site)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    words = tl.permute(tl.reshape(words, (row.shape[0] // (4 * B), B, 4)), (0, 2, 1))
    return tl.reshape(words, (row.shape[0],))
''',
)
helper(
    "pair_words",
    '''
@triton.jit
def pair_words(first, stream, seed, site):
    """Random words of elements `first` (G,), even, and of the next ones: (2G,)."""
    a, b, c, d = philox(first // 4, stream, seed, site)
    even = first % 4 == 0
    return tl.reshape(tl.join(tl.where(even, a, c), tl.where(even, b, d)), (2 * first.shape[0],))
''',
)
helper(
    "any_words",
    '''
@triton.jit
def any_words(index, stream, seed, site):
    """Random words of elements of any index, of the shape of `index`; four are drawn for each."""
    a, b, c, d = philox(index // 4, stream, seed, site)
    j = index % 4
    return tl.where(j < 2, tl.where(j == 0, a, b), tl.where(j == 2, c, d))
''',
)
helper(
    "element_draws",
    '''
@triton.jit
def element_draws(first, stream, seed, site, U: tl.constexpr):
    """Draws of 16 bits for U consecutive elements from each index of `first` (G,), multiples of 8: (U, G), int32."""
    counter = (first // 8)[None, :] + tl.arange(0, U // 8)[:, None]
    a, b, c, d = philox(counter, stream, seed, site)
    word = interleave(a, b, c, d, U // 8, first.shape[0])
    pairs = tl.permute(tl.join((word & 0xFFFF).to(tl.int32), (word >> 16).to(tl.int32)), (0, 2, 1))
    return tl.reshape(pairs, (U, first.shape[0]))
''',
)
helper(
    "any_draws",
    '''
@triton.jit
def any_draws(index, stream, seed, site):
    """Draws of 16 bits for elements of any index, of the shape of `index`, int32."""
    word = any_words(index // 2, stream, seed, site)
    return ((word >> (index % 2 * 16).to(tl.uint32)) & 0xFFFF).to(tl.int32)
''',
)
helper(
    "uniform",
    '''
@triton.jit
def uniform(word):
    """FP32 in [0, 1) from the upper 24 bits of random words."""
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08
''',
)


class Draws(Writer):
    """Lines that draw."""

    def seed(self) -> None:
        if "seed_ptr" not in self.pointers:
            self.once(f"seed = tl.load({self.pointer('seed_ptr')}).to(tl.uint32)")

    def located(self, index: str, row: str, column: str, unit: int) -> str:
        """The index of an element (`unit` = 1) or block in the matrix that the operand is a part of; `index` without one."""
        if not self.spec.located:
            return index
        seed = self.pointer("seed_ptr")
        self.once(f"whole, first = tl.load({seed} + 1) // {unit}, tl.load({seed} + 2) // {unit}")
        return f"{row} * whole + first + {column}"

    def draws(self) -> None:
        """`draw`: 16 random bits of each element, of its index in the operand."""
        self.seed()
        self.scalar("site")
        u, tail = self.spec.unit, f"{STREAM_ELEMENT}, seed, site.to(tl.uint32)"
        first = self.located(f"row * width + unit * {u}", "row", f"unit * {u}", 1)
        if self.spec.aligned:
            self.add(f"draw = {self.call('element_draws')}({first}, {tail}, {u})")
        else:
            self.add(f"draw = {self.call('any_draws')}(({first})[None, :] + k, {tail})")
