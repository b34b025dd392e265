"""What Inductor generates for a CUDA GPU, here, where there is none: its code is text, and asks the GPU for a few properties.

The partitioned graphs of a model captured on a CPU (tests/graphs.py) are moved to fake CUDA tensors, lowered as for an H200,
and taken through Inductor to the wrapper's code. Nothing is compiled or run. The stand-ins are for the pinned PyTorch.
"""

from __future__ import annotations

import contextlib
import copy
import re
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.utils._pytree import tree_map

from fp4.compiler import direct_calls
from fp4.compiler.backend import _exact_settings
from fp4.compiler.joint_pass import LowerPass
from fp4.compiler.lowering import LoweringOptions

H200 = types.SimpleNamespace(
    type="cuda", index=0, name="H200", major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32, total_memory=1 << 37, gcnArchName="",
    shared_memory_per_block_optin=232448,
)  # fmt: skip
CALL = re.compile(r"(triton_\w+)\.run\(|extern_kernels\.(\w+)\(|torch\.ops\.(\w+\.\w+)\.\w+\(|fp4_(\w+)_buf\d+\(")


class _Driver:
    """Triton's driver, as far as code generation asks it."""

    utils = types.SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 232448, "multiprocessor_count": 132})

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)


@contextlib.contextmanager
def as_if_on_h200() -> Iterator[None]:
    """Inside, PyTorch and Triton say that there is an H200."""
    from triton.runtime import driver

    stand_ins: dict[str, Any] = {
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.get_device_properties": lambda *given: H200,
        "torch.cuda.get_device_capability": lambda *given: (9, 0),
        "torch.cuda.is_bf16_supported": lambda *given, **named: True,
        "torch.cuda._lazy_init": lambda: None,
        "torch._inductor.scheduler.has_triton": lambda: True,
        "torch.version.cuda": "13.0",
        "torch.Tensor.contiguous": _contiguous,  # a build without CUDA refuses its own, and copies
        "torch.Tensor.copy_": lambda tensor, *given: tensor,
        "fp4.runtime.cublas.available": lambda device: True,
    }
    with contextlib.ExitStack() as stack:
        for name, value in stand_ins.items():
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(mock.patch("torch.cuda._get_device_properties", return_value=H200, create=True))
        stack.enter_context(mock.patch.object(driver, "_active", _Driver()))
        yield


def on_cuda(graph: Graph) -> GraphModule:
    """A copy whose tensors are fake CUDA tensors."""
    copied = GraphModule(graph.owning_module or torch.nn.Module(), copy.deepcopy(graph))
    mode, device = FakeTensorMode(), torch.device("cuda", 0)

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            with mode:
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return device if isinstance(value, torch.device) else value

    for node in copied.graph.nodes:
        node.args, node.kwargs = tree_map(moved, node.args), tree_map(moved, dict(node.kwargs))
        if "val" in node.meta:
            node.meta["val"] = tree_map(moved, node.meta["val"])
    copied.recompile()
    return copied


def wrapper_code(graph: Graph, **options: Any) -> str:
    """The code of the module that launches the graph's kernels. options: the backend's that lower it."""
    from torch._inductor import compile_fx, config
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    direct_calls.register()
    lower = LowerPass(LoweringOptions(**options))
    with as_if_on_h200(), config.patch({"post_grad_custom_pre_pass": lower, **_exact_settings()}):
        moved = on_cuda(graph)
        inputs = [n.meta["val"] for n in moved.graph.find_nodes(op="placeholder")]
        mode = next(v.fake_mode for v in inputs if isinstance(v, torch._subclasses.FakeTensor))
        with V.set_fake_mode(mode):
            view_to_reshape(moved)
            compile_fx._recursive_post_grad_passes(moved, is_inference=False)
            moved.graph.output_node().meta["user_visible_output_idxs"] = []  # whose strides Inductor would keep
            lowering = GraphLowering(moved, example_inputs=inputs)
            with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
                lowering.run(*inputs)
                code = lowering.codegen()[0]
        return str(getattr(code, "value", code))


def launches(graph: Graph, **options: Any) -> list[str]:
    """What the wrapper calls, in order: Inductor's Triton kernels, library kernels, and ops, ours among them."""
    code = wrapper_code(graph, **options)
    body = code[code.index("def call(") :]
    return [f"fp4.{ours}" if ours else next(filter(None, others)) for *others, ours in CALL.findall(body)]
