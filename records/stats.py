"""The statistics of a record, in plain Python: tests/records holds them against SciPy.

Student's t by the incomplete beta function, its quantiles by bisection, the power of a t-test by a
numerical integral, and a confidence sequence for a comparison that is looked at after every pair.
"""

import math
from dataclasses import dataclass


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def standard_deviation(values: list[float]) -> float:
    """Of the population that the values are a sample of (n − 1)."""
    if len(values) < 2:
        return math.nan
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1))


def normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def incomplete_beta(a: float, b: float, x: float, rest: float) -> float:
    """The regularized incomplete beta function at x; `rest` is 1 − x, given apart to lose no
    digits."""
    if x <= 0:
        return 0.0
    if rest <= 0:
        return 1.0
    if x > (a + 1) / (a + b + 2):  # the continued fraction converges fast on the other side only
        return 1 - incomplete_beta(b, a, rest, x)
    log_front = (
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)
    )
    return math.exp(log_front) / (a * beta_fraction(a, b, x))


def beta_fraction(a: float, b: float, x: float) -> float:
    """1 + d1/(1 + d2/(1 + …)), evaluated from the front by Lentz's method."""
    tiny = 1e-300
    value = 1.0
    numerator = 1.0
    denominator = 0.0
    for step in range(1, 100_000):
        m = step // 2
        if step % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        denominator = 1 + term * denominator
        denominator = 1 / (denominator if abs(denominator) > tiny else tiny)
        numerator = 1 + term / numerator
        numerator = numerator if abs(numerator) > tiny else tiny
        factor = numerator * denominator
        value *= factor
        if abs(factor - 1) < 1e-15:
            return value
    return value


def student_cdf(t: float, freedom: float) -> float:
    """P(T ≤ t) for Student's t, right to the last digits far out in the tails too."""
    if math.isinf(t):
        return 1.0 if t > 0 else 0.0
    square = t * t
    tail = 0.5 * incomplete_beta(
        freedom / 2, 0.5, freedom / (freedom + square), square / (freedom + square)
    )
    return tail if t < 0 else 1 - tail


def student_quantile(probability: float, freedom: float) -> float:
    """The t below which a part `probability` lies, by bisection."""
    if probability < 0.5:
        return -student_quantile(1 - probability, freedom)
    upper_tail = 1 - probability
    low = 0.0
    high = 1.0
    while student_cdf(-high, freedom) > upper_tail:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if student_cdf(-middle, freedom) > upper_tail:
            low = middle
        else:
            high = middle
    return (low + high) / 2


# Is the mean at or below the target? --------------------------------------------------------------


@dataclass
class TTest:
    """One-sided t-test against the claim that the mean is above the target."""

    number: int
    mean: float
    deviation: float
    t: float
    p: float


def t_test_below(values: list[float], target: float) -> TTest:
    middle = mean(values)
    deviation = standard_deviation(values)
    if len(values) < 2:
        return TTest(len(values), middle, deviation, math.nan, math.nan)
    distance = middle - target
    if deviation > 0:
        t = distance / (deviation / math.sqrt(len(values)))
    else:
        t = math.copysign(math.inf, distance) if distance else 0.0
    return TTest(len(values), middle, deviation, t, student_cdf(t, len(values) - 1))


def power(number: int, effect: float, alpha: float) -> float:
    """The chance that `number` runs prove a mean `effect` standard deviations below the target.

    The measured deviation is S times the true one, with number − 1 degrees of freedom; given S, the
    test succeeds with probability Φ(effect·√number − critical·S). Simpson's rule over the density
    of S.
    """
    freedom = number - 1
    critical = student_quantile(1 - alpha, freedom)
    shift = effect * math.sqrt(number)
    log_scale = math.log(2) + freedom / 2 * math.log(freedom / 2) - math.lgamma(freedom / 2)

    def integrand(s: float) -> float:
        if s == 0:
            log_density = log_scale if freedom == 1 else -math.inf
        else:
            log_density = log_scale + (freedom - 1) * math.log(s) - freedom * s * s / 2
        return math.exp(log_density) * normal_cdf(shift - critical * s)

    reach = 10 / math.sqrt(2 * freedom)
    low = max(0.0, 1 - reach)
    high = 1 + reach
    intervals = 1000
    width = (high - low) / intervals
    inner = sum(
        (4 if place % 2 else 2) * integrand(low + place * width) for place in range(1, intervals)
    )
    return width / 3 * (integrand(low) + inner + integrand(high))


def runs_needed(
    effect: float, alpha: float = 0.01, chance: float = 0.9, most: int = 10_000
) -> int | None:
    """The fewest runs that prove it with this chance; None if more than `most`, or if nothing
    can."""
    if not effect > 0 or power(most, effect, alpha) < chance:
        return None
    high = 2
    while power(high, effect, alpha) < chance:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if power(middle, effect, alpha) < chance:
            low = middle
        else:
            high = middle
    return high


# The difference between two configurations --------------------------------------------------------


def fixed_interval(values: list[float], alpha: float) -> tuple[float, float]:
    """Student's confidence interval of the mean, for a number of values that was fixed
    beforehand."""
    if len(values) < 2:
        return -math.inf, math.inf
    middle = mean(values)
    half = student_quantile(1 - alpha / 2, len(values) - 1) * standard_deviation(values)
    half /= math.sqrt(len(values))
    return middle - half, middle + half


PRIOR_VARIANCE = (
    4.0  # of the effect in standard deviations: differences worth stopping for are about two
)


def sequential_interval(values: list[float], alpha: float) -> tuple[float, float]:
    """A confidence interval of the mean that may be looked at after every value.

    With probability 1 − alpha or more, all the intervals of a growing sample contain the mean at
    once, so that stopping as soon as one excludes zero keeps the error rate. For a supposed mean m,
    the ratio of the likelihood of the t statistics under an effect drawn from N(0, g) standard
    deviations to that under no effect is a martingale whatever the deviation is,
        ratio = k^(−1/2) · ((1 + x) / (1 + x/k))^(n/2),  k = 1 + n·g,  x = t²/(n − 1),
    and by Ville's inequality it ever reaches 1/alpha with probability alpha at most. The interval
    has those m whose ratio stays below. It holds for normal differences; those of losses and of
    logarithms of times are near enough, and a test simulates the rate of false positives.
    """
    number = len(values)
    if number < 2:
        return -math.inf, math.inf
    k = 1 + number * PRIOR_VARIANCE
    bound = (math.sqrt(k) / alpha) ** (2 / number)
    if bound >= k:  # so few values cannot exclude anything
        return -math.inf, math.inf
    t = math.sqrt((number - 1) * (bound - 1) / (1 - bound / k))
    half = t * standard_deviation(values) / math.sqrt(number)
    return mean(values) - half, mean(values) + half
