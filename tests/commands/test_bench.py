"""The benchmarks run. Their ratios are not looked at: a timing is no test."""
import math

import bench
import pytest

NAMES = [pytest.param(name, marks=pytest.mark.slow) if name == "scaling" else name
         for name in bench.BENCHMARKS]


def once(**functions) -> dict[str, float]:
    """In place of bench.interleaved: calls each function, as if all took equally long."""
    for function in functions.values():
        function()
    return dict.fromkeys(functions, 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs(name, tmp_path, monkeypatch, request):
    if name == "tokenizing":
        request.getfixturevalue("gpt2")  # skips without GPT-2's vocabulary
    monkeypatch.setattr(bench, "interleaved", once)
    rows = bench.BENCHMARKS[name](tmp_path)
    assert rows and all(what and math.isfinite(ratio) for what, ratio, _, _ in rows)
