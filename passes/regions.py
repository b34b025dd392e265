"""Parts of a partitioned graph that are lowered together, and what they compute by the oracle (``fp4.runtime.reference``).

What quantizes one operand (amax, quantize, dequantize) is one region, a rotation another (fused into one loop, the butterfly's
strides would keep Inductor from vectorizing the rest). Within a region a dequantize takes the unpacked values (same bits, no
unpacking), and decodes to FP32 where only FP32 products read it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._inductor import inductor_prims
from torch.fx import Graph, Node

from fp4.compiler.graph import fp4_nodes
from fp4.runtime import fp8, layout, reference, rng
from fp4.runtime.spec import Quantizer, Rotation

fp4 = torch.ops.fp4
# The draw, the generated kernels, and what waits for other ranks: they stay.
FUSED = (
    "rotate_quantize",
    "fake_quantize",
    "rotated_amax",
    "decode",
    "requantize",
    "fake_requantize",
    "quantize_masked",
    "unrotate_masked",
)
KERNELS = ("scaled_mm", "library_scaled_mm", "fp8_operand", "fp8_mm", "fp8_block_mm", *FUSED)
EXPERTS = "grouped_mm"  # its group sizes are data
OPAQUE = ("seed", "product", EXPERTS, *KERNELS, "reduce_amax")
# The argument of an op that is its draw site. It enters a region as a tensor, else no two regions were equal.
SITE: dict[Any, int] = {fp4.rotate.default: 3, fp4.unrotate.default: 3, fp4.quantize.default: 4}


def regions(graph: Graph) -> list[Region]:
    """Partition the fp4 ops: each quantize with the amax only it reads and the dequantizes after; the rest one by one."""
    owner: dict[Node, Node] = {}
    for quantize in fp4_nodes(graph, "quantize"):
        members = {quantize, *quantize.users}
        made = (None, *quantize.users)  # a dequantize reads no tensor scale, or this quantize's outer scales
        members |= {u for g in quantize.users for u in g.users if u.target is fp4.dequantize.default and u.args[2] in made}
        amax = quantize.args[1]
        if isinstance(amax, Node) and amax.target is fp4.amax.default and members.issuperset(amax.users):
            members.add(amax)
        owner.update(dict.fromkeys(members, quantize))
    rest = (n for n in fp4_nodes(graph) if n not in owner and n.target._opname not in OPAQUE)  # type: ignore[union-attr]
    groups: dict[Node, list[Node]] = {n: [n] for n in rest}
    for node in graph.nodes:
        if node in owner:
            groups.setdefault(owner[node], []).append(node)
    return [Region(head, nodes) for head, nodes in groups.items()]


@dataclass(frozen=True)
class Region:
    """Nodes lowered together, in graph order. All inputs exist at the head: the quantize, or the one node there is."""

    head: Node
    nodes: list[Node]

    def sites(self) -> list[int]:
        """The draw sites of the random ops, in order."""
        drawing: list[Any] = [n for n in self.nodes if _draws(n)]
        return [n.args[SITE[n.target]] for n in drawing]

    def outputs(self) -> list[Node]:
        inside = set(self.nodes)
        return [n for n in self.nodes if n.target is not fp4.quantize.default and any(u not in inside for u in n.users)]

    def inputs(self) -> list[Node]:
        inside = set(self.nodes)
        return list(dict.fromkeys(a for n in self.nodes for a in n.all_input_nodes if a not in inside))

    def evaluate(self, env: dict[Node, Any], sites: Sequence[Any]) -> list[Any]:
        """Run the region on tensors: the oracle's functions in place of the ops. sites: one draw site a random op."""
        values: dict[Node, tuple[Any, Any]] = {}
        remaining = iter(sites)
        node: Any
        for node in self.nodes:
            args: list[Any] = [env[a] if isinstance(a, Node) else a for a in node.args]
            if _draws(node):
                args[SITE[node.target]] = next(remaining)
            if node.target is operator.getitem:
                env[node] = args[0][args[1]]
            elif node.target is fp4.amax.default:
                env[node] = reference.amax(*args)
            elif node.target is fp4.locate.default:
                env[node] = rng.locate(*args)
            elif node.target is fp4.rotate.default:
                env[node] = reference.rotate(args[0], Rotation.parse(args[1]), args[2], args[3])
            elif node.target is fp4.quantize.default:
                x, amax, text, seed, site = args
                q = Quantizer.parse(text)
                v, s, codes, scales, tensor_scale = reference.quantize_values(x, q, amax, seed, site)
                env[node] = layout.pack(codes) if q.packed else codes, scales, tensor_scale
                values[node] = v, s
            elif node.target is fp4.dequantize.default:
                env[node] = _dequantize(node, args, values)
            elif node.target is fp4.unrotate.default:
                env[node] = reference.unrotate(args[0], Rotation.parse(args[1]), *args[2:])
            elif node.target is fp4.clip_mask.default:
                env[node] = reference.clip_mask(args[0], args[1], Quantizer.parse(args[2]))
            elif node.target is fp4.apply_mask.default:
                env[node] = reference.apply_mask(*args)
            elif node.target is fp4.mm.default:
                env[node] = reference.mm(_row_major(args[0]), _row_major(args[1]), *args[2:])
            elif node.target._opname == "top_scale":
                env[node] = fp8.top_scale(*args)
            else:
                env[node] = getattr(layout, node.target._opname)(*args)
        return [env[n] for n in self.outputs()]

    def key(self) -> Any:
        """Equal for regions that compute the same on tensors of the same shapes."""
        number = {n: i for i, n in enumerate([*self.inputs(), *self.nodes])}

        def text(node: Node) -> tuple[Any, ...]:
            args: list[Any] = [("node", number[a]) if isinstance(a, Node) else a for a in node.args]
            if node.target in SITE:
                args[SITE[node.target]] = None
            return node.target, *map(str, args), _only_products(node)

        described = tuple(_description(n.meta["val"]) for n in self.inputs())
        return described, tuple(map(text, self.nodes)), tuple(number[n] for n in self.outputs())


def _draws(node: Node) -> bool:
    """Does the op draw, and so read its site? The seed comes right before the site."""
    return node.target in SITE and node.args[SITE[node.target] - 1] is not None


def _only_products(node: Node) -> bool:
    """A dequantize that only FP32 products of ours read may decode to FP32: the same values, no second conversion."""
    return node.target is fp4.dequantize.default and all(u.target is fp4.mm.default and node in u.args[:2] for u in node.users)


def _row_major(operand: Tensor) -> Tensor:
    """On a GPU the order of an FP32 product's additions follows the operands' strides, which Inductor would choose."""
    if operand.device.type != "cuda" or operand.dtype != torch.float32:
        return operand
    operand = operand.contiguous()
    return inductor_prims.force_stride_order(operand, operand.stride())


def _dequantize(node: Node, args: list[Any], values: dict[Node, tuple[Any, Any]]) -> Any:
    codes, scales, tensor_scale, text, columns, dtype = args
    q = Quantizer.parse(text)
    if codes.device.type == "cpu" and _only_products(node):
        dtype = torch.float32
    source = node.args[0]
    made: Any = source.args[0] if isinstance(source, Node) and source.target is operator.getitem else None
    if made in values:
        v, s = values[made]
        if tensor_scale is not None:
            return reference.dequantize_values(v, s, tensor_scale, q, columns, dtype)
        return reference.decode_values(v, s, q, columns, dtype)
    if tensor_scale is not None:
        return reference.dequantize(codes, scales, tensor_scale, q, columns, dtype)
    return reference.decode(codes, scales, q, columns, dtype)


def _description(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    return value
