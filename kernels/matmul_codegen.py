"""The Triton source of a block-scaled matmul: `source(spec, target, tile)`.

Operands and block scales arrive through TMA descriptors. Scales lie in the tensor cores' order (``runtime.layout.swizzle``): a
tile of 128 rows x 4 scales is 512 bytes, which the kernel views as (32, 4, 4) and turns into 128 x 4. A descriptor reads zeros
beyond its tensor, codes and scales alike, so a last step of K adds zero.
"""

from __future__ import annotations

from fp4.kernels.helpers import HELPERS, used
from fp4.kernels.matmul_spec import FORMATS, MatmulSpec, MatmulTile
from fp4.kernels.target import INTERPRETER, Target

_TYPES = {"bf16": "tl.bfloat16", "fp16": "tl.float16"}


def pointers(spec: MatmulSpec) -> list[str]:
    """Names of the kernel's pointers behind its four descriptors, in order."""
    return ["y_ptr", *(f"alpha{i}_ptr" for i in range(spec.alphas)), *(["bias_ptr"] if spec.bias else [])]


def source(spec: MatmulSpec, target: Target, tile: MatmulTile) -> str:
    """The text of a module whose function `kernel` is the matmul. The same text for equal arguments."""
    a, b = FORMATS[spec.a], FORMATS[spec.b]
    helpers: list[str] = []
    parameters = ["a", "a_scales", "b", "b_scales", *pointers(spec), "M", "N", "K", "stride_y"]
    lines = [
        f"BM: tl.constexpr = {tile.m}",
        f"BN: tl.constexpr = {tile.n}",
        f"BK: tl.constexpr = {tile.k}",
        "rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)",
    ]
    if spec.partial:
        lines += [
            "steps = tl.cdiv(tl.cdiv(K, BK), tl.num_programs(1))  # of each part of K",
            "first = tl.program_id(1) * steps",
            "last = tl.minimum(first + steps, tl.cdiv(K, BK))",
        ]
    else:
        lines.append("first, last = 0, tl.cdiv(K, BK)")
    lines += _alpha(spec)
    body = _tile(spec, tile, a.per_byte, b.per_byte, f'"{a.element}"', f'"{b.element}"')
    body += _epilogue(spec, target, tile, helpers)
    if tile.persistent:
        keywords = ", flatten=True, warp_specialize=True" if tile.specialized else ""
        lines.append(f"for tile in tl.range(tl.program_id(0), rows * columns, tl.num_programs(0){keywords}):")
        lines += [f"    {line}" for line in body]
    else:
        lines += ["tile = tl.program_id(0)", *body]
    epilogue = [
        f"alpha {spec.alphas}" * bool(spec.alphas),
        f"bias {spec.bias}" * bool(spec.bias),
        "accumulate" * spec.accumulate,
    ]
    title = ", ".join(filter(None, [f"{spec.a} x {spec.b} to {spec.output}", *epilogue, "partial" * spec.partial, str(tile)]))
    name = f"fp4_matmul_{spec.a}_{spec.b}"
    return _module(name, f"Block-scaled matmul, {title} ({target.name}).", parameters, lines, helpers)


def _tile(spec: MatmulSpec, tile: MatmulTile, a_per_byte: int, b_per_byte: int, a_format: str, b_format: str) -> list[str]:
    """The tile's place, grouped so that neighbours share rows of b in L2, and its loop over K."""
    row_tiles, column_tiles, scale_tiles = tile.m // 128, tile.n // 128, tile.k // (4 * spec.block)

    def scales(tiles: int, size: str) -> str:
        split = f"({tiles}, {scale_tiles}, 32, 4, 4)"
        return f".reshape{split}.trans(0, 3, 2, 1, 4).reshape({size}, BK // {spec.block})"

    specialize = ", warp_specialize=True" if tile.specialized and not tile.persistent else ""
    return [
        f"group = tile // ({tile.group} * columns)",
        f"height = tl.minimum(rows - group * {tile.group}, {tile.group})",
        f"row = group * {tile.group} + tile % ({tile.group} * columns) % height",
        f"column = tile % ({tile.group} * columns) // height",
        "y = tl.zeros((BM, BN), tl.float32)",
        f"for i in tl.range(first, last, num_stages={tile.stages}{specialize}):",
        f"    x = a.load([row * BM, i * (BK // {a_per_byte})])",
        f"    w = b.load([column * BN, i * (BK // {b_per_byte})])",
        f"    xs = a_scales.load([0, row * {row_tiles}, i * {scale_tiles}, 0, 0]){scales(row_tiles, 'BM')}",
        f"    ws = b_scales.load([0, column * {column_tiles}, i * {scale_tiles}, 0, 0]){scales(column_tiles, 'BN')}",
        f"    y = tl.dot_scaled(x, xs, {a_format}, w.T, ws, {b_format}, y)",
    ]


def _epilogue(spec: MatmulSpec, target: Target, tile: MatmulTile, helpers: list[str]) -> list[str]:
    """The product goes out in pieces of `tile.piece` columns: whole, its values and addresses would not fit in registers."""
    lines = ["m = row * BM + tl.arange(0, BM)"]
    pieces, width = ["y"], tile.n
    while width > tile.piece:
        width //= 2
        lines += [f"{y}0, {y}1 = tl.split(tl.permute(tl.reshape({y}, (BM, 2, {width})), (0, 2, 1)))" for y in pieces]
        pieces = [name + half for name in pieces for half in "01"]
    for i, name in enumerate(pieces):
        lines += [
            f"n = column * BN + {i * width} + tl.arange(0, {width})",
            "inside = (m < M)[:, None] & (n < N)[None, :]",
            "at = y_ptr + m[:, None].to(tl.int64) * stride_y + n[None, :]",
            *(["at += tl.program_id(1).to(tl.int64) * M * stride_y"] if spec.partial else []),
            *_store(spec, target, helpers, name, "[None, :]"),
        ]
    return lines


def _store(spec: MatmulSpec, target: Target, helpers: list[str], y: str, row: str) -> list[str]:
    """From FP32 sums, the name `y`, to memory, at `at` where `inside`. row: the index that makes (n,) a row of them."""
    lines = []
    if spec.alphas:
        lines.append(f"{y} = {y} * alpha")
    if spec.bias:
        lines.append(f"{y} = {y} + tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32){row}")
    if spec.accumulate:
        lines.append(f"{y} = tl.load(at, mask=inside, other=0.0) + {y}")
    value = y
    if spec.output == "bf16" and target.name == INTERPRETER:
        helpers.append("to_bf16")
        value = f"to_bf16({y})"
    elif spec.output in _TYPES:
        value = f"{y}.to({_TYPES[spec.output]})"
    return [*lines, f"tl.store(at, {value}, mask=inside)"]


def _alpha(spec: MatmulSpec) -> list[str]:
    return ["alpha = " + " * ".join(f"tl.load(alpha{i}_ptr)" for i in range(spec.alphas))] if spec.alphas else []


def reduce_source(spec: MatmulSpec, target: Target) -> str:
    """The second kernel of split-K: the parts of each element added in order, then the epilogue of `spec`."""
    helpers: list[str] = []
    parameters = ["parts_ptr", *pointers(spec), "parts", "size", "N", "stride_y", "B: tl.constexpr"]
    lines = [
        "row = tl.program_id(0).to(tl.int64)",
        "n = tl.program_id(1) * B + tl.arange(0, B)",
        "inside = n < N",
        *_alpha(spec),
        "y = tl.zeros((B,), tl.float32)",
        "part = parts_ptr + row * N + n",
        "for _ in range(parts):",
        "    y += tl.load(part, mask=inside, other=0.0)",
        "    part += size",
        "at = y_ptr + row * stride_y + n",
        *_store(spec, target, helpers, "y", ""),
    ]
    title = f"Sum of the parts of split-K to {spec.output} ({target.name})."
    return _module("fp4_sum_of_parts", title, parameters, lines, helpers)


def _module(name: str, title: str, parameters: list[str], lines: list[str], helpers: list[str]) -> str:
    kernel = "\n".join(["@triton.jit", f"def {name}({', '.join(parameters)}):", *(f"    {line}" for line in lines)])
    functions = "\n\n\n".join(HELPERS[name] for name in used(helpers))
    head = f'"""{title}"""\n\nimport triton\nimport triton.language as tl'
    return "\n\n\n".join(filter(None, (head, functions, kernel, f"kernel = {name}"))) + "\n"
