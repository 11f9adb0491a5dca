"""The head in FP8: values and gradients against fp32, outliers, a whole training, and who is refused."""
import pytest
import torch
import torch.nn.functional as F

import train_gpt
from conftest import hyperparameters, made_up_text
from train_gpt import Float8Product, UserError

TOKENS, WIDTH, VOCABULARY = 512, 256, 1024
FORWARD, BACKWARD = 0.045, 0.08  # relative errors: e4m3 rounds to 1/16, e5m2 to 1/8, and errors are uniform


def relative_error(found, wanted) -> float:
    return ((found.float() - wanted).norm() / wanted.norm()).item()


def head_and_gradients(product, x, weight, targets) -> tuple:
    """(logits, dx, dweight) of the mean loss behind the softcap, as the model has it."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = product(x, weight)
    F.cross_entropy(15 * torch.tanh(logits.float() / 15), targets).backward()
    return logits.detach(), x.grad, weight.grad


def batch(tokens: int = TOKENS):
    generator = torch.Generator().manual_seed(0)
    x = train_gpt.norm(torch.randn(tokens, WIDTH, generator=generator))
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator)
    return x, weight, torch.randint(VOCABULARY, (tokens,), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0.008, 0.1, 1.0])  # after the first step, and in the end
def test_values_and_gradients_are_near(size, dtype):
    x, weight, targets = batch()
    wanted = head_and_gradients(F.linear, x, size * weight, targets)
    found = head_and_gradients(Float8Product.apply, x.to(dtype), size * weight, targets)
    assert found[0].dtype == found[1].dtype == dtype and found[2].dtype == torch.float32
    errors = [relative_error(*pair) for pair in zip(found, wanted)]
    print(errors)
    assert errors[0] < FORWARD and max(errors[1:]) < BACKWARD


@pytest.mark.parametrize("tokens", [128, 4096])
def test_the_gradient_is_scaled_by_the_number_of_tokens(tokens):
    """Its entries are 1/tokens at most: neither lost to zero nor cut off at any length of sequence."""
    x, weight, targets = batch(tokens)
    wanted = head_and_gradients(F.linear, x, 0.1 * weight, targets)
    found = head_and_gradients(Float8Product.apply, x, 0.1 * weight, targets)
    assert max(relative_error(*pair) for pair in zip(found[1:], wanted[1:])) < BACKWARD


def test_outliers_saturate():
    x, weight, _ = batch()
    x[0, 0], weight[0] = 1e6, 100.0
    x, weight = x.requires_grad_(), weight.requires_grad_()
    logits = Float8Product.apply(x, weight)
    (1e9 * logits.sum()).backward()
    assert all(tensor.isfinite().all() for tensor in (logits, x.grad, weight.grad))
    plain = F.linear(x.clamp(max=WIDTH**0.5), weight.clamp(max=14.0))
    assert relative_error(logits, plain) < FORWARD


def test_what_is_not_finite_shows():
    x, weight, _ = batch()
    x[3, 5] = torch.nan
    logits = Float8Product.apply(x, weight)
    assert logits[3].isnan().all() and logits[:3].isfinite().all()


def test_it_trains_as_without(tiny, make_shards):
    stream = make_shards(made_up_text(13 * 1024))
    losses = {}
    for fp8 in (False, True):
        hp = tiny(train_files=stream, val_files=stream, fp8_head=fp8, num_layers=4, vocab_multiple=16)
        trainer = train_gpt.Trainer(hp, train_gpt.Hardware())
        losses[fp8] = [trainer.step(trainer.data.train.next_batch(), step) for step in range(12)]
    assert losses[True] != losses[False] and losses[True][-1] < losses[True][0] - 1
    assert losses[True] == pytest.approx(losses[False], rel=0.02)


def test_only_training_is_in_float8(tiny):
    """A model loads, validates and samples also where there is no FP8."""
    hp = tiny(fp8_head=True, num_layers=2)
    model = train_gpt.GPT(hp).eval()
    torch.nn.init.normal_(model.head.weight)
    inputs, window = torch.arange(128), torch.tensor(train_gpt.window_at(hp, 0), dtype=torch.int32)
    plain = train_gpt.GPT(tiny(num_layers=2)).eval()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(inputs, None, window), plain(inputs, None, window))
    assert not torch.equal(model.train()(inputs, None, window), plain(inputs, None, window))


def test_the_preset_is_h100_with_the_head_in_float8():
    ours, h100 = (train_gpt.as_dict(hyperparameters(name)) for name in ("h100-fp8", "h100"))
    assert {name for name in h100 if ours[name] != h100[name]} == {"preset", "fp8_head"} and ours["fp8_head"]


def test_sizes_are_such_as_the_hardware_multiplies():
    """Multiples of 16: the vocabulary is padded to it, a width is refused."""
    for multiple, padded in ((1, 272), (24, 288), (128, 384)):
        hp = hyperparameters("h100-fp8", vocab_size=257, document_token=256, vocab_multiple=multiple)
        assert hp.padded_vocab == padded
    with pytest.raises(UserError, match=r"--model_dim=104: expected a multiple of .* and of 16 = 16; .*--model_dim=96$"):
        hyperparameters("h100-fp8", num_heads=2, model_dim=104)


@pytest.mark.parametrize("kind, capability, hip", [("cuda", (8, 0), None), ("cuda", (8, 6), None), ("mps", None, None),
                                                   ("cuda", (9, 0), "7.2"), ("cuda", (9, 4), "7.2")])
def test_devices_without_float8_are_refused(kind, capability, hip, monkeypatch):
    """Of AMD's, 9.0 has none and 9.4 has one with another bias."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    hardware = train_gpt.Hardware(device=torch.device(kind))
    with pytest.raises(UserError, match="fp8_head=true: this device has no FP8"):
        train_gpt.prepare_device(hardware, hyperparameters("h100-fp8"))
