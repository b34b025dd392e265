"""Scale rules and the rounding of elements, as lines of a kernel: one method a rule, the formulas of runtime/reference.py."""

from __future__ import annotations

from fp4.kernels.quotients import Quotients
from fp4.kernels.writer import INF_BITS, f32
from fp4.runtime.formats import E4M3_HEADROOM_MAX, E4M3_MAX, FLT_MAX, QUEST_SIGMA, SCALE_FORMATS
from fp4.runtime.reference import MX_CARRY, TOP_EXPONENT
from fp4.runtime.rng import STREAM_SCALE
from fp4.runtime.rounding import ELEMENT_MAX
from fp4.runtime.spec import FP8, MXFP4, MXFP8, NVFP4


class ScaleRules(Quotients):
    """From a tile `x` and `block_max` of its blocks: `s` and `scale_code` of each block, `value` and `code` of each element."""

    # -- elements

    def elements(self, scaled: str) -> None:
        """`value` (magnitude) and `code` of each element, of an expression for the scaled tile."""
        q = self.spec.quantizer
        assert q is not None
        if q.element_dtype != "e2m1":
            self.add(f"value, code = {self.round_exmy(f'tl.abs({scaled})', q.element_dtype)}")
            self.add("code = code | (bits(x) >> 24) & 0x80")
            return
        if self.native:
            self.native_codes(scaled)
            if self.spec.output == "decoded":
                self.native_values()
            return
        if q.rounding == "stochastic":
            self.draws()
            # Down the columns sm_100a's assembler would give a thread a stack for the shorter one.
            select = self.interpreted or (not self.by_rows and self.target.rounds_e2m1)
            rounding = self.call("round_e2m1_stochastic" if select else "round_e2m1_stochastic_fma")
            self.add(f"value, code = {rounding}(tl.abs({scaled}), draw)")
        else:
            self.nearest(f"tl.abs({scaled})")

    def nearest(self, magnitudes: str, suffix: str = "") -> None:
        """`value`, and `code` where words are made of codes, of magnitudes rounded to E2M1."""
        if self.of_codes:
            self.add(f"value{suffix}, code{suffix} = {self.call('round_e2m1')}({magnitudes})")
        else:
            self.add(f"value{suffix} = {self.call('nearest_e2m1')}({magnitudes})")

    @property
    def of_codes(self) -> bool:
        """Are words made of `code`, for lack of a conversion?"""
        return self.spec.output == "packed" and not self.packs_values

    def round_exmy(self, value: str, name: str, word: str | None = None) -> str:
        """The call that rounds magnitudes to a format."""
        _, mantissa, bias, top = SCALE_FORMATS[name]
        if name == "e8m0":
            return f"{self.call('round_e8m0')}({value}, {f32(top)})"
        if name == "e4m3" and word is None and self.converts_e4m3:
            return f"{self.call('round_e4m3')}({value})"
        if word is None:
            return f"{self.call('round_exmy')}({value}, {mantissa}, {bias}, {f32(top)})"
        return f"{self.call('round_exmy_stochastic')}({value}, {word}, {mantissa}, {bias}, {f32(top)})"

    # -- scale rules: `s` and `scale_code` of each block, `value` and `code` of each element

    def nvfp4(self, q: NVFP4) -> None:
        if q.rounding == "ms_eden":
            self.ms_eden(q)
        elif q.four_six:
            self.four_six(q)
        else:
            self.nvfp4_plain(q)

    def nvfp4_plain(self, q: NVFP4) -> None:
        self.section("scales (NVIDIA 2509.25149, appendix B)")
        if q.tensor_scale:
            if q.has_outer_scale:
                self.outer_amax()
            else:
                self.once(f"tensor_max = tl.load({self.pointer('amax_ptr')})")
            largest = f32(min(ELEMENT_MAX["e2m1"] * SCALE_FORMATS[q.scale][3], FLT_MAX))
            (self.add if q.has_outer_scale else self.once)(
                f"encode = tl.where(tensor_max > 0.0, tl.minimum(tl.div_rn({largest}, tensor_max), {f32(FLT_MAX)}), 1.0)",
                "tensor_scale = tl.div_rn(1.0, encode)",
            )
            largest, divisor = f"block_max * (encode * {f32(1 / q.factor)})", "s * tensor_scale"
        else:
            largest, divisor = f"block_max * {f32(1 / q.factor)}", "s"
        self.add(f"s, scale_code = {self.round_exmy(largest, q.scale)}")
        inverse = f"tl.minimum({self.inverse_of_scale(q, divisor)}, {f32(FLT_MAX)})"
        if self.converts:
            self.converted_codes(inverse, f"tl.maximum(6.0 * ({divisor}), {6 * 2.0**-128!r})")
        else:
            self.add(f"inverse = {inverse}")
            self.elements(f"x * {self.over(self.spread('inverse'))}")

    def outer_amax(self) -> None:
        """`tensor_max` of each unit: the largest finite magnitude of its group of outer columns."""
        n, b = self.unit_axis(self.spec.outer_units)
        self.add(
            "i = bits(x) & 0x7FFFFFFF",
            f"outer_max = {self.call('group_max')}(tl.max(tl.where(i < {INF_BITS}, i, 0), 0), {n}, {b})",
            f"tensor_max = floats({self.call('repeat')}(outer_max, {n}, {b}))",
        )

    def headroom(self, q: NVFP4, factor: float) -> None:
        """`tensor_scale`: amax / (factor * 256) for E4M3, 1 for a vanishing amax."""
        if not q.tensor_scale:
            self.once("tensor_scale = 1.0")
            return
        top = min(factor * SCALE_FORMATS[q.scale][3] * (E4M3_HEADROOM_MAX / E4M3_MAX), FLT_MAX)
        self.once(
            f"tensor_scale = tl.div_rn(tl.load({self.pointer('amax_ptr')}), {f32(top)})",
            "tensor_scale = tl.where(tensor_scale > 0.0, tensor_scale, 1.0)",
        )
        if not self.interpreted and self.lifts:  # a power of two, 1 unless quotients would over- or underflow
            down = f"tl.where(tensor_scale > {2.0**80!r}, {2.0**-100!r}, 1.0)"
            self.once(f"lift = tl.where(tensor_scale < {2.0**-80!r}, {2.0**100!r}, {down})")

    def four_six(self, q: NVFP4) -> None:
        self.section("scales: the better of mapping the block's amax to 6 or to 4 (Four Over Six 2512.02010)")
        self.headroom(q, 6.0)
        for c in ("6", "4"):
            self.add(f"s{c}, scale_code{c} = {self.round_exmy(self.over_factor(q, float(c)), q.scale)}")
            self.add(f"step = s{c} * tensor_scale")
            self.elements_of_quotient("step", c)
            magnitude = "x" if self.native else "tl.abs(x)"
            self.add(f"error = {magnitude} - value{c} * {self.over(self.spread('step'))}")
            self.tree_sum(f"error{c}", "error * error")
        self.add(
            "four = error4 < error6  # a tie keeps 6",
            "s, scale_code = tl.where(four, s4, s6), tl.where(four, scale_code4, scale_code6)",
            f"four = {self.spread('four')}",
        )
        if self.native:
            self.add(*(f"{part} = tl.where(four, {part}4, {part}6)" for part in ("low", "high")[: self.spec.unit // 8]))
            if self.spec.output == "decoded":
                self.add("value = tl.where(four[None, :], value4, value6)")
            return
        self.add("four = four[None, :]", "value = tl.where(four, value4, value6)")
        if self.of_codes:
            self.add("code = tl.where(four, code4, code6)")

    def ms_eden(self, q: NVFP4) -> None:
        self.section("scales: nearest codes, the scale corrected by <y,y>/<y,yhat> (Quartet II 2601.22813, algorithm 1)")
        self.headroom(q, q.factor)
        self.add(f"s, _ = {self.round_exmy(self.over_factor(q, q.factor), q.scale)}")
        self.add("step = s * tensor_scale")
        self.elements_of_quotient("step")
        magnitude = "x" if self.native else "tl.abs(x)"  # of the sign of `value`
        self.tree_sum("projected", f"{magnitude} * value")
        self.tree_sum("square", "x * x")
        self.seed()
        self.scalar("site")
        fours = not self.spec.located and self.spec.rotation_units % 4 == 0  # of one row
        stream = f"{STREAM_SCALE}, seed, site.to(tl.uint32)"
        if not fours or self.spec.block_units > 1 or q.block[0] > 1:
            words = f"{self.call('any_words')}({self.located('row * units + unit', 'row', 'unit', q.block[1])}, {stream})"
        elif self.held == 2:
            words = f"{self.call('pair_words')}(held_row * units + held_unit, {stream})"
        else:
            words = f"{self.call('block_words')}(row, unit, units, {stream}, {self.unit_axis(4)[1]})"
        self.add(
            "projected = projected * step",
            "correction = tl.div_rn(square, projected)",
            'correction = tl.where(correction < float("inf"), correction, 1.0)  # Inf or NaN of 0',
            f"word = {words}",
            f"s, scale_code = {self.round_exmy('s * correction', q.scale, 'word')}",
        )

    @property
    def converts_e4m3(self) -> bool:
        """Has the target conversions to and from E4M3?"""
        return not self.interpreted and self.target.capability >= 89

    def elements_of_quotient(self, divisor: str, suffix: str = "") -> None:
        """`value` and `code` of the tile's magnitudes over the block's divisor, or 0; native: signed, and packed."""
        if self.interpreted or not self.lifts:
            self.add(f"divisor = {self.spread(divisor)}")
            quotient = f"tl.where((divisor > 0.0)[None, :], {self.over_divisor('tl.abs(x)')}, 0.0)"
        else:
            self.add(f"high, low = {self.call(self.reciprocal)}({self.spread(f'({divisor}) * lift')})")
            quotient = f"tl.abs({self.call('quotient')}(x * lift, high[None, :], low[None, :]))"
        if self.native:
            # Of a quotient that is NaN, since huge, cvt would not see the sign.
            self.native_codes(f"{self.call('with_sign')}(tl.minimum({quotient}, 6.0), x)", suffix)
            self.native_values(suffix)
            return
        self.nearest(quotient, suffix)

    def fp8(self, q: FP8) -> None:
        self.section("scales: amax over the format's maximum, FP32")
        self.add(f"s = tl.div_rn(block_max, {f32(ELEMENT_MAX[q.format])})", "s = tl.where(s > 0.0, s, 1.0)")
        self.add(f"divisor = {self.spread('s')}")
        self.elements(self.over_divisor("x"))
        self.add('s = tl.where(finite, s, float("nan"))')

    def mx(self, q: MXFP4 | MXFP8) -> None:
        self.section(f"scales: 2^E, {q.scale_rule} (OCP Microscaling 1.0)")
        if q.scale_rule == "quest":
            self.quest()
        else:
            top = 0 if q.scale_rule == "range_fit" else TOP_EXPONENT[q.element_dtype]
            carry = f" + {MX_CARRY[q.scale_rule]:#x}" if MX_CARRY[q.scale_rule] else ""
            exponent = f"(bits(block_max){carry}) >> 23"
            exponent = f"({exponent}) - {top}" if top else exponent
            self.add(f"scale_code = tl.minimum(tl.maximum({exponent}, 0), 254)")
        factor = q.stretch
        inverse = f"{self.call('e8m0_inverse')}(scale_code)"
        if self.converts:
            self.converted_codes(inverse, f"{self.call('e8m0_value')}(scale_code) * {f32(6.0 / factor)}", factor)
        else:
            scaled = f"x * {self.over(self.spread(inverse))}"
            self.elements(scaled if factor == 1 else f"{scaled} * {f32(factor)}")
        if self.spec.output == "decoded":
            self.add(f"s = {self.call('e8m0_value')}(scale_code)")
            if self.spec.scaled:
                self.add(f"tensor_scale = {f32(1 / factor)}")

    def quest(self) -> None:
        """E from the standard deviation of the finite elements (Quartet 2505.14669)."""
        size = self.spec.block[0] * self.spec.block[1]
        self.add(f"centred = tl.where((bits(x) & 0x7FFFFFFF) < {INF_BITS}, x, 0.0)")
        self.tree_sum("mean", "centred")
        self.add(f"mean = mean * {f32(1 / size)}", f"centred = centred - {self.over(self.spread('mean'))}")
        self.tree_sum("variance", "centred * centred")
        self.add(
            f"sigma = tl.sqrt_rn(variance * {f32(1 / size)})",
            f"exponent = (bits(sigma * {f32(QUEST_SIGMA / 6)} + {f32(1e-8)}) >> 23) & 0xFF",
            "scale_code = tl.where(block_max > 0.0, tl.minimum(exponent, 254), 0)",
        )
