"""On a GPU without FP4 matmuls: each operand's rotation and quantizer become one generated kernel.

``rotate -> amax -> quantize -> dequantize`` is ``fp4::fake_quantize`` where nothing of the codes is saved or read elsewhere: no
packing, no unpacking. Where forward saves the codes, it is ``fp4::rotate_quantize``. Where the operand is itself decoded from
codes, and transposed, as in the backward of Quartet II, the kernel reads the codes: ``fp4::fake_requantize`` and
``fp4::requantize``. Where QuEST's clip mask is made of the same operand, the kernel writes it (``fp4::quantize_masked``); where
a gradient is masked and rotated back, that is one kernel (``fp4::unrotate_masked``). All equal the oracle bit for bit, so the
GEMMs, on operands decoded exactly to BF16, are the same as on any device. What is left is lowered as on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from fp4.compiler.graph import Builder, fp4_nodes, is_transpose, untransposed
from fp4.runtime.spec import Quantizer

fp4 = torch.ops.fp4
SHARED = "fp4_shared_amax"  # right after its matrix, so before all that may read it


@dataclass(frozen=True)
class LowerEmulated:
    """device: type of the device whose graphs are lowered. native_draws: stochastic rounding by the target's instruction."""

    name: ClassVar[str] = "lower_emulated"
    device: str = "cuda"
    native_draws: bool = False

    def run(self, graph: Graph) -> bool:
        found = [n for n in fp4_nodes(graph, "quantize") if n.meta["val"][0].device.type == self.device]
        back = [n for n in fp4_nodes(graph, "unrotate") if n.meta["val"].device.type == self.device]
        if found or back:
            _register()
        for node in reversed(found):  # a kernel that reads codes keeps them packed, so it comes before the one that makes them
            _lower(graph, node, self.native_draws)
        for node in back:
            _rotate_back(graph, node)
        if found or back:
            graph.eliminate_dead_code()
        saved = [n for n in fp4_nodes(graph, "dequantize") if n.meta["val"].device.type == self.device]
        decoded = [_decode(graph, node) for node in saved]
        return bool(found or back or any(decoded))


def _lower(graph: Graph, node: Node, native_draws: bool) -> None:
    matrix, amax, quantizer, seed, site = node.args
    _rotate_amax(graph, node, amax)
    results = {u.args[1]: u for u in node.users}
    codes, scales = results.get(0), results.get(1)
    masks = _masks(matrix, scales, str(quantizer))
    matrix, amax, readers, rotation, rotation_seed, signs_site = _unrotated(node, matrix, amax, masks)
    seed = rotation_seed if seed is None else seed
    build = Builder(graph, node)
    packed = None if masks else _packed(matrix, readers)
    quantize, fake_quantize = fp4.rotate_quantize.default, fp4.fake_quantize.default
    if packed:
        quantize, fake_quantize = fp4.requantize.default, fp4.fake_requantize.default
    elif masks:
        quantize = fp4.quantize_masked.default
    native_draws &= Quantizer.parse(str(quantizer)).rounding == "stochastic"
    if amax is None and not rotation and packed is None:
        amax = _plain_amax(graph, node)
    common = (*(packed or (matrix,)), amax, quantizer, rotation, seed, site, signs_site, native_draws)
    decodes = [] if codes is None else [u for u in codes.users if u.target is fp4.dequantize.default]
    dtypes = {d.args[5] for d in decodes}
    if len(dtypes) != 1 or {*(codes.users if codes else ()), *(scales.users if scales else ())} != set(decodes):
        new = build.outputs(build.call(quantize, *common))
        for i, old in results.items():
            old.replace_all_uses_with(new[i])  # type: ignore[index]
        for mask in masks:
            mask.replace_all_uses_with(new[3])
        return
    decoded, tensor_scale = build.outputs(build.call(fake_quantize, *common, dtypes.pop()))
    for decode in decodes:
        decode.replace_all_uses_with(decoded)
        graph.erase_node(decode)
    if 2 in results:
        results[2].replace_all_uses_with(tensor_scale)


def _plain_amax(graph: Graph, node: Node) -> Node | None:
    """The amax of an operand as it lies in memory: Inductor fuses it with what makes the operand, where a kernel of ours would
    read it once more. One for the operand and its transpose."""
    amax: Any = node.args[1]
    if amax is None or amax.target is not fp4.amax.default:
        return amax
    matrix: Any = untransposed(amax.args[0])
    if (found := next((u for u in matrix.users if u.target is fp4.amax.default and u.meta.get(SHARED)), None)) is not None:
        return found
    after = matrix.next
    while after.op == "placeholder":
        after = after.next
    return Builder(graph, amax, before=after, **{SHARED: True}).call(fp4.amax.default, matrix)


def _decode(graph: Graph, node: Node) -> bool:
    """Codes that forward saved, and no kernel reads: one that decodes them."""
    source, dtype = node.args[3], node.args[5]
    _register()
    from fp4.kernels.packed import readable

    if not readable(Quantizer.parse(str(source))) or dtype not in (torch.bfloat16, torch.float32):
        return False
    node.replace_all_uses_with(Builder(graph, node).call(fp4.decode.default, *node.args))
    graph.erase_node(node)
    return True


def _register() -> None:
    import fp4.kernels.ops  # noqa: F401  registers the ops


def _rotate_amax(graph: Graph, node: Node, reduced: Any) -> None:
    """An amax that ranks share, of a rotated operand, is a kernel of its own, which reads the unrotated one."""
    if not isinstance(reduced, Node) or reduced.target is not fp4.reduce_amax.default:
        return
    amax: Any = reduced.args[0]
    matrix = amax.args[0]
    if amax.target is not fp4.amax.default or matrix.target is not fp4.rotate.default or not set(matrix.users) <= {node, amax}:
        return
    amax.replace_all_uses_with(Builder(graph, amax).call(fp4.rotated_amax.default, *matrix.args))
    graph.erase_node(amax)


def _masks(matrix: Any, scales: Node | None, quantizer: str) -> list[Node]:
    """The clip masks of the quantized matrix, which its kernel can write."""
    from fp4.kernels.masks import maskable

    if scales is None or not maskable(Quantizer.parse(quantizer)):
        return []
    return [
        u
        for u in scales.users
        if u.target is fp4.clip_mask.default and u.args[0] is matrix and u.args[1] is scales and u.args[2] == quantizer
    ]


def _rotate_back(graph: Graph, node: Node) -> None:
    """A gradient, masked for this node alone, rotated back."""
    gradient, rotation, seed, site, columns, dtype = node.args
    mask: Any = None
    if dtype not in (torch.bfloat16, torch.float32):
        return
    if isinstance(gradient, Node) and gradient.target is fp4.apply_mask.default and set(gradient.users) == {node}:
        gradient, mask = gradient.args
    build = Builder(graph, node)
    node.replace_all_uses_with(build.call(fp4.unrotate_masked.default, gradient, mask, rotation, seed, site, columns, dtype))


def _unrotated(node: Node, matrix: Any, amax: Any, masks: list[Node]) -> tuple[Any, Any, set[Any], str, Any, int]:
    """The matrix below the rotation that only this quantize reads, its amax left to the kernel; those of its readers that the
    kernel replaces; the rotation, seed and site."""
    own_amax = isinstance(amax, Node) and amax.target is fp4.amax.default and set(amax.users) == {node}
    amax_matrix: Any = amax.args[0] if own_amax else None
    if own_amax and amax_matrix is matrix:
        amax = None  # the launcher's first kernel
    readers: set[Any] = {node, *masks, *([node.args[1]] if own_amax else [])}
    if not isinstance(matrix, Node) or matrix.target is not fp4.rotate.default or not set(matrix.users) <= readers:
        return matrix, amax, readers, "", None, 0
    source, rotation, seed, site = matrix.args
    return source, amax, {matrix}, str(rotation), seed, int(site)  # type: ignore[arg-type]


def _packed(matrix: Any, readers: set[Node]) -> tuple[Any, ...] | None:
    """What the kernel reads in place of a matrix that is decoded from FP4 codes for it alone: the first arguments of
    ``fp4::requantize``."""
    transposed = is_transpose(matrix)
    if transposed and set(matrix.users) <= readers:
        matrix, readers = matrix.args[0], {matrix}
    if not isinstance(matrix, Node) or matrix.target is not fp4.dequantize.default or not set(matrix.users) <= readers:
        return None
    from fp4.kernels.packed import readable

    codes, scales, factor, source, columns, dtype = matrix.args
    if not readable(Quantizer.parse(str(source))) or dtype not in (torch.bfloat16, torch.float32):
        return None
    return codes, scales, factor, source, columns, dtype, transposed
