"""Inductor's code calls our ops past the dispatcher (``fp4.kernels.direct``), where sizes are known and the code is Python.

The node is Inductor's own for an op that it has no code for; it differs in the name that the code calls.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import add_layout_constraint, constrain_to_fake_tensors, register_lowering
from torch._inductor.virtualized import V
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils._pytree import tree_leaves, tree_map

IMPORT = "from fp4.kernels.direct import direct as fp4_direct"


class DirectCall(ir.FallbackKernel):
    def codegen(self, wrapper: Any) -> None:
        if not V.graph.cpp_wrapper:
            op = self.op_overload._opname  # type: ignore[union-attr]
            self.python_kernel_name = f"fp4_{op}_{self.get_name()}"
            wrapper.add_import_once(IMPORT)
            wrapper.define_kernel(self.python_kernel_name, f"fp4_direct({op!r})", gpu=False)
            for output in self.outputs:  # which a kernel of ours lays out as its plan says
                output.skip_size_stride_alignment_checks = True
        super().codegen(wrapper)


@cache
def register() -> None:
    """Tell Inductor of the ops that ``fp4.kernels.direct`` calls."""
    from fp4.kernels.direct import BINDERS

    for name in BINDERS:
        op = getattr(torch.ops.fp4, name).default
        register_lowering(op, type_promotion_kind=None)(partial(_lower, op))
        add_layout_constraint(op, constrain_to_fake_tensors)


def _lower(op: Any, *args: Any, **kwargs: Any) -> Any:
    kind = DirectCall if _direct(V.graph.current_node) else ir.FallbackKernel
    made = kind.create(op, *args, **kwargs)
    return tree_map(lambda x: ir.TensorBox.create(x) if isinstance(x, ir.IRNode) else x, made)


def _direct(node: torch.fx.Node) -> bool:
    values = tree_leaves([n.meta.get("val") for n in (node, *node.all_input_nodes)])
    on_gpu = all(v.device.type == "cuda" for v in tree_leaves(node.meta["val"]))
    return on_gpu and not any(free_symbols(v) for v in values if v is not None)
