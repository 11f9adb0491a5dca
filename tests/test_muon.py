"""Muon: Newton–Schulz against the SVD, the update against a plain version, and any number of processes."""
import math
import multiprocessing
import os
import socket

import pytest
import torch
import torch.distributed as dist
from torch.optim._muon import _zeropower_via_newtonschulz

import reference
import train_gpt
from train_gpt import Muon, newton_schulz

# Tall, wide and square, in groups of 7 (of both orders), 3 and 1: no world size from 2 up divides them all.
SHAPES = [(24, 40)] * 2 + [(40, 24)] * 5 + [(16, 16)] * 3 + [(8, 64)]


def random_matrices(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_singular_values(values: torch.Tensor, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    left, _ = torch.linalg.qr(random_matrices(rows, len(values), seed=seed))
    right, _ = torch.linalg.qr(random_matrices(columns, len(values), seed=seed + 1))
    return left * values @ right.T


# ---- Newton–Schulz -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", [(64, 64), (48, 192), (192, 48), (3, 32, 33), (2, 2, 70, 30)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_singular_values_from_a_hundredth_of_the_norm_up_come_near_1(shape, scale):
    *batch, rows, columns = shape
    values = torch.logspace(-2.5, 0, min(rows, columns))
    matrices = torch.stack([scale * with_singular_values(values, rows, columns, seed)
                            for seed in range(math.prod(batch))]).view(shape)
    left, inputs, right = torch.linalg.svd(matrices.double(), full_matrices=False)
    outputs = (left.mT @ newton_schulz(matrices).double() @ right.mT).diagonal(dim1=-2, dim2=-1)
    large = inputs >= 0.01 * matrices.norm(dim=(-2, -1))[..., None]
    assert large.any(-1).all() and not large.all()
    assert 0.68 <= outputs[large].min() and outputs[large].max() <= 1.14


def test_every_singular_value_is_mapped_by_the_quintic():
    """Also those too small to come near 1: five times a·s + b·s³ + c·s⁵."""
    matrix = with_singular_values(torch.logspace(-4, 0, 40), 40, 70).double()
    expected = torch.linalg.svdvals(matrix / matrix.norm())
    for _ in range(5):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    outputs = torch.linalg.svdvals(newton_schulz(matrix))
    torch.testing.assert_close(outputs, expected.sort(descending=True).values, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rows, columns", [(40, 40), (32, 96), (96, 32)])
def test_directions_are_kept(rows, columns):
    """In the basis of the input's singular vectors the output is diagonal and positive."""
    matrix = random_matrices(rows, columns).double()
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inside = left.T @ newton_schulz(matrix) @ right.T
    assert (inside.diagonal() > 0).all()
    torch.testing.assert_close(inside, inside.diagonal().diag(), rtol=0, atol=1e-9)
    torch.testing.assert_close(left @ inside @ right, newton_schulz(matrix), rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [(3, 5, 24, 40), (3, 5, 40, 24)])
def test_a_batch_is_its_matrices_one_by_one(shape):
    matrices = random_matrices(*shape) * torch.tensor([1e-2, 1.0, 1e2])[:, None, None, None]
    batched = newton_schulz(matrices)
    assert batched.shape == matrices.shape
    for hardware in range(15):
        one = newton_schulz(matrices.flatten(0, 1)[hardware])
        torch.testing.assert_close(batched.flatten(0, 1)[hardware], one, rtol=1e-4, atol=1e-5)


def test_steps_and_zero():
    matrix = random_matrices(8, 8)
    torch.testing.assert_close(newton_schulz(matrix, 0), matrix / (matrix.norm() + 1e-7))
    torch.testing.assert_close(newton_schulz(matrix, 3), reference.orthogonalize(matrix, 3))
    assert not newton_schulz(torch.zeros(4, 6)).any()


def test_bfloat16_is_near_enough():
    outputs = torch.linalg.svdvals(newton_schulz(random_matrices(64, 128).bfloat16()).float())
    assert 0.5 < outputs.min() and outputs.max() < 1.3


# ---- the update --------------------------------------------------------------------------------------------

def parameters(shapes=SHAPES) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(random_matrices(*shape, seed=seed)) for seed, shape in enumerate(shapes)]


def give_gradients(params, step: int) -> None:
    """Of different sizes, and related from step to step so that the momentum matters."""
    for number, p in enumerate(params):
        common = random_matrices(*p.shape, seed=number)
        own = random_matrices(*p.shape, seed=100 * step + number)
        p.grad = 10.0 ** (number % 5 - 3) * (common + own)


def train(params, optimizer, steps: int = 4) -> list[torch.Tensor]:
    """Rate and momentum change on the way, as the schedules change them."""
    for step in range(steps):
        give_gradients(params, step)
        for group in optimizer.param_groups:
            group["lr"], group["momentum"] = 0.05 / (1 + step), 0.85 + 0.02 * step
        optimizer.step()
    return [p.detach().clone() for p in params]


def plain(steps: int = 4, sums=False, nesterov=True, decay=0.0, newton=5) -> list[torch.Tensor]:
    """The same training, one matrix at a time, by the reference's formula."""
    params = parameters()
    states = [{} for _ in params]
    for step in range(steps):
        give_gradients(params, step)
        with torch.no_grad():
            for p, state in zip(params, states):
                reference.muon_step(p, p.grad, state, 0.05 / (1 + step), 0.85 + 0.02 * step, sums, nesterov,
                                    decay, newton)
    return [p.detach() for p in params]


def assert_same(ours, theirs, **tolerance) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("lerp", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_update_against_a_plain_version(nesterov, lerp, decay):
    params = parameters()
    ours = train(params, Muon(params, nesterov=nesterov, lerp=lerp, weight_decay=decay))
    assert_same(ours, plain(sums=not lerp, nesterov=nesterov, decay=decay), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("per_rank", [None, 1, 2, 3, 100])
def test_how_many_at_a_time_changes_nothing(per_rank):
    params = parameters()
    assert_same(train(params, Muon(params, per_rank=per_rank)), plain(), rtol=1e-4, atol=1e-5)


def test_number_of_newton_schulz_steps():
    params = parameters()
    assert_same(train(params, Muon(params, steps=2)), plain(newton=2), rtol=1e-4, atol=1e-5)


def torch_newton_schulz(matrices: torch.Tensor, steps: int) -> torch.Tensor:
    return torch.stack([_zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), steps, 1e-7)
                        for matrix in matrices])


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_update_against_the_one_of_torch(monkeypatch, nesterov, decay):
    """Exactly so with torch's Newton–Schulz, which is in bfloat16; nearly so with ours in bfloat16.

    bfloat16 has 8 bits, and ten roundings in a row to 1/512 come to about 2 % of an update.
    """
    exact, near, theirs = parameters(), parameters(), parameters()
    settings = dict(nesterov=nesterov, weight_decay=decay)
    with monkeypatch.context() as patched:
        patched.setattr(train_gpt, "newton_schulz", torch_newton_schulz)
        train(exact, Muon(exact, **settings))
    train(near, Muon(near, dtype=torch.bfloat16, **settings))
    train(theirs, torch.optim.Muon(theirs, ns_coefficients=(3.4445, -4.7750, 2.0315), **settings))
    assert_same(exact, theirs, rtol=1e-6, atol=1e-6)
    for one, other, start in zip(near, theirs, parameters()):
        assert (one - other).norm() < 0.04 * (other - start).norm()


def test_without_nesterov_the_momentum_is_what_moves_the_weights():
    """After a gradient and then none, the buffer still points where the gradient did: an old bug."""
    p = torch.nn.Parameter(torch.zeros(8, 12))
    muon = Muon([p], lr=1.0, momentum=0.5, nesterov=False)
    p.grad = gradient = random_matrices(8, 12)
    muon.step()
    before, p.grad = p.detach().clone(), torch.zeros(8, 12)
    muon.step()
    torch.testing.assert_close(p.detach() - before, -newton_schulz(gradient), rtol=1e-4, atol=1e-4)


def test_tall_matrices_take_larger_steps():
    for rows, columns, scale in ((64, 16, 2.0), (16, 64, 1.0), (16, 16, 1.0)):
        p = torch.nn.Parameter(torch.zeros(rows, columns))
        p.grad = random_matrices(rows, columns)
        Muon([p], lr=0.1).step()
        largest = torch.linalg.svdvals(p.detach()).max()
        assert 0.1 * scale * 0.68 <= largest <= 0.1 * scale * 1.2


def test_the_weights_keep_their_dtype_when_newton_schulz_is_bfloat16():
    params = parameters()
    train(params, Muon(params, dtype=torch.bfloat16), steps=1)
    assert all(p.dtype == torch.float32 for p in params)
    for p, expected, start in zip(params, plain(steps=1), parameters()):
        assert (p - expected).norm() < 0.05 * (expected - start).norm()


def test_it_takes_matrices_only():
    with pytest.raises(AssertionError, match="matrices"):
        Muon([torch.nn.Parameter(torch.zeros(3))])


# ---- several processes -------------------------------------------------------------------------------------

def one_rank(rank: int, world_size: int, folder: str) -> None:
    """Trains with one and with two parameters per rank at a time, and saves what it ends with."""
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    results = {}
    for per_rank in (None, 1, 2):
        for lerp, nesterov, decay in ((True, True, 0.1), (False, False, 0.0)):
            params = parameters()
            muon = Muon(params, lerp=lerp, nesterov=nesterov, weight_decay=decay, rank=rank,
                        world_size=world_size, per_rank=per_rank)
            results[per_rank, lerp] = train(params, muon)
            owned = [number for number, p in enumerate(params) if muon.state.get(p)]
            results["owned", per_rank, lerp] = owned
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def in_processes(world_size: int, folder) -> list[dict]:
    """What each rank saved. The processes come from a server that has imported torch once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train_gpt", "pytest", "torch._dynamo"])
    ranks = [context.Process(target=one_rank, args=(rank, world_size, str(folder)), daemon=True)
             for rank in range(world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        if process.exitcode is None:
            process.kill()
    assert [process.exitcode for process in ranks] == [0] * world_size
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_any_number_of_processes_ends_with_the_same_parameters(world_size, tmp_path):
    ranks = in_processes(world_size, tmp_path)
    for per_rank in (None, 1, 2):
        for lerp, nesterov, decay in ((True, True, 0.1), (False, False, 0.0)):
            expected = plain(sums=not lerp, nesterov=nesterov, decay=decay)
            for results in ranks:
                assert_same(results[per_rank, lerp], expected, rtol=1e-4, atol=1e-5)
                assert_same(results[per_rank, lerp], ranks[0][per_rank, lerp], rtol=0, atol=0)
            owned = [number for results in ranks for number in results["owned", per_rank, lerp]]
            assert sorted(owned) == list(range(len(SHAPES))), "one rank keeps its momentum"
