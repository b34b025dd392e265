"""The backend of ``torch.compile(model, backend="fp4")``: options, then Inductor with our passes in it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch._inductor
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.fx import Graph, GraphModule

from fp4.compiler.joint_pass import JointPass, LowerPass
from fp4.compiler.lowering import LoweringOptions
from fp4.compiler.pipeline import Observer
from fp4.compiler.policy import Policy
from fp4.compiler.report import REGISTRY, GemmReport, GraphReport, LinearReport, Report
from fp4.compiler.shards import Shard, group_shard, placed
from fp4.compiler.sites import Input
from fp4.compiler.supported import check_devices, check_torch
from fp4.compiler.watch import compiled_module, watched
from fp4.passes.recipes import DEFAULT, recipe
from fp4.runtime import counters
from fp4.runtime.files import write_whole

log = logging.getLogger("fp4.report")
SMALLEST_BUDGET = 1e-9


class OptionError(ValueError):
    """An option of the backend that is unknown or of the wrong type; the message lists what can be written."""


@dataclass(frozen=True)
class Options:
    """``torch.compile(model, backend="fp4", options={...})``.

    recipe: name of a published recipe (``fp4.recipes()``). policy: an ``fp4.Policy`` in place of a recipe.
    phase: a named phase of that recipe or policy (``fp4.switch`` changes it in the middle of a run).
    strict: raise when the policy asked for more than could be done.
    save_weights: keep the weights' codes between forward and backward, in place of quantizing the weights again in
        backward. Costs 0.56 bytes a parameter and saves a read of the weights.
    kernels: on a GPU, quantize by the generated Triton kernels; False: by the oracle, compiled by Inductor. Same bits.
    target: a GPU architecture, e.g. "sm_100a": lower as for it, whatever the device, to look at the graphs without the
        hardware. Its kernels' results are computed by the oracle then.
    library: on a GPU with block-scaled tensor cores, multiply by ``torch.nn.functional.scaled_mm`` (cuBLAS) in place of the
        generated matmul, where it has the formats.
    exact: False: on a GPU with FP8 tensor cores and no FP4 ones (sm_89, sm_90), multiply MXFP4 operands in FP8, at twice the
        speed of BF16. Operands are the same but for elements more than 2^14 (second operand) or 2^28 below the tensor's
        largest block, which the report counts; partial sums are those of FP8 tensor cores. On sm_90 with CUDA 12.9, E4M3
        operands with FP32 scales of 1x128 or 128x128 are multiplied as they are, by cuBLAS.
    native_draws: on a GPU of sm_100a or sm_103a, round stochastically by its own instruction, eight bits a draw and up 1/512 of
        a step too rarely (runtime/native.py); experts' operands are drawn for as without it. OptionError on any other.
    autotune: kernels have the fastest of their tiles, measured once a GPU and class of shapes (kernels/autotune.py); those of
        the whole process from here on, as with FP4_AUTOTUNE=1. Same bits.
    mode: a ``torch.compile`` mode, such as "max-autotune". inductor: Inductor settings by name.
    batch_group: the ranks that divide one batch among them, in rank order: a ProcessGroup, a DeviceMesh of one dimension, or
        "world". The amax of activations and gradients is then the whole batch's, and an element draws as on one device. Without
        it each rank quantizes its own batch, by draws of its own.
    tensor_group: the ranks that compute the same tensors, so must draw alike, where the graph's inputs don't say so: DTensor
        parameters do.
    observer: called as observer(stage, graph) between the passes; switches the compile caches off.
    """

    recipe: str | None = None
    policy: Policy | None = None
    phase: str | None = None
    strict: bool = False
    save_weights: bool = False
    kernels: bool = True
    target: str | None = None
    library: bool = False
    exact: bool = True
    native_draws: bool = False
    autotune: bool = False
    mode: str | None = None
    inductor: Mapping[str, Any] = field(default_factory=dict)
    batch_group: Any = None
    tensor_group: Any = None
    observer: Observer | None = None

    @staticmethod
    def read(options: Mapping[str, Any] | None, mode: str | None) -> Options:
        options = dict(options or {})
        known = list(Options.__dataclass_fields__)
        if unknown := sorted(set(options) - set(known)):
            hint = ""
            settings = torch._inductor.config.get_config_copy()
            if inner := [k for k in unknown if k.partition(".")[0] in settings or k in _inductor_names()]:
                hint = f"\n{inner[0]!r} is a setting of Inductor: write options={{'inductor': {{{inner[0]!r}: ...}}}}"
            names = ", ".join(map(repr, unknown))
            raise OptionError(f"backend fp4 has no option {names}; its options: {', '.join(known)}{hint}")
        if mode is not None:
            options["mode"] = mode
        read = Options(**options)
        read._check()
        return read

    def _check(self) -> None:
        if self.policy is not None and not isinstance(self.policy, Policy):
            raise OptionError(
                f"policy={self.policy!r} is a {type(self.policy).__name__}; write an fp4.Policy: "
                "fp4.recipe('nvfp4').with_rules(...), or a function decorated with @fp4.policy"
            )
        if self.policy is not None and self.recipe is not None:
            raise OptionError("give recipe= or policy=, not both: fp4.recipe(NAME) is a policy that rules can be added to")
        for name in ("strict", "save_weights", "kernels", "library", "exact", "native_draws", "autotune"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name}={getattr(self, name)!r}; write True or False")
        if not isinstance(self.inductor, Mapping):
            raise OptionError(f"inductor={self.inductor!r}; write a dict of Inductor settings")
        if unknown := sorted(set(self.inductor) - _inductor_names()):
            names = ", ".join(map(repr, unknown))
            raise OptionError(f"Inductor has no setting {names}; torch._inductor.list_options() lists them")
        for name in ("batch_group", "tensor_group"):
            self._shard(name)
        if self.target is not None:
            self._check_target()
        modes = torch._inductor.list_mode_options()
        if self.mode is not None and self.mode not in modes:
            raise OptionError(f"mode={self.mode!r}; write one of {', '.join(modes)}")

    def _check_target(self) -> None:
        from fp4.kernels.target import TARGETS

        if self.target not in TARGETS or not self.kernels:
            raise OptionError(
                f"target={self.target!r}, kernels={self.kernels}; write one of {', '.join(TARGETS)}, kernels=True"
            )

    def check_draws(self, inputs: Sequence[Any]) -> None:
        """Raise OptionError where native_draws is asked for and the target, or a device of a graph's inputs, has none."""
        from fp4.kernels.target import Target, TargetError, target_of

        if not self.native_draws:
            return
        devices = {x.device for x in inputs if isinstance(x, torch.Tensor)}
        try:
            targets = [Target(self.target)] if self.target is not None else [target_of(d) for d in devices]
            lacking = [t.name for t in targets if not t.draws_e2m1]
        except TargetError as error:
            lacking = [str(error)]
        if lacking or not self.kernels:
            raise OptionError(
                f"native_draws=True, kernels={self.kernels}, and the GPU's own stochastic rounding is in generated kernels for "
                f"sm_100a and sm_103a{''.join(f'; this is {x}' for x in lacking)}. Leave native_draws out"
            )

    def _shard(self, name: str) -> Shard | None:
        """This rank's part of what a group divides; None without one, or where it is a group of one rank."""
        try:
            return None if getattr(self, name) is None else group_shard(getattr(self, name))
        except (TypeError, ValueError) as error:
            raise OptionError(f"{name}: {error}") from error

    @property
    def lowering(self) -> LoweringOptions:
        return LoweringOptions(**{f.name: getattr(self, f.name) for f in fields(LoweringOptions)})

    def resolved(self) -> Policy:
        policy = self.policy if self.policy is not None else recipe(self.recipe or DEFAULT)
        return policy if self.phase is None else policy.phase(self.phase)


def _exact_settings() -> dict[str, bool]:
    """A quantizer must see the BF16 value the model computes, not the FP32 one Inductor keeps in a register; and a scale
    must be divided, not approximately divided as Triton does unasked."""
    wanted = {"emulate_precision_casts": True, "eager_numerics.division_rounding": True}
    return {name: value for name, value in wanted.items() if name in _inductor_names()}


def _inductor_names() -> set[str]:
    return set(torch._inductor.list_options())


def fp4(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph captured by Dynamo with the precision its policy says. Called by torch.compile.

    gm, example_inputs: as torch.compile passes them. Raises OptionError for options that cannot be right, UnsupportedError for
    a device or a version of PyTorch.
    """
    check_torch()
    # A graph from the compile cache calls the kernels' ops, and no pass has run that would have registered them.
    from fp4.compiler import direct_calls
    from fp4.kernels import autotune

    direct_calls.register()

    read = Options.read(options, mode)
    policy = read.resolved()
    check_devices(example_inputs)
    if not read.exact:  # the counts' memory, before any CUDA graph is captured
        for device in {x.device for x in example_inputs if isinstance(x, torch.Tensor) and x.device.type == "cuda"}:
            counters.reserve(device)
    read.check_draws(example_inputs)
    if read.autotune:
        autotune.switch_on()
    model = compiled_module()
    inputs = dynamo_inputs(gm, model)
    live = {i: t for i, n in enumerate(gm.graph.find_nodes(op="placeholder")) if (t := _live_tensor(n)) is not None}
    parameters = list(live.values())
    received: list[GraphReport] = []

    def done(report: GraphReport) -> None:
        received.append(report)
        _publish(report, parameters)

    batch, tensor = read._shard("batch_group"), read._shard("tensor_group")
    joint = JointPass(
        policy,
        inputs,
        read.save_weights,
        read.strict,
        done,
        read.observer,
        batch,
        tensor.group if tensor else "",
        read.lowering,
    )
    key = _report_key(joint, gm, example_inputs)
    compiled = compile_with(read, joint, gm, example_inputs)
    if received:
        _store(key, received)
    else:  # the compile cache had the graph: the passes did not run
        for report in _load(key):
            _publish(report, parameters)
    return watched(compiled, list(live), model if read.strict and quantizes(policy) else None)


def compile_with(read: Options, joint: JointPass, gm: GraphModule, example_inputs: Sequence[Any], **how: Any) -> Any:
    """Inductor's ``compile_fx`` with the joint pass and the lowering in it. how: more of its arguments, e.g. inner_compile."""
    patches: dict[str, Any] = {
        **(_exact_settings() if quantizes(joint.policy) else {}),
        **torch._inductor.list_mode_options(read.mode or "default"),
        **read.inductor,
        # mode "lite" switches passes off, ours with them: the model would silently stay in BF16.
        "use_joint_graph_passes": True,
        "use_post_grad_passes": True,
    }
    patches["joint_custom_pre_pass"] = Chain.of(patches, "joint_custom_pre_pass", joint)
    patches["post_grad_custom_pre_pass"] = Chain.of(patches, "post_grad_custom_pre_pass", LowerPass(joint.lowering))
    # At budget 0 the partitioner saves graph inputs alone, and backward would draw another seed than forward did.
    budget = torch._functorch.config.activation_memory_budget or SMALLEST_BUDGET
    with torch._functorch.config.patch(activation_memory_budget=budget):
        return compile_fx(gm, example_inputs, config_patches=patches, **how)


def reset() -> None:
    """Called by torch._dynamo.reset()."""
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()


fp4.reset = reset  # type: ignore[attr-defined]


def quantizes(policy: Policy) -> bool:
    """Can the policy quantize anything?"""
    changed = [g for r in policy.rules for g in (r.fprop, r.dgrad, r.wgrad) if g is not None]
    return policy.decide is not None or policy.precision.quantized or any(g.quantized for g in changed)


def dynamo_inputs(gm: GraphModule, model: torch.nn.Module | None = None) -> dict[int, Input]:
    """Position of each graph input -> its name in the model: the joint graph no longer knows names.

    model: the compiled one. Behind a graph break Dynamo's names are of a part of it.
    """
    whole = {id(p): n for n, p in model.named_parameters(remove_duplicate=False)} if model is not None else {}
    names = gm.meta.get("dynamo_flat_name_to_original_fqn", {})
    found: dict[int, Input] = {}
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        argument = node.meta.get("grapharg")
        source = getattr(argument, "source", None)
        parameter = _live_tensor(node)
        name = next((fqn for flat, fqn in names.items() if flat.lower() == node.name.lower()), None)
        if name is None and source is not None:
            name = _fqn(source.name if isinstance(source.name, str) else source.name())
        trained = parameter is None or parameter.requires_grad
        name = name or node.name
        full = whole.get(id(parameter), name)
        prefix = full.removesuffix(name) if full.endswith(f".{name}") else ""
        shards, groups = placed(node.meta.get("example_value"))
        found[i] = Input(prefix + name, parameter is not None, shards, groups, trained, prefix)
    return found


def _fqn(source: str) -> str:
    """``L['self']._modules['a']._parameters['weight']`` -> ``a.weight``."""
    import re

    parts = re.findall(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", source)
    return ".".join(parts) if parts else source


def _live_tensor(node: Any) -> torch.Tensor | None:
    argument = node.meta.get("grapharg")
    try:
        value = argument.example if argument is not None else None
    except AssertionError:  # Dynamo has let go of it
        return None
    return value if isinstance(value, torch.nn.Parameter) else None


@dataclass(frozen=True, eq=False)
class Chain(CustomGraphPass):
    """The user's own pass, then ours. One object, since older Inductors take no list."""

    passes: tuple[Callable[[Graph], None], ...]

    @staticmethod
    def of(patches: Mapping[str, Any], hook: str, ours: CustomGraphPass) -> CustomGraphPass:
        theirs = patches.get(hook, getattr(torch._inductor.config, hook))
        if theirs is None:
            return ours
        return Chain((*theirs, ours) if isinstance(theirs, list | tuple) else (theirs, ours))

    def __call__(self, graph: Graph) -> None:
        for p in self.passes:
            p(graph)

    def uuid(self) -> Any | None:
        ids = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes]
        return None if None in ids else repr(ids)


def _publish(report: GraphReport, parameters: Sequence[torch.Tensor]) -> None:
    REGISTRY.add(report, parameters)
    for warning in report.warnings:
        log.warning("%s", warning)
    if log.isEnabledFor(logging.INFO):
        log.info("\n%s", Report([report]))


def _report_key(joint: JointPass, gm: GraphModule, example_inputs: Sequence[Any]) -> str | None:
    uuid = joint.uuid()
    if uuid is None:
        return None
    shapes = [(tuple(map(str, x.shape)), str(x.dtype)) if isinstance(x, torch.Tensor) else str(x) for x in example_inputs]
    grad = torch.is_grad_enabled()
    # Code alone: the compile cache does not look at files and lines, which a readable print has.
    code = "\n".join(m.code for m in gm.modules() if isinstance(m, GraphModule))
    return hashlib.sha256(f"{uuid}\n{code}\n{shapes}\n{grad}".encode()).hexdigest()


def _store(key: str | None, reports: Sequence[GraphReport]) -> None:
    if key is None:
        return
    path = Path(cache_dir()) / "fp4" / f"{key}.json"
    write_whole(path, json.dumps([asdict(r) for r in reports]))


def _load(key: str | None) -> list[GraphReport]:
    path = Path(cache_dir()) / "fp4" / f"{key}.json"
    if key is None or not path.exists():
        return []
    reports = []
    for raw in json.loads(path.read_text()):
        linears = [LinearReport(**{**x, "gemms": [GemmReport(**g) for g in x["gemms"]]}) for x in raw.pop("linears")]
        reports.append(GraphReport(**{**raw, "linears": linears, "from_cache": True}))
    return reports
