"""Kernels whose traffic is known, for the test of cost_model.py: prints (counted, right) as JSON.

    python fake_gpu.py --depth=wrapper cost_cases.py
"""
import json

import cost_model
import torch
import train_gpt

ROWS = 1024
COLUMNS = 768
CELLS = ROWS * COLUMNS


def floats(*shape):
    return torch.randn(*shape, device="cuda")


def halves(x):
    """Two kernels: the mean reads two thirds of each row whole, the other reads them in halves."""
    two = x[:, :2 * COLUMNS // 3]
    first, second = two.chunk(2, dim=1)
    return first * second * two.square().mean(1, keepdim=True)


def add_in_place(x, y):
    x.add_(y)


def rows_of(table, index):
    return table[index] * 2


CASES = {  # function, arguments, bytes
    "sum of two": (torch.add, (floats(ROWS, COLUMNS), floats(ROWS, COLUMNS)), 3 * 4 * CELLS),
    "cast": (torch.Tensor.bfloat16, (floats(ROWS, COLUMNS),), 6 * CELLS),
    "row times a column": (torch.mul, (floats(ROWS, COLUMNS), floats(ROWS, 1)),
                           2 * 4 * CELLS + 4 * ROWS),
    "in place": (add_in_place, (floats(ROWS, COLUMNS), floats(ROWS, COLUMNS)), 3 * 4 * CELLS),
    "slices": (halves, (floats(ROWS, COLUMNS),), 4 * CELLS * 5 // 3 + 2 * 4 * ROWS),
    "gather": (rows_of, (floats(50_000, COLUMNS),
                         torch.zeros(ROWS, dtype=torch.int64, device="cuda")),
               2 * 4 * CELLS + 8 * ROWS),
    "product": (torch.mm, (floats(ROWS, COLUMNS), floats(COLUMNS, ROWS)),
                4 * (2 * CELLS + ROWS**2)),
}


def main() -> None:
    cost_model.count_bytes_in_kernels()
    cost_model.watch_calls()
    cost_model.sizes = train_gpt.Hyperparameters(sequence_tokens=ROWS)
    found = {}
    for name, (function, arguments, right) in CASES.items():
        torch._dynamo.reset()
        torch.compile(function)(*arguments)
        found[name] = sum(item.bytes for item in cost_model.items), right
        cost_model.items.clear()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
