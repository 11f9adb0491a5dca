"""The step and the loop: the same training at any world size, warm-up, repeatability, compiling."""
import gc
import json
import math
import os
import subprocess
import sys
import types

import pytest
import torch
from helpers import DATED, ROOT, TINY, equal, make_trainer, next_loss, train_steps, trained

import train_gpt


def hyperparameters(data: list[str], *more: str) -> train_gpt.Hyperparameters:
    return train_gpt.parse_command_line([*TINY, *data, *more])


# ---- any number of ranks ----

def test_ranks_times_micro_steps_do_not_change_the_training(data):
    arguments = [*TINY, *data, "--num_steps=20", "--model_dim=64", "--ngram_order=0",
                 "--copy_lengths=()"]  # all is to be learned
    alone, four = (trained(arguments, f"world{ranks}", ranks) for ranks in (1, 4))
    assert len(alone.train_losses) == 20  # 1 × 4 micro-steps; the other 4 × 1
    assert alone.train_losses[-1] < alone.train_losses[0] - 0.3
    assert four.train_losses == pytest.approx(alone.train_losses, abs=1e-4)
    assert four.val_losses == pytest.approx(alone.val_losses, abs=1e-4)


def test_a_world_of_three_divides_neither_parameters_nor_validation(data):
    arguments = [*TINY, *data, "--batch_tokens=768"]
    alone, three = (trained(arguments, f"three{ranks}", ranks) for ranks in (1, 3))
    assert three.train_losses == pytest.approx(alone.train_losses, abs=1e-4)
    assert three.val_losses == pytest.approx(alone.val_losses, abs=1e-4)


def test_a_collective_that_nobody_answers_times_out(monkeypatch):
    silent = types.SimpleNamespace(is_completed=lambda: False)
    monkeypatch.setattr(train_gpt.dist, "all_reduce", lambda values, async_op: silent)
    with pytest.raises(train_gpt.dist.DistError, match="no answer in time"):
        train_gpt.all_reduce_sum(torch.ones(2), train_gpt.Hardware(world_size=2, timeout=0.05))


@pytest.mark.parametrize("preset", DATED)
def test_each_historical_system_trains_at_small_scale(data, preset):
    """From its preset alone. The first loss is the uniform distribution's, and the loss falls."""
    own = ("--preset", "--window", "--segment")
    small = [option for option in TINY if not option.startswith(own)]
    hp = train_gpt.parse_command_line([f"--preset={preset}", *small, *data, "--num_steps=8",
                                       "--num_layers=12", "--cooldown=0.4",
                                       "--val_sequence_tokens=256", "--fp8_head=false"])
    losses = train_steps(make_trainer(hp), 8)
    assert hp.padded_vocab == 128
    assert losses[0] == pytest.approx(math.log(hp.padded_vocab), abs=1e-4)
    assert losses[-1] < losses[0] - 0.3


# ---- numbers that are read while the next step runs, as on CUDA ----

def next_step(trainer: train_gpt.Trainer, step: int) -> None:
    trainer.step(trainer.data.train.next_batch(), step)


def test_reading_a_loss_later_changes_no_weight(data):
    behind = make_trainer(hyperparameters(data))
    seen = []
    for step in range(3):
        next_step(behind, step)
        seen.append(behind.read_losses(keep=1))
    seen.append(behind.read_losses())
    at_once = make_trainer(hyperparameters(data))
    losses = train_steps(at_once, 3)
    assert seen == [{}, {1: losses[0]}, {2: losses[1]}, {3: losses[2]}]
    assert equal(snapshot(behind), snapshot(at_once))
    assert not behind.unread


@pytest.mark.parametrize("keep", [0, 1])
def test_what_is_not_finite_and_read_later_has_changed_no_weight(data, monkeypatch, keep):
    trainer = make_trainer(hyperparameters(data))
    next_step(trainer, 0)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    steps = {p: state["step"].clone() for p, state in trainer.adam.state.items()}
    batch = trainer.data.train.next_batch()
    wrong = batch[0][0]
    hook = trainer.model.blocks[1].register_forward_hook(
        lambda block, arguments, out: (out[0] * math.inf, out[1]) if spoiled[0] else out)
    forward = trainer.accumulate_gradients

    def spoil(batch):
        spoiled[0] = batch[0][0] is wrong
        return forward(batch)

    spoiled = [False]
    monkeypatch.setattr(trainer, "accumulate_gradients", spoil)
    trainer.step(batch, 1)
    assert trainer.read_losses(keep=1).keys() == {1}
    assert all(map(torch.equal, before, trainer.model.parameters()))
    assert all(torch.equal(state["step"], steps[p])
               for p, state in trainer.adam.state.items())
    sentence = ("the loss of step 2 is nan: gradient of skip_weights is not finite; the batch is "
                "1, number 1")
    if keep:
        next_step(trainer, 2)
    with pytest.raises(train_gpt.UserError, match=sentence):
        trainer.read_losses(keep)
    hook.remove()
    # not even in the next step, which has the momentum of the bad one
    assert all(map(torch.equal, before, trainer.model.parameters()))


def test_a_request_to_stop_leaves_no_step_unread(data):
    trainer = make_trainer(hyperparameters(data))
    trainer.stop_requested = True
    next_step(trainer, 0)
    assert trainer.read_losses(keep=1) == {} and not trainer.stopping
    next_step(trainer, 1)
    assert trainer.read_losses(keep=1).keys() == {1, 2} and trainer.stopping


def test_numbers_that_never_arrive_time_out(data):
    trainer = make_trainer(hyperparameters(data))
    trainer.hardware.timeout = 0.05
    next_step(trainer, 0)
    never = types.SimpleNamespace(query=lambda: False)
    trainer.unread[0] = trainer.unread[0]._replace(copied=never)
    trainer.hardware.world_size = 2  # one rank waits for no other, however long its step takes
    with pytest.raises(train_gpt.dist.DistError, match="no answer in time"):
        trainer.read_losses()


def test_a_warm_up_that_is_not_finite_blames_no_batch(data, monkeypatch):
    """Its tokens are no text: a loss of theirs says nothing about the run."""
    trainer = make_trainer(hyperparameters(data))
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "sum_metrics", lambda mean_loss: torch.full((4,), math.inf))
        train_gpt.warm_up(trainer)
    gc.unfreeze()
    assert not trainer.unread and not trainer.diverged
    next_step(trainer, 0)
    assert trainer.read_losses().keys() == {1}


# ---- the state of a training run ----

def snapshot(trainer: train_gpt.Trainer) -> dict[str, torch.Tensor]:
    """All that a run depends on, gathered without the trainer's own state_dict."""
    tensors = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    for optimizer in (trainer.adam, trainer.muon):
        kind = type(optimizer).__name__
        for name, p in trainer.model.named_parameters():
            if p in optimizer.state:
                tensors |= {f"{kind} {key} of {name}": torch.as_tensor(value).clone()
                            for key, value in optimizer.state[p].items()}
    tensors["positions"] = torch.tensor([trainer.data.train.index, trainer.data.val.index])
    tensors["random numbers"] = torch.random.get_rng_state()
    return tensors


def test_warm_up_leaves_everything_as_it_was(data):
    trainer = make_trainer(hyperparameters(data))
    for _ in range(2):  # before the first step, and with moments and a position to lose
        before = snapshot(trainer)
        train_gpt.warm_up(trainer)
        assert equal(before, snapshot(trainer))
        assert all(p.grad is None for p in trainer.model.parameters())
        trainer.step(trainer.data.train.next_batch(), 0)
        assert not equal(before, snapshot(trainer))


def test_a_warmed_up_run_computes_what_a_cold_one_does(data):
    cold = make_trainer(hyperparameters(data))
    cold_losses = train_steps(cold, 4)
    warm = make_trainer(hyperparameters(data))
    train_gpt.warm_up(warm)
    assert train_steps(warm, 4) == cold_losses


def test_a_state_makes_another_trainer_the_same_except_for_its_rates(data):
    """Also the one that a state comes from may train on: a copy does not change with it."""
    trainer = make_trainer(hyperparameters(data))
    train_steps(trainer, 2)
    state = train_gpt.copy_to_host(trainer.state_dict())
    before = snapshot(trainer)
    expected = [next_loss(trainer, step) for step in (2, 3)]
    other = make_trainer(hyperparameters(data, "--seed=5"))
    other.load_state_dict(state)
    assert equal(before, snapshot(other))
    assert [next_loss(other, step) for step in (2, 3)] == expected
    assert equal(snapshot(trainer), snapshot(other))

    slower = make_trainer(hyperparameters(data, "--muon_rate=0.01", "--head_rate=0.002"))
    slower.load_state_dict(state)
    assert [group["base_lr"] for group in slower.adam.param_groups] == [1.2, 0.002, 0.04]
    assert {group["base_lr"] for group in slower.muon.param_groups} == {0.01}


def test_runs_repeat_bit_for_bit_with_a_seed_and_differ_with_another(data):
    seeds = enumerate((1, 1, 2))
    one, two, other = (trained([*TINY, *data, f"--seed={seed}"], f"repeat{number}",
                               OMP_NUM_THREADS="2") for number, seed in seeds)
    assert one.losses == two.losses
    assert equal(one.weights, two.weights)
    assert other.train_losses[-1] != one.train_losses[-1]


# ---- compiling ----

def test_compiled_training_is_the_same_has_one_graph_and_never_recompiles(data):
    """fullgraph=True refuses a graph break; the window grows and validation comes in between."""
    arguments = [*TINY, *data, "--num_steps=6", "--val_every=2", "--num_layers=2", "--model_dim=64",
                 "--ngram_order=2", "--copy_lengths=(3,)"]
    eager, compiled = (trained([*arguments, f"--compile={choice}"], f"compile_{choice}",
                               timeout=3600) for choice in ("no", "yes"))
    # Gradients agree to 1e-6; Adam's first steps are as large as the rate, even from rounding.
    assert compiled.train_losses == pytest.approx(eager.train_losses, abs=1e-3)
    assert compiled.val_losses == pytest.approx(eager.val_losses, abs=1e-3)
    assert {m["window"][1] for m in compiled.metrics if "window" in m} == {1, 2}
    assert compiled.metrics[-1]["recompiles"] == 0
    assert "recompiles after warm-up: 0" in compiled.output
    assert compiled.metrics[-1]["times_ms"]["warmup"] > 0


@pytest.mark.slow
def test_compiled_ranks_train_the_same_with_their_graph_cut_for_ddp(data):
    """DDP's first bucket is 1 MB: a model of 8 MB is compiled in two pieces, by the real DDP."""
    arguments = [*TINY, *data, "--num_steps=4", "--val_every=2", "--num_layers=3",
                 "--model_dim=256"]
    alone = trained([*arguments, "--compile=no"], "alone", timeout=3600)
    ranks = trained([*arguments, "--compile=yes"], "cut", ranks=2, timeout=3600)
    assert ranks.train_losses == pytest.approx(alone.train_losses, abs=1e-3)
    assert ranks.val_losses == pytest.approx(alone.val_losses, abs=1e-3)
    assert ranks.metrics[-1]["recompiles"] == 0


def test_a_cpu_without_a_compiler_trains_and_says_why_it_is_slower(data, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    hardware = train_gpt.find_hardware(hyperparameters(data, "--num_steps=100000000"))
    assert not hardware.compile
    assert "not compiled: there is no C++ compiler" in train_gpt.environment(hardware)[1]
    with pytest.raises(train_gpt.UserError, match="no C.. compiler .* give --compile=no"):
        train_gpt.find_hardware(hyperparameters(data, "--compile=yes"))


def test_a_cpu_compiles_long_runs_only(data):
    assert not train_gpt.find_hardware(hyperparameters(data)).compile
    assert train_gpt.find_hardware(hyperparameters(data, "--num_steps=100000000")).compile


# ---- the clock ----

def test_the_clock_keeps_each_kind_of_work_apart(monkeypatch):
    seconds = iter((10.0, 11.0, 11.0, 13.0, 13.0, 13.5, 13.5, 14.0, 14.0))
    monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: next(seconds))
    clock = train_gpt.Clock(torch.device("cpu"))
    for kind in ("warmup", "train", "val", "train", None):
        clock.switch(kind)
    assert clock.ms == clock.now() == dict(warmup=1000.0, train=2500.0, val=500.0)


SECOND_START = """
import json, sys
import torch
from helpers import make_trainer
import train_gpt
rank, *arguments = sys.argv[1:]
hp = train_gpt.parse_command_line(arguments)
hardware = train_gpt.find_hardware(hp)
hardware.rank = int(rank)  # of four; without a group, whose cuts would be the same
trainer = make_trainer(hp, hardware)
tokens = torch.arange(hp.sequence_tokens + 1) % hp.vocab_size
trainer.compiled_model(tokens[:-1].int(), tokens[1:], trainer.window).backward()
counts = torch._dynamo.utils.counters
print(json.dumps([counts["inductor"]["fxgraph_cache_miss"], counts["inductor"]["fxgraph_cache_hit"],
                  counts["aot_autograd"]["autograd_cache_hit"]]))
"""


@pytest.mark.slow
def test_a_second_start_compiles_nothing_whatever_its_rank(data, tmp_path):
    """With Inductor's caches on, as they are by default. The key holds no rank."""
    def start(rank: int) -> tuple[int, int, int]:
        process = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", SECOND_START, str(rank), *TINY, *data,
             "--compile=yes", "--num_layers=2", "--ngram_order=0", "--copy_lengths=()",
             "--no_attention=(0,1)"],
            capture_output=True, text=True, cwd=ROOT,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
                 "PYTHONPATH": f"{ROOT}:{ROOT}/tests"})
        assert process.returncode == 0, process.stderr[-3000:]
        return json.loads(process.stdout.splitlines()[-1])

    misses, hits, _ = start(rank=0)
    assert misses > 0 and hits == 0
    misses, hits, whole_graphs = start(rank=3)
    assert misses == 0 and hits + whole_graphs > 0
