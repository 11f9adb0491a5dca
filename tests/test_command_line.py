"""Hyperparameters: parsing, presets, refusals that name the nearest valid value, and the help."""
import dataclasses
import re

import pytest

import train_gpt
from conftest import DATED
from train_gpt import PRESETS, Hyperparameters, UserError, parse_command_line

FIELDS = {field.name: field for field in dataclasses.fields(Hyperparameters)}


def refusal(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        parse_command_line(list(arguments))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 250, "one sentence"
    return message


# ---- what is accepted --------------------------------------------------------------------------------------

def test_every_field_has_a_kind_that_can_be_parsed():
    assert {field.type for field in FIELDS.values()} <= {int, float, str, bool, str | tuple}


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in ("preset", "sample")])
def test_every_default_can_be_written_on_the_command_line(name):
    default = FIELDS[name].default
    hp = parse_command_line(["--preset=h100", f"--{name}={default}"])
    assert getattr(hp, name) == (65536 if name == "sequence_tokens" else default)  # 0: as long as fits
    assert type(getattr(hp, name)) is type(default)


@pytest.mark.parametrize("argument, name, value", [
    ("--num_steps=77", "num_steps", 77), ("--num-steps=77", "num_steps", 77),
    ("--num_steps=1e3", "num_steps", 1000), ("--num_steps=2.0", "num_steps", 2),
    ("--cooldown=0.25", "cooldown", 0.25), ("--cooldown=600", "cooldown", 600.0),
    ("--softcap=3e1", "softcap", 30.0), ("--save_model=no", "save_model", False),
    ("--save_model=FALSE", "save_model", False), ("--muon_lerp=0", "muon_lerp", False),
    ("--tune_kernels", "tune_kernels", True), ("--tune_kernels=yes", "tune_kernels", True),
    ("--run_id=a=b", "run_id", "a=b"), ("--run_id=", "run_id", ""),
    ("--log_dir=some folder", "log_dir", "some folder"),
    ("--no_attention=(3)", "no_attention", (3,)), ("--no_attention=()", "no_attention", ()),
    ("--no_attention=none", "no_attention", "none"), ("--seed=12345678901234567", "seed", 12345678901234567),
])
def test_values(argument, name, value):
    found = getattr(parse_command_line(["--preset=h100", argument]), name)
    assert found == value and type(found) is type(value)


# ---- presets -----------------------------------------------------------------------------------------------

def test_presets_are_those_that_were_promised():
    assert set(PRESETS) >= {"h100", "laptop", *DATED}
    for changes in PRESETS.values():
        assert set(changes) <= set(FIELDS)
        for name, value in changes.items():
            assert isinstance(value, FIELDS[name].type), name


@pytest.mark.parametrize("first, second", [("2024-12-10", "laptop"), ("laptop", "2024-12-10"),
                                           ("2024-12-04", "2025-01-04"), ("h100", "laptop")])
def test_later_presets_win_field_by_field(first, second):
    hp = parse_command_line([f"--preset={first}", f"--preset={second}"])
    defaults = {name: field.default for name, field in FIELDS.items()} | dict(sequence_tokens=65536)
    for name, value in (defaults | PRESETS[first] | PRESETS[second]).items():
        assert name == "preset" or getattr(hp, name) == value, name
    assert hp.preset == f"{first}+{second}"
    assert parse_command_line([f"--preset={first}+{second}"]) == hp


def test_a_dated_preset_at_laptop_scale_keeps_its_architecture():
    hp = parse_command_line(["--preset=2024-12-10", "--preset=laptop"])
    assert (hp.value_layout, hp.softcap, hp.rotary_base) == ("mirrored", 30.0, 10_000.0)
    assert (hp.vocab_size, hp.device, hp.num_layers) == (257, "auto", PRESETS["laptop"]["num_layers"])
    assert len(hp.value_tables) == hp.num_layers and hp.layers_without_attention == ()


@pytest.mark.parametrize("order", [1, -1])
def test_explicit_values_win_wherever_they_stand(order):
    arguments = ["--num_steps=9", "--preset=laptop", "--softcap=4", "--preset=2024-12-10"]
    hp = parse_command_line(arguments[::order])
    assert (hp.num_steps, hp.softcap) == (9, 4.0)


def test_of_two_values_the_later_wins():
    assert parse_command_line(["--preset=h100", "--num_steps=3", "--num_steps=4"]).num_steps == 4


@pytest.mark.parametrize("arguments", [[], ["--preset=auto"]])
@pytest.mark.parametrize("gpus, preset", [(True, "h100"), (False, "laptop")])
def test_the_default_preset_follows_the_hardware(monkeypatch, arguments, gpus, preset):
    monkeypatch.setattr(train_gpt.torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(train_gpt, "settle_sequence", lambda hp: None)
    assert parse_command_line(arguments) == parse_command_line([f"--preset={preset}"])


@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_is_valid_alone_and_at_laptop_scale(preset):
    assert parse_command_line([f"--preset={preset}"]).preset == preset
    parse_command_line([f"--preset={preset}", "--preset=laptop"])


# ---- refusals ----------------------------------------------------------------------------------------------

# (the argument that is refused, the value that is nearest to it)
NEAREST = [
    ("num_steps=0", 1), ("num_steps=-5", 1), ("vocab_multiple=0", 1), ("log_every=0", 1),
    ("val_tokens=0", 4096), ("batch_tokens=0", 4096),
    ("num_heads=0", 1), ("mlp_ratio=0", 1), ("window_start=0", 1), ("window_end=-1", 1), ("muon_steps=0", 1),
    ("softcap=-1", 0), ("val_every=-1", 0), ("top_k=-2", 0), ("temperature=-0.5", 0), ("muon_decay=-1", 0),
    ("embed_rate=-0.1", 0), ("cooldown=-1", 0), ("seed=-1", 0), ("document_token=-1", 0),
    ("segment_tokens=-512", None),
    ("num_steps=1.5", 2), ("num_steps=10.2", 10), ("num_steps=ten", None), ("num_steps=inf", None),
    ("softcap=nan", None), ("softcap=", None), ("seed=1e999", None),
    ("adam_beta1=1", None), ("adam_beta2=1.5", None), ("muon_momentum=-0.1", 0), ("adam_beta1=-3", 0),
    ("value_lambdas=3", 2), ("value_lambdas=0", 1), ("rotary_fraction=1.5", 1), ("rotary_fraction=0", None),
    ("rotary_base=0.5", None), ("model_dim=101", 104), ("model_dim=1", 8), ("model_dim=122", 120),
    ("batch_tokens=5000", 4096), ("batch_tokens=7000", 8192), ("batch_tokens=1", 4096),
    ("val_tokens=5000", 4096),
    ("sequence_tokens=4100", 4096), ("segment_tokens=500", 512), ("segment_tokens=3000", None),
    ("segment_tokens=5000", 4096), ("document_token=257", 256), ("document_token=70000", 256),
    ("save_model=maybe", None), ("save_model=tru", "true"), ("save_model=fals", "false"),
    ("window_unit=blocks", "block"), ("window_unit=tokens", "token"), ("device=gpu", None),
    ("device=cuda0", "cuda"),
    ("dtype=bf16", "bfloat16"), ("dtype=float", "float32"), ("muon_dtype=fp32", "float32"),
    ("compile=y", "yes"),
    ("attention=flash", None), ("value_layout=end", "ends"), ("value_layout=mirror", "mirrored"),
    ("no_attention=second", "second_decoder"), ("preset=labtop", "laptop"), ("preset=2024-12-11", None),
    ("preset=H100", "h100"), ("preset=", None), ("dtype=(float32)", "float32"), ("device=(cpu)", "cpu"),
    ("window_unit=(block", "block"),
    ("value_layout=(0,1)", None), ("value_layout=(0,x,1,2)", None), ("value_layout=(0,1,2,3,4)", None),
    ("value_layout=(0,-1,2,3)", None), ("no_attention=(4,)", None), ("no_attention=(0,None)", None),
    ("no_attention=(x)", None),
]


@pytest.mark.parametrize("argument, nearest", NEAREST)
def test_a_refusal_names_the_value_and_the_nearest_valid_one(argument, nearest):
    """And who follows it is let in. The laptop preset: 4 layers, 2 heads, width 128, sequences of 4096."""
    name, _, value = argument.partition("=")
    shape = ["--preset=laptop", "--sequence_tokens=4096", "--batch_tokens=4096", "--val_tokens=4096",
             "--segment_tokens=512", "--num_layers=4", "--num_heads=2", "--model_dim=128"]
    message = refusal(*shape, f"--{argument}")
    assert f"--{name}=" in message and value in message.replace(" ", "")
    offered = re.search(rf"nearest is (--{name}=(\S+))$", message)
    assert offered, message
    parse_command_line([*shape, offered[1]])
    if isinstance(nearest, (int, float)):
        assert float(offered[2]) == nearest, message
    elif nearest:
        assert offered[2] == nearest, message


@pytest.mark.parametrize("argument, nearest", [
    ("--num_step=3", "--num_steps="), ("--learning_rate=3", None), ("--numsteps=3", "--num_steps="),
    ("--muon_rat=3", "--muon_rate="), ("num_steps=3", "--num_steps="), ("-num_steps=3", "--num_steps="),
    ("--modeldim=3", "--model_dim="), ("--=3", None), ("", None), ("laptop", None), ("--helpp", None),
])
def test_unknown_names_are_refused_with_the_nearest(argument, nearest):
    message = refusal(argument)
    assert message.startswith(f"{argument}: no such hyperparameter")
    offered = re.search(r"nearest is --(\w+)=", message)[1]
    assert offered in FIELDS
    assert nearest is None or nearest == f"--{offered}="


@pytest.mark.parametrize("name", ["num_steps", "softcap", "run_id", "value_layout", "preset"])
def test_a_name_without_a_value_is_refused(name):
    assert refusal(f"--{name}").startswith(f"--{name}: ")


def test_text_to_continue_needs_a_model():
    assert "--checkpoint=" in refusal("--sample=Once upon a time")
    parse_command_line(["--sample=Once", "--checkpoint=somewhere.pt"])


def test_heads_that_do_not_divide_the_width():
    """The width has to give every head a multiple of 4: half of its pairs turn."""
    message = refusal("--preset=laptop", "--num_heads=5", "--model_dim=128")
    assert "multiple of 4 × num_heads = 20" in message and "--model_dim=120" in message


# ---- help and the ends of the program ----------------------------------------------------------------------

def test_help_lists_every_field_with_its_default_and_meaning(capsys):
    assert train_gpt.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, field in FIELDS.items():
        (line,) = [line for line in lines if line.startswith(f"  --{name}=")]
        assert line.startswith(f"  --{name}={field.default}")
        meaning = line.removeprefix(f"  --{name}={field.default}").strip()
        assert len(meaning.split()) >= 2, f"{name} has no meaning"
    for preset in PRESETS:
        assert preset in lines[-1]
    assert max(map(len, lines)) <= 160


def test_a_refusal_ends_the_program_with_one_line_and_a_code(capsys):
    assert train_gpt.main(["--num_steps=0"]) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert "--num_steps=0" in line and "--num_steps=1" in line


def test_show_prints_what_was_resolved(capsys):
    assert train_gpt.main(["--preset=2024-12-10", "--num_steps=5", "--show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"num_steps=5", "value_layout=mirrored", "softcap=30.0"} <= set(lines)
    assert [line.partition("=")[0] for line in lines] == list(FIELDS)
