"""Policies: what they accept, refuse and decide, and what identifies them."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

import fp4
from fp4.compiler.policy import Decision, matches
from fp4.passes.recipes import describe

NVFP4: Any = fp4.NVFP4()
GEMM = fp4.GemmPrecision(NVFP4, NVFP4)
FULL = fp4.LinearPrecision(GEMM, GEMM, GEMM)
POLICY = fp4.Policy("test", FULL)


def site(name: str, index: int = 0, count: int = 1) -> fp4.LinearSite:
    return fp4.LinearSite(name, index, count, 64, 64, 64, "bfloat16", "Linear", ("fprop", "dgrad", "wgrad"))


def sites(*names: str) -> list[fp4.LinearSite]:
    return [site(name, i, len(names)) for i, name in enumerate(names)]


def kept(policy: fp4.Policy, *names: str) -> list[str]:
    decisions, _ = policy.assign(sites(*names))
    return [n for n, d in zip(names, decisions, strict=True) if not d.precision.quantized]


QUEST = fp4.MXFP4(scale_rule="quest")
api: Any = fp4  # untyped: what the type checker would refuse is tried here
# What is refused, and the words that say what to write instead.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "operand": (
        lambda: api.Operand("nvfp4"),
        r"Operand\(quantizer='nvfp4'\): write a quantizer such as fp4.NVFP4\(\), or None",
    ),
    "first": (lambda: api.GemmPrecision("nvfp4"), r"first='nvfp4': write an Operand, a quantizer"),
    "second": (lambda: api.GemmPrecision(NVFP4, 4), r"second=4: write an Operand"),
    "rotation": (lambda: api.GemmPrecision(NVFP4, NVFP4, rotation=16), r"rotation=16: write fp4.Rotation\(size=16"),
    "rotation alone": (
        lambda: api.GemmPrecision(rotation=fp4.Rotation()),
        "a rotation with no quantized operand only costs time",
    ),
    "output": (lambda: api.GemmPrecision(NVFP4, NVFP4, output="bf16"), r"output='bf16': write 'fp32' \(of wgrad\), or ''"),
    "output alone": (lambda: api.GemmPrecision(output="fp32"), "with no quantized operand: the GEMM is the model's own"),
    "output of fprop": (
        lambda: api.LinearPrecision(fprop=api.GemmPrecision(NVFP4, NVFP4, output="fp32")),
        "fprop output='fp32': what reads Y expects the dtype.*Write output='fp32' in wgrad",
    ),
    "output of dgrad": (
        lambda: api.LinearPrecision(dgrad=api.GemmPrecision(NVFP4, NVFP4, output="fp32")),
        "dgrad output='fp32': what reads dX",
    ),
    "ms-eden, no rotation": (lambda: api.GemmPrecision(api.NVFP4(rounding="ms_eden"), NVFP4), "signs='fresh'"),
    "ms-eden, fixed signs": (
        lambda: api.GemmPrecision(NVFP4, api.NVFP4(rounding="ms_eden"), api.Rotation(signs="fixed")),
        "unbiased over random rotations only",
    ),
    "ms-eden, E8M0": (lambda: api.MXFP4(rounding="ms_eden"), r"gains nothing.*NVFP4\(rounding='ms_eden'\)"),
    "4/6, stochastic": (lambda: api.NVFP4(four_six=True, rounding="stochastic"), "biased.*four_six=False"),
    "clipping, stochastic": (lambda: api.MXFP4(rounding="stochastic"), "not unbiased.*allow_clipping=True"),
    "gemm": (lambda: api.LinearPrecision(dgrad=NVFP4), "dgrad=.*write a GemmPrecision, or fp4.BF16"),
    "source": (lambda: api.Operand(NVFP4, source="backward"), "source='backward'.: write one of original, forward"),
    "clip mask of NVFP4": (lambda: api.Operand(NVFP4, clip_gradient=True), "an fp4.MXFP4 quantizer"),
    "forward copy, first": (lambda: api.GemmPrecision(api.Operand(NVFP4, "forward")), "It is for `second`"),
    "forward copy in fprop": (
        lambda: api.LinearPrecision(api.GemmPrecision(NVFP4, api.Operand(NVFP4, "forward"))),
        "fprop makes that copy; write source='original'",
    ),
    "forward copy of what stays BF16": (
        lambda: api.LinearPrecision(dgrad=api.GemmPrecision(NVFP4, api.Operand(NVFP4, "forward"))),
        "dgrad reads the forward copy of W, and fprop leaves W in high precision",
    ),
    "a rule that takes the forward copy away": (
        lambda: api.recipe("quartet2").with_rules(api.rule("a", fprop=api.BF16)).assign(sites("a")),
        r"a, rule\('a': fprop\): dgrad reads the forward copy of W",
    ),
    "clip mask of a rotated operand": (
        lambda: api.LinearPrecision(
            api.GemmPrecision(api.Operand(QUEST, clip_gradient=True), QUEST, api.Rotation(32)),
        ),
        "fprop rotates X and clips its gradient.*source='forward'",
    ),
    "clip mask in backward": (
        lambda: api.LinearPrecision(dgrad=api.GemmPrecision(NVFP4, api.Operand(QUEST, clip_gradient=True))),
        "dgrad: clip_gradient is said of fprop's operands",
    ),
    "gemms": (lambda: api.recipe("quartet2", gemms=("fprop", "agrad")), r"\['agrad'\] is no GEMM"),
    "gemms as text": (lambda: api.recipe("quartet2", gemms="fprop"), "is no GEMM"),
    "rest": (lambda: api.recipe("mxfp4_h16", rest="fp6"), "rest='fp6': write one of fp8, mxfp8, bf16"),
    "4/6 with ms-eden": (lambda: api.NVFP4(four_six=True, rounding="ms_eden"), "four_six needs rounding='nearest'"),
    "outer scale with ms-eden": (lambda: api.NVFP4(outer=128, rounding="ms_eden"), "outer"),
    "keep nothing": (lambda: api.keep(), r"fp4.keep takes globs on parameter names.*got \(\)"),
    "keep a number": (lambda: api.keep(3), "fp4.keep takes globs"),
    "keep an empty name": (lambda: api.keep(""), "fp4.keep takes globs"),
    "keep_last 15": (lambda: api.keep_last(15), r"fp4.keep_last\(15\): write a fraction of the linears from 0 to 1"),
    "keep_last True": (lambda: api.keep_last(True), "write a fraction"),
    "keep_last -1": (lambda: api.keep_last(-0.1), "write a fraction"),
    "keep_last nan": (lambda: api.keep_last(float("nan")), "write a fraction"),
    "rule without change": (
        lambda: api.rule("*.down_proj"),
        "changes nothing: give fprop=, dgrad= or wgrad=, e.g. wgrad=fp4.BF16",
    ),
    "rule, quantizer": (lambda: api.rule("*", wgrad=NVFP4), "wgrad=.*write a GemmPrecision or fp4.BF16"),
    "with_rules": (lambda: api.recipe("nvfp4").with_rules("lm_head"), r"with_rules takes fp4.keep\(...\).*got 'lm_head'"),
    "policy": (lambda: api.policy(3), "decorates a function from fp4.LinearSite to fp4.LinearPrecision; got 3"),
    "recipe": (lambda: api.recipe("nvfp5"), "there is no recipe 'nvfp5'; the recipes: .*nvfp4"),
    "recipe flag": (lambda: api.recipe("nvfp4", tail=1), "recipe nvfp4 has no flag tail; its flags: high_precision_tail"),
    "function's result": (
        lambda: api.policy(lambda s: GEMM).assign(sites("a")),
        "returned .* for a; return an fp4.LinearPrecision",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_way_out(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises((fp4.PolicyError, fp4.SpecError), match=f"(?s){message}"):
        call()


def test_a_result_in_fp32_is_another_policy_that_says_so() -> None:
    wide = fp4.recipe("nvfp4", wgrad_output="fp32")
    assert wide.precision.wgrad.output == "fp32"
    assert str(wide.precision.wgrad).endswith(", result in FP32")
    assert wide.digest() != fp4.recipe("nvfp4").digest()
    assert {g.output for name in fp4.recipes() for g in fp4.recipe(name).precision.gemms().values()} == {""}


def test_a_quantizer_stands_for_an_operand() -> None:
    assert fp4.GemmPrecision(fp4.Operand(NVFP4), fp4.Operand(NVFP4)) == GEMM
    assert fp4.GemmPrecision(None, NVFP4).first == fp4.Operand()
    assert not fp4.BF16.quantized
    assert not fp4.LinearPrecision().quantized


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("model.lm_head", "lm_head", False),  # anchored
        ("lm_head.0", "lm_head", False),
        ("model.layers.0.mlp.down_proj", "*.down_proj", True),  # * spans dots
        ("model.layers.0.mlp.down_proj", "*.down_proj.weight", True),  # the parameter's full name
        ("down_proj", "*.down_proj", False),
        ("model.layers.10.mlp", "model.layers.1.*", False),
        ("model.layers.1.mlp", "model.layers.[01].*", True),
        ("LM_HEAD", "lm_head", False),
    ],
)
def test_globs_are_anchored(name: str, pattern: str, expected: bool) -> None:
    assert matches(name, pattern) is expected


def test_keep_leaves_all_three_products() -> None:
    (a, b), _ = POLICY.with_rules(fp4.keep("a")).assign(sites("a", "b"))
    assert a == Decision(fp4.LinearPrecision(), "keep('a')")
    assert b == Decision(FULL)


@pytest.mark.parametrize(("fraction", "count"), [(0.0, 0), (0.01, 1), (0.15, 2), (0.2, 2), (0.21, 3), (1.0, 10)])
def test_keep_last_rounds_up(fraction: float, count: int) -> None:
    names = [f"l{i}" for i in range(10)]
    assert kept(POLICY.with_rules(fp4.keep_last(fraction)), *names) == names[10 - count :]


def test_keep_last_counts_what_is_still_quantized() -> None:
    """The head is kept already; the last 50 % of the other four are two."""
    names = ("a", "b", "c", "d", "head")
    assert kept(POLICY.with_rules(fp4.keep("head"), fp4.keep_last(0.5)), *names) == ["c", "d", "head"]
    # in the other order: ceil(0.5 * 5) = 3 with the head among them
    assert kept(POLICY.with_rules(fp4.keep_last(0.5), fp4.keep("head")), *names) == ["c", "d", "head"]
    assert kept(POLICY.with_rules(fp4.keep_last(0.5), fp4.keep("a")), *names) == ["a", "c", "d", "head"]


def test_a_rule_changes_the_named_products_only() -> None:
    (d,), _ = POLICY.with_rules(fp4.rule("*", wgrad=fp4.BF16)).assign(sites("a"))
    assert d.precision == fp4.LinearPrecision(GEMM, GEMM, fp4.BF16)


def test_later_rules_win() -> None:
    back = fp4.rule("a", fprop=GEMM)
    (d,), _ = POLICY.with_rules(fp4.keep("*"), back).assign(sites("a"))
    assert d.precision == fp4.LinearPrecision(fprop=GEMM)
    (d,), _ = POLICY.with_rules(back, fp4.keep("*")).assign(sites("a"))
    assert d.precision == fp4.LinearPrecision()


def test_a_rule_that_matches_nothing_is_named() -> None:
    policy = POLICY.with_rules(fp4.keep("lm_head"), fp4.rule("*.donw_proj", wgrad=fp4.BF16), fp4.keep("x", optional=True))
    _, warnings = policy.assign(sites("a", "b", "c", "d", "e"))
    assert len(warnings) == 2
    assert warnings[0] == "keep('lm_head') matches no linear of this graph; its linears: a, b, c, d, ..."
    assert "rule('*.donw_proj': wgrad)" in warnings[1]


def test_recipes_do_not_warn_of_their_own_rules() -> None:
    assert fp4.recipe("nvfp4").assign(sites("a"))[1] == []


def test_a_function_decides_and_rules_follow() -> None:
    @fp4.policy
    def mine(s: fp4.LinearSite) -> fp4.LinearPrecision:
        return FULL if s.index % 2 else fp4.LinearPrecision()

    assert mine.name == "mine"
    assert kept(mine, "a", "b", "c", "d") == ["a", "c"]
    assert kept(mine.with_rules(fp4.keep("d")), "a", "b", "c", "d") == ["a", "c", "d"]
    assert mine.assign(sites("a"))[0][0].reason == "the policy mine leaves it"


DIFFERENT = (
    POLICY,
    fp4.Policy("other", FULL),
    fp4.Policy("test", fp4.LinearPrecision(GEMM, GEMM)),
    fp4.Policy("test", fp4.LinearPrecision(GEMM, fp4.BF16, GEMM)),
    POLICY.with_rules(fp4.keep("a")),
    POLICY.with_rules(fp4.keep("b")),
    POLICY.with_rules(fp4.keep("a"), fp4.keep("b")),
    POLICY.with_rules(fp4.keep("b"), fp4.keep("a")),
    POLICY.with_rules(fp4.keep_last(0.1)),
    POLICY.with_rules(fp4.keep_last(0.2)),
    fp4.recipe("nvfp4"),
    fp4.recipe("nvfp4", range_guard=True),
    fp4.recipe("nvfp4", wgrad_rotation=None),
    fp4.recipe("nvfp4", wgrad_rotation=fp4.Rotation(16, signs="none")),
)


def test_equality_hash_and_digest_tell_policies_apart() -> None:
    assert len(set(DIFFERENT)) == len(DIFFERENT)
    assert len({p.digest() for p in DIFFERENT}) == len(DIFFERENT)


@pytest.mark.parametrize("policy", DIFFERENT)
def test_pickle_gives_an_equal_policy(policy: fp4.Policy) -> None:
    again = pickle.loads(pickle.dumps(policy))
    assert again == policy
    assert again is not policy
    assert (hash(again), again.digest()) == (hash(policy), policy.digest())


@pytest.mark.parametrize("name", fp4.recipes())
def test_every_recipe_is_a_value(name: str) -> None:
    """Equal, hashable, pickled, and described: its text has a citation, its six operands and the difference to the code."""
    policy = fp4.recipe(name)
    assert pickle.loads(pickle.dumps(policy)) == policy == fp4.recipe(name)
    assert hash(policy) == hash(fp4.recipe(name))
    about = describe(name)
    assert about.policy == policy
    if name != "bf16":
        assert re.search(r"\d{4}\.\d{5}", about.text)
        assert all(gemm in about.text for gemm in ("fprop", "dgrad", "wgrad"))
        assert policy.precision.quantized


def test_every_flag_is_a_field() -> None:
    """Each flag with another value gives another policy: none is ignored."""
    other: dict[str, Any] = {
        "high_precision_tail": 0.5, "keep_heads": False, "weight_block": (16, 16), "gradient_rounding": "nearest",
        "range_guard": True, "four_six": False, "wgrad_rotation": None, "gemms": ("wgrad",), "rotation_size": 32,
        "requantize": False, "forward_rotation": False, "clip_gradient": False, "rest": "mxfp8", "rotate": False, "size": 32,
        "signs": "fresh", "scale_rule": "floor", "scale": "e3m4", "block": 32, "tensor_scale": False, "stochastic": (),
        "forward": "fp8", "prescale": 0.5, "outer": 0, "gradient_format": "e5m2", "posthoc": True, "wgrad_output": "fp32",
    }  # fmt: skip
    special: dict[tuple[str, str], dict[str, Any]] = {
        ("nvfp4", "four_six"): {"four_six": True},
        ("nvfp4", "weight_block"): {"weight_block": (1, 16)},
        ("fp8", "weight_block"): {"weight_block": (1, 128)},
        ("quartet", "gradient_rounding"): {"gradient_rounding": "stochastic"},
        ("mxfp4_h16", "gradient_rounding"): {"gradient_rounding": "stochastic"},
        ("mxfp4_h16", "rotate"): {"rotate": "wgrad"},
        ("mxfp4_h16", "rest"): {"rest": "mxfp8", "gemms": ("fprop",)},
        ("quartet2", "gemms"): {"gemms": ("fprop",)},
    }
    for name in fp4.recipes():
        for flag in describe(name).flags:
            flags = special.get((name, flag), {flag: other[flag]})
            base = {k: v for k, v in flags.items() if k != flag}
            assert fp4.recipe(name, **flags) != fp4.recipe(name, **base), (name, flag)


def test_equal_recipes_are_equal() -> None:
    assert fp4.recipe("nvfp4") == fp4.recipe("nvfp4")
    assert fp4.recipe("nvfp4").digest() == fp4.recipe("nvfp4").digest()


LIMIT = 3
TABLE: Any = {"a": 1}


@fp4.policy
def reads_a_constant(s: fp4.LinearSite) -> fp4.LinearPrecision:
    return FULL if s.index < LIMIT else fp4.LinearPrecision()


def _helper(s: fp4.LinearSite) -> bool:
    return s.index < LIMIT


@fp4.policy
def calls_a_function(s: fp4.LinearSite) -> fp4.LinearPrecision:
    return FULL if _helper(s) else fp4.LinearPrecision()


@fp4.policy
def reads_a_dict(s: fp4.LinearSite) -> fp4.LinearPrecision:
    return FULL if s.name in TABLE else fp4.LinearPrecision()


@fp4.policy
def has_a_default(s: fp4.LinearSite, limit: int = 3) -> fp4.LinearPrecision:
    return FULL if s.index < limit else fp4.LinearPrecision()


@pytest.mark.parametrize("policy", [reads_a_constant, calls_a_function], ids=lambda p: p.name)
def test_a_function_s_digest_follows_what_it_reads(policy: fp4.Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    first = policy.digest()
    assert first is not None
    assert policy.digest() == first
    monkeypatch.setitem(globals(), "LIMIT", 4)
    assert policy.digest() not in (None, first)


def test_a_closure_s_digest_follows_its_cell() -> None:
    def make(limit: Any) -> fp4.Policy:
        @fp4.policy
        def closed(s: fp4.LinearSite) -> fp4.LinearPrecision:
            return FULL if s.index < limit else fp4.LinearPrecision()

        return closed

    assert make(1).digest() == make(1).digest()
    assert make(1).digest() != make(2).digest()
    assert None not in (make(1).digest(), make(2).digest())
    # A list can change after the digest is taken: no digest, no cache.
    assert make([1]).digest() is None


def test_a_default_argument_is_part_of_the_digest() -> None:
    def other(s: fp4.LinearSite, limit: int = 4) -> fp4.LinearPrecision:
        return FULL if s.index < limit else fp4.LinearPrecision()

    assert has_a_default.digest() is not None
    assert has_a_default.digest() != fp4.policy(other).digest()


def test_what_cannot_be_hashed_has_no_digest() -> None:
    assert reads_a_dict.digest() is None
    namespace: dict[str, Any] = {"FULL": FULL}
    exec("def typed_in(site):\n    return FULL", namespace)  # no source to read
    assert fp4.policy(namespace["typed_in"]).digest() is None

    class Chooser:
        def __call__(self, s: fp4.LinearSite) -> fp4.LinearPrecision:
            return FULL

    assert fp4.policy(Chooser()).digest() is None


def test_depth_is_the_dots_in_the_name() -> None:
    assert [site(n).depth for n in ("a", "a.b", "model.layers.0.mlp")] == [0, 1, 3]
