"""The findings of docs/findings.md, on smaller data: each assertion fails if the finding is reversed."""

from __future__ import annotations

import pytest
import torch

import fp4
from benchmarks.findings import hadamard, mse, quadratic, scale_formats, signs, unbiased
from benchmarks.findings.common import activations, generator


@pytest.fixture(scope="module")
def by_label() -> dict[str, dict[str, float]]:
    x = torch.randn(256, 1024, generator=generator())
    return {row.label: mse.measure(x, row) for row in mse.ROWS if row.label.startswith("NVFP4")}


def test_published_mse_is_met(by_label: dict[str, dict[str, float]]) -> None:
    for row in mse.ROWS:
        if row.label in by_label and row.published and not row.differs:
            assert by_label[row.label]["mse"] == pytest.approx(row.published, rel=0.015), row.label


def test_ms_eden_is_unbiased_at_less_than_half_the_error_of_sr(by_label: dict[str, dict[str, float]]) -> None:
    eden, guarded = by_label["NVFP4 MS-EDEN, H128"], by_label["NVFP4 SR, range_guard"]
    assert eden["mse"] < guarded["mse"] / 2
    assert eden["gain"] == pytest.approx(1, abs=1e-3)
    assert guarded["gain"] == pytest.approx(1, abs=1e-3)


def test_factor_6_clips_and_shrinks_where_the_range_guard_does_not(by_label: dict[str, dict[str, float]]) -> None:
    plain, guarded = by_label["NVFP4 SR, factor 6"], by_label["NVFP4 SR, range_guard"]
    assert guarded["clipped"] == 0
    assert plain["clipped"] > 0.03
    assert plain["gain"] < 0.998
    assert plain["mse"] < guarded["mse"]  # what the bias buys


def test_scale_formats_e4m3_is_best_in_energy_and_flushes_small_blocks() -> None:
    found = {}
    for name in scale_formats.FORMATS:
        q = fp4.NVFP4(scale=name, tensor_scale=name != "e8m0")
        found[name] = scale_formats.mean_errors(2.5, 1.0, q, tensors=4)
    mean, energy = scale_formats.METRICS
    for worse in ("e1m6", "e2m5", "e5m2", "e6m1", "e8m0"):
        assert max(found["e4m3"][energy], found["e3m4"][energy]) < found[worse][energy], worse
    assert found["e1m6"][mean] > 0.8
    assert found["e4m3"][mean] > 4 * found["ue5m3"][mean]


@pytest.mark.parametrize("data", ["1 % of elements x20", "outlier tokens x20"])
def test_h16_helps_mxfp4_and_hurts_nvfp4_on_outliers(data: str) -> None:
    x = activations(128, 1024)[data]
    for h16 in ("H16, no signs", "H16, fixed signs", "H16, fresh signs"):
        rotation = hadamard.ROTATIONS[h16]
        mx, nv = (
            hadamard.relative_mse(x, q, rotation) / hadamard.relative_mse(x, q, None) for q in hadamard.QUANTIZERS.values()
        )
        assert mx < 0.65, h16
        assert nv > 1.3, h16


def test_h16_without_signs_hurts_mxfp4_under_a_channel_mean() -> None:
    x, q = activations(128, 1024)["channel mean 3 sigma"], hadamard.QUANTIZERS["MXFP4, even rule"]
    none, h16, fresh = (
        hadamard.relative_mse(x, q, hadamard.ROTATIONS[r]) for r in ("none", "H16, no signs", "H16, fresh signs")
    )
    assert h16 > 1.5 * none
    assert fresh < 1.3 * none


def test_fresh_signs_equal_deterministic_ones_in_one_draw_and_average_out() -> None:
    dy, x = signs.gradient(128, 1024), activations(128, 1024)["outlier tokens x20"]
    none, h16, fixed, fresh, sr = (
        signs.mean_errors(dy, x, signs.ARMS[name], 8)
        for name in ("RNE", "RNE, H16 no signs", "RNE, H16 fixed signs", "RNE, H16 fresh signs", "SR")
    )
    assert h16[0] < 0.9 * none[0]
    assert h16[0] == pytest.approx(fresh[0], rel=0.05)
    assert fixed[0] == pytest.approx(fresh[0], rel=0.05)
    assert len(h16) == len(fixed) == 1  # deterministic: the mean of any number of draws is the first
    assert fresh[-1] < 0.55 * fresh[0]
    assert sr[0] > 1.3 * none[0]


def test_h16_without_signs_raises_the_wgrad_error_under_a_channel_mean() -> None:
    dy, x = signs.gradient(128, 1024), activations(128, 1024)["channel mean 3 sigma"]
    none, h16, fresh = (
        signs.mean_errors(dy, x, signs.ARMS[name], 1)[0] for name in ("RNE", "RNE, H16 no signs", "RNE, H16 fresh signs")
    )
    assert h16 > 1.05 * none
    assert fresh < none


@pytest.mark.parametrize("name", list(unbiased.ARMS))
def test_the_mean_of_draws_converges_or_stalls(name: str) -> None:
    counts = (1, 4, 16)
    errors = unbiased.mean_errors(unbiased.ARMS[name](unbiased.layer(256, 128, 128)), counts)
    for gradient, found in errors.items():
        slope = unbiased.slope(found, counts)
        if name == "nvfp4: dY nearest":
            assert found[1:] == pytest.approx(found[:1] * 2, rel=1e-6), gradient  # the draws are equal
        elif name == "MS-EDEN, H128 fixed signs":
            assert slope > -0.1, gradient
        else:
            assert slope == pytest.approx(-0.5, abs=0.04), gradient


def test_noise_of_twice_the_threshold_stops_descent_at_a_step_of_one_over_lambda_only() -> None:
    for step_size in quadratic.STEP_SIZES:
        for noise in quadratic.NOISES:
            got = quadratic.row(quadratic.descend(noise, step_size), noise, step_size)
            assert got["factor a step"] == pytest.approx(got["expected factor"], rel=0.01)
    assert quadratic.descend(2.0, 1.0)[-1] > 1e4
    assert quadratic.descend(2.0, 0.5)[-1] < 1e-8
    assert quadratic.expected_factor(1.0, 1.0) == pytest.approx(1 / 3)  # 2/3 of the noise-free descent
    assert quadratic.expected_factor(0.5, 1.0) == pytest.approx(1 / 12)  # 11/12
