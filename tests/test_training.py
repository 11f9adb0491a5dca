"""Whole runs: the same training at any world size, the historical systems, warm-up, repeatability, the log, sampling."""
import math
import re

import pytest
import torch

import train_gpt
from helpers import ROOT, STEP_LINE, TINY, make_data, trained

DATED = [name for name in train_gpt.PRESETS if name[0] == "2"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    return make_data(tmp_path_factory.mktemp("data"))


def hyperparameters(data: list[str], *more: str) -> train_gpt.Hyperparameters:
    return train_gpt.parse_command_line([*TINY, *data, *more])


def test_ranks_times_micro_steps_do_not_change_the_training(data):
    arguments = [*TINY, *data, "--num_steps=20", "--model_dim=64"]
    curves = {ranks: trained(arguments, f"world{ranks}", ranks) for ranks in (1, 2, 4)}  # 1×4, 2×2, 4×1
    assert len(curves[1].train_losses) == 20 and curves[1].train_losses[-1] < curves[1].train_losses[0] - 0.3
    for ranks in (2, 4):
        assert curves[ranks].train_losses == pytest.approx(curves[1].train_losses, abs=1e-4)
        assert curves[ranks].val_losses == pytest.approx(curves[1].val_losses, abs=1e-4)


def test_a_world_of_three_divides_neither_parameters_nor_validation(data):
    alone, three = (trained([*TINY, *data, "--batch_tokens=768"], f"three{n}", n) for n in (1, 3))
    assert three.train_losses == pytest.approx(alone.train_losses, abs=1e-4)
    assert three.val_losses == pytest.approx(alone.val_losses, abs=1e-4)


@pytest.mark.parametrize("preset", DATED)
def test_each_historical_system_trains_at_small_scale(data, preset):
    """From its preset alone; the first loss is that of the uniform distribution, and the loss falls."""
    small = [option for option in TINY if not option.startswith(("--preset", "--window", "--segment"))]
    hp = train_gpt.parse_command_line([f"--preset={preset}", *small, *data, "--num_steps=8", "--num_layers=12", "--cooldown=0.4"])
    trainer = make_trainer(hp)
    losses = [trainer.step(trainer.data.train.next_batch(), step) for step in range(8)]
    assert losses[0] == pytest.approx(math.log(hp.padded_vocab), abs=1e-4) and hp.padded_vocab == 128
    assert losses[-1] < losses[0] - 0.3


def test_presets_combine_so_that_an_old_architecture_trains_at_laptop_scale():
    old, laptop, both = (train_gpt.parse_command_line([f"--preset={p}" for p in presets])
                         for presets in (["2024-12-10"], ["laptop"], ["2024-12-10", "laptop"]))
    assert both.value_layout == old.value_layout == "mirrored" and both.softcap == old.softcap == 30
    assert both.rotary_base == old.rotary_base and both.model_dim == laptop.model_dim != old.model_dim


def test_warm_up_leaves_everything_as_it_was(data):
    hp = hyperparameters(data)
    trainer = make_trainer(hp)

    def state():
        weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        moments = [tensor.clone() for o in trainer.optimizers for p in trainer.model.parameters()
                   for tensor in (o.state[p].values() if p in o.state else ()) if torch.is_tensor(tensor)]
        return weights, moments, trainer.data.train.index, trainer.data.val.index, torch.random.get_rng_state()

    def same(one, other):
        return (all(torch.equal(one[0][name], other[0][name]) for name in one[0]) and len(one[1]) == len(other[1])
                and all(map(torch.equal, one[1], other[1])) and one[2:4] == other[2:4] and torch.equal(one[4], other[4]))

    for _ in range(2):  # before the first step, and with moments and a position to lose
        before = state()
        trainer.warm_up()
        assert same(before, state()) and all(p.grad is None for p in trainer.model.parameters())
        trainer.step(trainer.data.train.next_batch(), 0)
        assert not same(before, state())


def test_a_warmed_up_run_computes_what_a_cold_one_does(data):
    losses = []
    for warm in (False, True):
        trainer = make_trainer(hp := hyperparameters(data))
        if warm:
            trainer.warm_up()
        losses.append([trainer.step(trainer.data.train.next_batch(), step) for step in range(4)])
    assert losses[0] == losses[1]


def test_runs_repeat_bit_for_bit_with_a_seed_and_differ_with_another(data):
    one, two, other = (trained([*TINY, *data, f"--seed={seed}"], f"repeat{n}", OMP_NUM_THREADS="2")
                       for n, seed in enumerate((1, 1, 2)))
    assert one.train_losses == two.train_losses and one.val_losses == two.val_losses
    weights = [torch.load(r.folder / "model.pt", weights_only=True)["model"] for r in (one, two)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert other.train_losses[-1] != one.train_losses[-1]


def test_compiled_training_is_the_same_has_one_graph_and_never_recompiles(data):
    """fullgraph=True refuses a graph break; the window grows from one block to two, validation comes in between."""
    arguments = [*TINY, *data, "--num_steps=6", "--val_every=2", "--num_layers=2", "--model_dim=64"]
    eager, compiled = (trained([*arguments, f"--compile={c}"], f"compile_{c}", timeout=3600) for c in ("no", "yes"))
    # gradients agree to 1e-6; Adam's first steps have the size of the rate even where a gradient is all rounding
    assert compiled.train_losses == pytest.approx(eager.train_losses, abs=1e-3)
    assert compiled.val_losses == pytest.approx(eager.val_losses, abs=1e-3)
    assert {m["window"][1] for m in compiled.metrics if "window" in m} == {1, 2}
    assert compiled.metrics[-1]["recompiles"] == 0 and "recompiles after warm-up: 0" in compiled.output
    assert compiled.metrics[-1]["times_ms"]["warmup"] > 0


@pytest.mark.slow
def test_compiled_ranks_train_the_same_with_their_graph_cut_for_ddp(data):
    """DDP's first bucket is 1 MB: a model of 8 MB is compiled in two pieces, by the real DDP."""
    arguments = [*TINY, *data, "--num_steps=4", "--val_every=2", "--num_layers=3", "--model_dim=256"]
    alone = trained([*arguments, "--compile=no"], "alone", timeout=3600)
    ranks = trained([*arguments, "--compile=yes"], "cut", ranks=2, timeout=3600)
    assert ranks.train_losses == pytest.approx(alone.train_losses, abs=1e-3)
    assert ranks.val_losses == pytest.approx(alone.val_losses, abs=1e-3) and ranks.metrics[-1]["recompiles"] == 0


def test_no_compiler_is_said_and_is_no_obstacle(data, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    hardware = train_gpt.find_hardware(hyperparameters(data))
    assert not hardware.compile and "not compiled: there is no C++ compiler" in train_gpt.environment(hardware)[1]
    with pytest.raises(train_gpt.UserError, match="install one, or give --compile=no"):
        train_gpt.find_hardware(hyperparameters(data, "--compile=yes"))


def test_a_cpu_compiles_long_runs_only(data):
    assert not train_gpt.find_hardware(hyperparameters(data)).compile
    assert train_gpt.find_hardware(hyperparameters(data, "--num_steps=100000000")).compile


def test_the_log_has_all_it_takes_to_do_the_run_again(data):
    result = trained([*TINY, *data, "--val_every=2"], "log")
    source, settings, lines = result.log.split("=" * 100 + "\n")[-3:]
    assert (ROOT / "train_gpt.py").read_text() in result.log and "num_steps: 4" in settings and "PyTorch" in settings
    steps = [STEP_LINE.match(line) for line in lines.splitlines() if line.startswith("step:")]
    assert all(steps), lines
    assert [(int(m[1]), m[3]) for m in steps] == [
        (0, "val_loss"), (1, "train_loss"), (2, "train_loss"), (2, "val_loss"), (3, "train_loss"), (4, "train_loss"),
        (4, "val_loss")]
    assert steps[0][6] == "nan"
    for match, metric in zip(steps, [m for m in result.metrics if "step" in m]):
        assert float(match[4]) == pytest.approx(metric[match[3]], abs=6e-5) and metric["step"] == int(match[1])
        assert metric["tokens"] == metric["step"] * 1024 and metric["memory_mib"] > 0
        assert {"warmup", "train", "val"} == metric["times_ms"].keys()
    for expected in ("final validation loss", "bits per byte", "4,096 tokens", "clocks:", "sample:", "log.txt"):
        assert expected in result.output, expected


def test_bits_per_byte_counts_text_and_not_document_starts(data):
    trainer = make_trainer(hp := hyperparameters(data))
    result = train_gpt.evaluate(hp, trainer.forward, trainer.data.val, trainer.window.fill_(2), train_gpt.Hardware())
    trainer.data.val.index, targets = 0, []
    for _ in range(4):
        targets.append(trainer.data.val.next_batch()[0][1])
    text = int((torch.cat(targets) != 63).sum())
    assert 0 < text < 1024 and result["val_loss"] == pytest.approx(math.log(64), abs=1e-5)
    assert result["bits_per_byte"] == pytest.approx(result["val_loss"] * 1024 / text / math.log(2))


def test_sampling_from_a_saved_model(data, capsys):
    trained_run = [*TINY, *data, "--vocab_size=257", "--document_token=256", "--run_id=sampled"]
    assert train_gpt.main(trained_run) == 0
    model = re.search(r"model: (.+)", capsys.readouterr().out)[1]

    def sample(*options):
        assert train_gpt.main(["--sample=Hello", f"--checkpoint={model}", "--sample_tokens=12", *options]) == 0
        return capsys.readouterr().out

    assert sample("--seed=1").startswith("Hello") and sample("--seed=1") == sample("--seed=1") != sample("--seed=2")
    assert sample("--temperature=0", "--seed=1") == sample("--temperature=0", "--seed=2") == sample("--top_k=1")


def test_sampling_sees_what_training_saw(data):
    """The logits that sampling uses for a position are those of a forward pass over the whole text."""
    hp = hyperparameters(data, "--vocab_size=257", "--document_token=256")
    model = train_gpt.GPT(hp).eval()
    torch.nn.init.normal_(model.head.weight)
    text = "some words that are long enough to be seen " * 4
    continued = train_gpt.sample(model, text, hyperparameters(data, "--temperature=0", "--sample_tokens=1"))
    tokens = [256, *text.encode()]
    inputs = torch.tensor(tokens + [256] * (-len(tokens) % 128))
    window = torch.tensor(train_gpt.window_at(hp, hp.num_steps), dtype=torch.int32)
    best = model(inputs, None, window)[len(tokens) - 1].argmax().item()
    assert re.fullmatch(re.escape(text) + "(.?)", continued, re.S)
    assert continued == text + bytes([best] if best < 256 else []).decode(errors="replace")
