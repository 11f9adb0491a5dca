"""The statistics against SciPy, and the error rate of the sequential test by simulation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

import made_up_logs  # noqa: F401  (puts records/ on the path)
import stats

FREEDOM = st.one_of(st.integers(1, 40), st.floats(1, 5000))


@given(st.floats(-60, 60), FREEDOM)
def test_student_cdf(t, freedom):
    assert stats.student_cdf(t, freedom) == pytest.approx(
        scipy_stats.t.cdf(t, freedom), rel=1e-9, abs=1e-300
    )


@given(st.floats(0.0005, 0.9995), FREEDOM)
def test_student_quantile(probability, freedom):
    expected = scipy_stats.t.ppf(probability, freedom)
    assert stats.student_quantile(probability, freedom) == pytest.approx(
        expected, rel=1e-8, abs=1e-8
    )


@given(st.lists(st.floats(2.5, 4.0), min_size=2, max_size=30, unique=True), st.floats(3, 3.5))
def test_one_sided_t_test(values, target):
    expected = scipy_stats.ttest_1samp(values, target, alternative="less")
    test = stats.t_test_below(values, target)
    assert test.t == pytest.approx(expected.statistic, rel=1e-6, abs=1e-9)
    assert test.p == pytest.approx(expected.pvalue, rel=1e-5, abs=1e-12)


def test_a_sample_without_spread():
    assert (
        stats.t_test_below([3.0, 3.0], 3.28).p == 0 and stats.t_test_below([3.5, 3.5], 3.28).p == 1
    )
    assert math.isnan(stats.t_test_below([3.0], 3.28).p)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=30, unique=True), st.floats(0.001, 0.3))
def test_fixed_interval(values, alpha):
    low, high = stats.fixed_interval(values, alpha)
    error = np.std(values, ddof=1) / math.sqrt(len(values))
    expected = scipy_stats.t.interval(1 - alpha, len(values) - 1, np.mean(values), error)
    assert (low, high) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(st.integers(2, 200), st.floats(0.01, 4), st.sampled_from([0.01, 0.05]))
def test_power_is_the_noncentral_t(number, effect, alpha):
    critical = scipy_stats.t.ppf(1 - alpha, number - 1)
    expected = scipy_stats.nct.sf(critical, number - 1, effect * math.sqrt(number))
    assert stats.power(number, effect, alpha) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("effect", [0.1, 0.5, 1.0, 3.0, 20.0])
def test_runs_needed_are_the_fewest_that_suffice(effect):
    needed = stats.runs_needed(effect)
    assert stats.power(needed, effect, 0.01) >= 0.9
    assert needed == 2 or stats.power(needed - 1, effect, 0.01) < 0.9


def test_no_number_of_runs_proves_what_is_not_so():
    assert (
        stats.runs_needed(0.0) is None
        and stats.runs_needed(-1.0) is None
        and stats.runs_needed(math.nan) is None
    )
    assert stats.runs_needed(0.001) is None


def excludes_zero(samples: np.ndarray, alpha: float, interval) -> float:
    """The part of the samples whose interval excludes zero after any of their values."""
    wrong = 0
    for sample in samples.tolist():
        wrong += any(
            not low <= 0 <= high
            for low, high in (
                interval(sample[:number], alpha) for number in range(2, len(sample) + 1)
            )
        )
    return wrong / len(samples)


def test_the_sequential_interval_keeps_its_error_rate():
    """500 comparisons of 30 pairs that differ in nothing, looked at after every pair."""
    samples = np.random.default_rng(0).normal(size=(500, 30))
    assert excludes_zero(samples, 0.05, stats.sequential_interval) <= 0.05
    assert excludes_zero(samples[:200], 0.2, stats.sequential_interval) <= 0.2
    assert excludes_zero(samples[:40], 0.05, stats.fixed_interval) > 0.15  # what peeking would do


def test_the_sequential_interval_finds_what_is_there():
    samples = np.random.default_rng(1).normal(loc=2.0, size=(100, 12))
    assert excludes_zero(samples, 0.05, stats.sequential_interval) > 0.95
    low, high = stats.sequential_interval([1.0, 1.1, 0.9, 1.05, 0.95, 1.0], 0.05)
    assert low < 1.0 < high and low > 0


def test_the_sequential_interval_is_where_the_likelihood_ratio_reaches_one_by_alpha():
    """The formula of its docstring against SciPy's densities: noncentral t, mixed over the effect,
    against central t."""
    values = [0.3, 0.8, -0.1, 0.6, 0.4, 0.9]
    number, alpha = len(values), 0.05
    low, _ = stats.sequential_interval(values, alpha)
    t = (np.mean(values) - low) / (np.std(values, ddof=1) / math.sqrt(number))
    effects = np.linspace(-20, 20, 8001)
    weights = scipy_stats.norm.pdf(effects, scale=math.sqrt(stats.PRIOR_VARIANCE))
    densities = scipy_stats.nct.pdf(t, number - 1, effects * math.sqrt(number))
    ratio = np.trapezoid(weights * densities, effects) / scipy_stats.t.pdf(t, number - 1)
    assert ratio == pytest.approx(1 / alpha, rel=0.01)
