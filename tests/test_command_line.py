"""The command line: values, presets, defaults edited in the file, and each mistake one sentence."""
import dataclasses
import importlib.util
import inspect
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import (
    DATED,
    ROOT,
    SCRIPT,
    TINY,
    Result,
    hyperparameters,
    make_data,
    make_trainer,
    next_loss,
    run,
    write_shard,
)

import train_gpt
from train_gpt import (
    LAPTOP,
    LAPTOP_DESIGN,
    MAY_CHANGE_ON_RESUME,
    PRESETS,
    Hyperparameters,
    UserError,
    asdict,
    parse_command_line,
    resolve,
    layers_without_attention,
    table_of_layer,
)

FIELDS = {field.name: field for field in dataclasses.fields(Hyperparameters)}
DEFAULTS = {name: field.default for name, field in FIELDS.items()}
# What only says where a run computes and what it writes.
UNSTATED = {"preset", *MAY_CHANGE_ON_RESUME} - {"target_loss", "val_every", "tune_kernels",
                                                "tune_products"}


def assert_one_sentence(message: str) -> None:
    assert "\n" not in message and len(message) < 300
    assert not re.search(r"\w(Error|Exception)\b|Traceback|<class|errno", message), message


def refusal(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        parse_command_line(list(arguments))
    message = str(caught.value)
    assert_one_sentence(message)
    return message


def refused(arguments: list[str], capsys, *expected: str, module=train_gpt) -> None:
    """main, in this process, prints one sentence with all that is expected, and returns 2."""
    assert module.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    assert_one_sentence(line)
    for part in expected:
        assert part in line, line


# ---- what is accepted ----

def test_every_field_has_a_kind_that_can_be_parsed():
    assert {field.type for field in FIELDS.values()} <= {int, float, str, bool, tuple, str | tuple}


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in ("preset", "sample")])
def test_every_default_can_be_written_on_the_command_line(name):
    default = DEFAULTS[name]
    hp = parse_command_line(["--preset=h100", f"--{name}={default}"])
    assert getattr(hp, name) == default
    assert type(getattr(hp, name)) is type(default)


@pytest.mark.parametrize("argument, name, value", [
    ("--num_steps=77", "num_steps", 77), ("--num_steps=1_000", "num_steps", 1000),
    ("--num_steps=1e3", "num_steps", 1000), ("--num_steps=2.0", "num_steps", 2),
    ("--cooldown=0.25", "cooldown", 0.25), ("--cooldown=600", "cooldown", 600.0),
    ("--softcap=3e1", "softcap", 30.0), ("--save_model=no", "save_model", False),
    ("--save_model=FALSE", "save_model", False), ("--muon_lerp=0", "muon_lerp", False),
    ("--tune_kernels", "tune_kernels", True), ("--tune_kernels=yes", "tune_kernels", True),
    ("--log_dir=a=b", "log_dir", "a=b"), ("--run_id=", "run_id", ""),
    ("--run_id=My_run.2+x-1", "run_id", "My_run.2+x-1"),
    ("--log_dir=some folder", "log_dir", "some folder"),
    ("--no_attention=(3,)", "no_attention", (3,)), ("--no_attention=()", "no_attention", ()),
    ("--copy_lengths=(2, 4)", "copy_lengths", (2, 4)),
    ("--no_attention=none", "no_attention", "none"),
    ("--seed=12345678901234567", "seed", 12345678901234567),
    (f"--seed={2**63 - 1}", "seed", 2**63 - 1),
])
def test_values(argument, name, value):
    found = getattr(parse_command_line(["--preset=h100", argument]), name)
    assert found == value
    assert type(found) is type(value)


def test_the_largest_seed_seeds_everything(data):
    hp = parse_command_line([*TINY, *data, f"--seed={2**63 - 1}", "--epochs=2"])
    assert np.isfinite(make_trainer(hp).model.embed.weight.detach().numpy()).all()


def test_of_two_values_the_later_wins():
    assert parse_command_line(["--preset=h100", "--num_steps=3", "--num_steps=4"]).num_steps == 4


# ---- presets ----

def test_the_fields_of_presets_exist_and_have_their_type():
    assert set(PRESETS) >= {"h100", "laptop", *DATED}
    for fields in (*PRESETS.values(), LAPTOP_DESIGN):
        assert set(fields) <= set(FIELDS)
        for name, value in fields.items():
            assert isinstance(value, FIELDS[name].type), name


def test_the_defaults_are_the_h100_run():
    assert PRESETS["h100"].items() <= DEFAULTS.items()
    assert asdict(hyperparameters("h100")) == DEFAULTS | dict(preset="h100")


def test_h100_replaces_what_an_earlier_preset_set():
    combined = asdict(hyperparameters("2024-12-10", "h100"))
    assert combined == DEFAULTS | dict(preset="2024-12-10+h100")


def test_each_run_has_origins_of_its_own():
    train_gpt.Hyperparameters().origins["fp8_head"] = "hardware"
    assert train_gpt.Hyperparameters().origins["fp8_head"] == "default"


@pytest.mark.parametrize("preset", DATED)
def test_a_dated_preset_states_every_field_that_can_change_the_training(preset):
    assert set(FIELDS) - set(PRESETS[preset]) == UNSTATED


def with_laptop_layout(*presets: str) -> dict:
    return LAPTOP_DESIGN if "laptop" in presets else {}


@pytest.mark.parametrize("first, second", [
    ("2024-12-10", "laptop"), ("laptop", "2024-12-10"), ("2024-12-04", "2025-01-04"),
    ("h100", "laptop"), ("laptop", "h100")])
def test_later_presets_win_field_by_field(first, second):
    hp = parse_command_line([f"--preset={first}", f"--preset={second}"])
    expected = DEFAULTS | with_laptop_layout(first, second) | PRESETS[first] | PRESETS[second]
    assert asdict(hp) == expected | dict(preset=f"{first}+{second}")
    assert parse_command_line([f"--preset={first}+{second}"]) == hp


@pytest.mark.parametrize("preset", DATED)
def test_a_dated_preset_at_laptop_size_keeps_its_architecture(preset):
    hp = hyperparameters(preset, "laptop")
    dated = hyperparameters(preset)
    for name in ("value_layout", "value_lambdas", "first_layer_values", "no_attention", "softcap",
                 "rotary_base", "rotary_fraction", "rotary_endpoint", "window_unit", "muon_lerp",
                 "muon_rate", "adam_beta1"):
        assert getattr(hp, name) == getattr(dated, name), name
    for name, value in LAPTOP.items():
        assert getattr(hp, name) == value, name
    assert len(table_of_layer(hp)) == hp.num_layers == LAPTOP["num_layers"]


def test_h100_replaces_all_of_an_earlier_preset():
    hp = parse_command_line(["--preset=laptop", "--preset=h100"])
    assert dataclasses.replace(hp, preset="h100") == parse_command_line(["--preset=h100"])


@pytest.mark.parametrize("order", [1, -1])
def test_explicit_values_win_wherever_they_stand(order):
    arguments = ["--num_steps=9", "--preset=laptop", "--softcap=4", "--preset=2024-12-10"]
    hp = parse_command_line(arguments[::order])
    assert (hp.num_steps, hp.softcap) == (9, 4.0)


@pytest.mark.parametrize("arguments", [[], ["--preset=auto"]])
@pytest.mark.parametrize("gpus, preset", [(True, "h100"), (False, "laptop")])
def test_the_default_preset_follows_the_hardware(monkeypatch, arguments, gpus, preset):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    assert parse_command_line(arguments) == parse_command_line([f"--preset={preset}"])


@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_is_valid_alone_and_at_laptop_size(preset):
    assert parse_command_line([f"--preset={preset}"]).preset == preset
    parse_command_line([f"--preset={preset}", "--preset=laptop"])


def listed_by_the_log(hp: Hyperparameters) -> dict[str, str]:
    lines = train_gpt.describe_preset(hp)
    assert max(map(len, lines)) <= 100
    text = " ".join(lines).removeprefix(f"preset {hp.preset} sets ")
    return dict(re.findall(r"(\w+)=(\(.*?\)|[^,]*)", text))


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_preset_changes_can_be_listed(preset):
    fields = with_laptop_layout(preset) | PRESETS[preset]
    changed = {name: str(value) for name, value in fields.items() if value != DEFAULTS[name]}
    assert listed_by_the_log(hyperparameters(preset)) == changed
    without = listed_by_the_log(hyperparameters(preset, num_steps=77, model_dim=96))
    assert without == {name: value for name, value in changed.items()
                       if name not in ("num_steps", "model_dim")}, "these are the user's"


def test_a_log_lists_what_the_preset_changes(data, capsys):
    arguments = [*TINY, *data, "--run_id=listed"]
    assert train_gpt.main(arguments) == 0
    log = Result(parse_log_dir(data) / "listed").log
    lines = train_gpt.describe_preset(parse_command_line(arguments))
    assert "\n".join(lines) + "\n" in log
    assert "target_loss=1.2" in "\n".join(lines)
    assert "\n".join(lines) in capsys.readouterr().out


def parse_log_dir(data: list[str]):
    return ROOT / data[-1].removeprefix("--log_dir=")


# ---- defaults edited in the file ----

@pytest.fixture
def edited(tmp_path):
    """edited((old text, new text), …): a copy of train_gpt.py with these edits, imported."""
    def edit(*changes: tuple[str, str]):
        source = SCRIPT.read_text()
        for old, new in changes:
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        path = tmp_path / "train_gpt.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("edited_train_gpt", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # inspect finds the source of its classes by this
        spec.loader.exec_module(module)
        return module
    yield edit
    sys.modules.pop("edited_train_gpt", None)


def default_line(name: str) -> str:
    """The line of the file that has the default."""
    (line,) = re.findall(rf"^    {name}: .+$", inspect.getsource(Hyperparameters), re.M)
    return line


def edit_default(name: str, value) -> tuple[str, str]:
    """As a user would: the value is replaced, the rest of the line stays."""
    line = default_line(name)
    return line, re.sub(r"= .+?(?=  +#)", lambda _: f"= {value!r}", line, count=1)


def another(name: str, value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    others = [choice for choice in train_gpt.CHOICES.get(name, ("elsewhere",)) if choice != value]
    return others[0]


def test_no_edit_of_a_default_changes_a_dated_preset(edited):
    changed = {name: another(name, value) for name, value in DEFAULTS.items()
               if name not in UNSTATED}
    module = edited(*(edit_default(name, value) for name, value in changed.items()))
    for name, value in changed.items():
        assert getattr(module.Hyperparameters, name) == value != DEFAULTS[name], "not edited"
    for preset in (*DATED, *(f"{preset}+laptop" for preset in DATED)):
        before = asdict(resolve(dict(preset=preset)))
        assert module.asdict(module.resolve(dict(preset=preset))) == before, preset


def test_an_edited_default_is_what_an_h100_run_uses(edited):
    module = edited(edit_default("num_steps", 2000), edit_default("muon_rate", 0.06))
    hp = module.resolve(dict(preset="h100"))
    assert (hp.num_steps, hp.muon_rate) == (2000, 0.06)
    assert hp.origins["num_steps"] == "default"


@pytest.mark.parametrize("gpus", [True, False])
def test_an_edited_preset_is_used(edited, monkeypatch, gpus):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    module = edited(edit_default("preset", "2024-12-10"))
    hp = module.parse_command_line([])
    assert (hp.preset, hp.value_layout, hp.num_steps) == ("2024-12-10", "mirrored", 1480)
    assert module.parse_command_line(["--preset=laptop"]).preset == "laptop"


def test_an_edited_device_is_used_and_decides_the_preset(edited, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    module = edited(edit_default("device", "cpu"))
    hp = module.parse_command_line([])
    assert (hp.device, hp.preset) == ("cpu", "laptop")
    assert module.find_hardware(hp).device.type == "cpu"
    assert module.parse_command_line(["--device=cuda"]).preset == "h100"


def test_an_edit_of_the_laptop_run_is_used(edited):
    module = edited(("num_steps=950, batch_tokens=4096", "num_steps=321, batch_tokens=8192"),
                    ("num_layers=2, num_heads=2", "num_layers=4, num_heads=2"),
                    ('    value_layout="per_layer", no_attention="none",',
                     '    value_layout=(0, 1, 1, 0), no_attention=(2,),'))
    hp = module.resolve(dict(preset="laptop"))
    assert (hp.num_steps, hp.batch_tokens) == (321, 8192)
    assert table_of_layer(hp) == (0, 1, None, 0) and layers_without_attention(hp) == (2,)
    assert hp.origins["num_steps"] == "preset laptop"
    dated = module.resolve(dict(preset="2024-12-10+laptop"))
    assert (dated.num_steps, dated.value_layout) == (321, "mirrored")


def test_the_edited_file_shows_its_values(edited):
    """Run as users run it: as a script."""
    module = edited(edit_default("preset", "2024-12-10"), edit_default("device", "cpu"),
                    edit_default("log_every", 5))
    process = subprocess.run([sys.executable, module.__file__, "--show"], text=True,
                             capture_output=True)
    assert process.returncode == 0 and process.stderr == ""
    assert {"preset=2024-12-10\t# default", "device=cpu\t# default", "log_every=5\t# default",
            "softcap=30.0\t# preset 2024-12-10"} <= set(process.stdout.splitlines())


@pytest.mark.parametrize("value, sentence", [
    ("x", "--num_steps='x': expected a whole number"),
    (2.5, "--num_steps=2.5: expected a whole number"),
    (True, "--num_steps=True: expected a whole number"),
    (None, "--num_steps=None: expected a whole number"),
    (0, "--num_steps=0: expected at least 1")])
@pytest.mark.parametrize("option", ["--show", "--num_heads=6"])
def test_a_bad_edit_is_one_sentence(edited, capsys, value, sentence, option):
    module = edited(edit_default("num_steps", value))
    refused(["--preset=h100", option], capsys, sentence, module=module)


@pytest.mark.parametrize("name, value, sentence", [
    ("softcap", float("nan"), None),
    ("log_every", "x", "--log_every='x': expected a whole number"),
    ("value_layout", (0, 1), "--value_layout=(0, 1): expected one entry for each of the 12 layers"),
    ("no_attention", 7, "--no_attention=7: expected a name or a tuple"),
    ("preset", "labtop", "--preset=labtop: expected one of h100,"),
    ("device", "gpu", "--device=gpu: expected one of auto, cuda, cpu, mps")])
@pytest.mark.parametrize("option", ["--show", "--help"])
def test_other_bad_edits_are_one_sentence_too(edited, capsys, monkeypatch, name, value, sentence,
                                              option):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    change = edit_default(name, value)
    if sentence is None:
        change = default_line(name), default_line(name).replace("15.0", "float('nan')")
        sentence = "--softcap=nan: expected at least 0"
    refused([option], capsys, sentence, module=edited(change))


@pytest.mark.parametrize("ending", ["", " # half as many", "  # with 100 % of it", "# close"])
def test_a_comment_may_be_edited_or_left_out(edited, capsys, ending):
    line = default_line("num_steps")
    module = edited((line, line.partition("#")[0].rstrip() + ending))
    assert module.parse_command_line(["--num_steps=7"]).num_steps == 7
    assert module.main(["--help"]) == 0
    assert "--num_steps" in capsys.readouterr().out


def test_help_shows_layouts_that_are_tuples(edited, capsys):
    module = edited(("num_layers=2, num_heads=2", "num_layers=4, num_heads=2"),
                    ('    value_layout="per_layer", no_attention="none",',
                     '    value_layout=(0, 1, 1, 0), no_attention=(),'))
    assert module.main(["--help"]) == 0
    assert "--value_layout (0, 1, 1, 0)" in capsys.readouterr().out


# ---- refusals ----

SHAPE = ["--preset=laptop", "--sequence_tokens=4096", "--batch_tokens=4096", "--val_tokens=4096",
         "--val_start=0", "--val_sequence_tokens=0", "--segment_tokens=512", "--num_layers=4",
         "--num_heads=2",
         "--model_dim=128"]

# (the value that is refused, what is expected)
REFUSED = [
    *((f"{name}={value}", f"at least {lowest}") for name, value, lowest in [
        ("num_steps", "0", 1), ("num_steps", "-5", 1), ("vocab_multiple", "0", 1),
        ("log_every", "0", 1), ("val_tokens", "0", 128), ("batch_tokens", "0", 128),
        ("num_heads", "0", 1), ("mlp_ratio", "0", 1), ("window_start", "-1", 0),
        ("window_end", "-1", 1), ("muon_steps", "0", 1), ("softcap", "-1", 0),
        ("val_every", "-1", 0), ("top_k", "-2", 0), ("temperature", "-0.5", 0),
        ("muon_decay", "-1", 0), ("embed_rate", "-0.1", 0), ("cooldown", "-1", 0),
        ("seed", "-1", 0), ("document_token", "-1", 0), ("segment_tokens", "-512", 0),
        ("muon_momentum", "-0.1", 0), ("adam_beta1", "-3", 0), ("value_lambdas", "0", 1),
        ("rotary_fraction", "0", 0.001), ("rotary_base", "0.5", 1.001), ("model_dim", "1", 4),
        ("batch_tokens", "1", 128), ("num_layers", "1", 2), ("keep_checkpoints", "0", 1),
        ("adam_eps", "-1e-8", 0), ("norm_eps", "-1", 0), ("rate_floor", "-0.1", 0),
        ("val_sequence_tokens", "-128", 0)]),
    *((f"{name}={value}", f"at most {highest}") for name, value, highest in [
        ("adam_beta1", "1", 0.999999), ("adam_beta2", "1.5", 0.999999), ("value_lambdas", "3", 2),
        ("rotary_fraction", "1.5", 1), ("rate_floor", "1.1", 1), ("seed", str(2**63), 2**63 - 1),
        ("seed", "1e30", 2**63 - 1), ("batch_tokens", "1e15", 10**12),
        ("vocab_size", "70000", 65536), ("timeout", "1e300", 10**6)]),
    *((f"num_steps={value}", "a whole number") for value in
      ("1.5", "10.2", "ten", "inf", "nan", "", "1e400", "True", "None", "(1,)")),
    *((f"softcap={value}", "a number") for value in
      ("nan", "", "inf", "1e400", "a", "True", "(1.5,)")),
    *((f"save_model={value}", "true or false") for value in ("maybe", "tru", "2", "")),
    ("seed=1e999", "a whole number"),
    ("model_dim=101", "a multiple of 8 (4 × num_heads); the nearest is 104"),
    ("model_dim=122", "the nearest is 120"),
    ("batch_tokens=5000", "a multiple of sequence_tokens=4096; the nearest is 4096"),
    ("batch_tokens=7000", "the nearest is 8192"), ("val_tokens=5000", "the nearest is 4096"),
    ("sequence_tokens=4100", "a multiple of the mask's block of 128; the nearest is 4096"),
    ("val_sequence_tokens=1000", "a multiple of the mask's block of 128; the nearest is 1024"),
    ("align_documents=true", "false with segment_tokens or ngram_order"),
    ("segment_tokens=500", "a divisor of sequence_tokens=4096, such as 512"),
    ("segment_tokens=3000", "such as 512"), ("segment_tokens=5000", "such as 512"),
    ("document_token=257", "less than vocab_size=257"),
    ("document_token=70000", "less than vocab_size=257"),
    ("train_files=", "a path"), ("val_files=", "a path"), ("log_dir=", "a path"),
    *((f"run_id={name}", "a name of letters, digits and . _ + -, not a path") for name in
      ("../../x", "..", ".", "a/b", "/tmp/x", "a b", "a\nb", "~")),
    *((f"window_unit={value}", "one of block, token, token_in_block") for value in
      ("blocks", "tokens", "(block", "")),
    *((f"device={value}", "one of auto, cuda, cpu, mps") for value in ("gpu", "cuda0", "(cpu)")),
    *((f"{name}={value}", "one of auto, bfloat16, float32") for name, value in (
        ("dtype", "bf16"), ("dtype", "float"), ("dtype", "(float32)"), ("muon_dtype", "fp32"))),
    ("compile=y", "one of auto, yes, no"), ("attention=flash", "one of auto, flex, banded"),
    ("value_layout=mirror", "one of none, per_layer, mirrored, ends, or a tuple"),
    ("no_attention=second", "one of none, second_decoder"),
    ("window_rounding=nearest", "one of down, up"),
    ("short_window_layers=all", "one of none, inner"),
    ("short_window_layers=(4,)", "layers from 0 to 3"),
    *((f"preset={value}", "one of h100, laptop, 2024-11-19,") for value in
      ("labtop", "2024-12-11", "H100", "", "+", "auto+laptop")),
    ("value_layout=(0,1)", "one entry for each of the 4 layers"),
    ("value_layout=(0,1,2,3,4)", "one entry for each of the 4 layers"),
    ("value_layout=([0],1,2,3)", "a name or a tuple of whole numbers and None"),
    ("value_layout=(0,'a',1,2)", "a name or a tuple of whole numbers and None"),
    ("value_layout=(0,x,1,2)", "one of none, per_layer, mirrored, ends, or a tuple"),
    ("no_attention=(4,)", "layers from 0 to 3"), ("no_attention=(-1,)", "layers from 0 to 3"),
    ("no_attention=(0,None)", "layers from 0 to 3"),
    *((f"no_attention={value}", "a name or a tuple of whole numbers and None, such as (3,)")
      for value in ("(3)", "None", "[1]")),
]


@pytest.mark.parametrize("argument, expected", REFUSED)
def test_a_refusal_names_the_option_and_what_is_expected(argument, expected):
    """And who follows a nearest value, or takes the limit, is accepted."""
    name, _, value = argument.partition("=")
    with pytest.raises(UserError) as caught:
        parse_command_line([*SHAPE, f"--{argument}"])
    message = str(caught.value)
    if "\n" not in value:
        assert_one_sentence(message)
    assert message.startswith(f"--{name}") and expected in message, message
    advice = re.search(r"(?:nearest is|such as|at least|at most) ([\d.]+)$", message)
    if advice and argument not in ("model_dim=1", "batch_tokens=0", "batch_tokens=1",
                                   "val_tokens=0", "batch_tokens=1e15", "vocab_size=70000"):
        parse_command_line([*SHAPE, f"--{name}={advice[1]}"])


def test_the_nearest_start_of_validation_may_be_the_first_token():
    with pytest.raises(UserError, match="^--val_start=100: .*; the nearest is 0$"):
        parse_command_line([*SHAPE, "--val_sequence_tokens=1024", "--val_start=100"])


def test_validation_is_cut_into_its_own_sequences():
    assert parse_command_line([*SHAPE, "--val_sequence_tokens=1024"]).val_sequence_tokens == 1024
    expected = "--val_tokens=4096: expected a multiple of val_sequence_tokens=640; the nearest is"
    with pytest.raises(UserError, match=expected):
        parse_command_line([*SHAPE, "--val_sequence_tokens=640"])
    aligned = ["--preset=2025-07-13", "--val_tokens=1048576"]
    assert parse_command_line(aligned).sequence_tokens == 49_152


def test_a_sequence_longer_than_the_batch_is_refused():
    message = refusal("--preset=h100", "--sequence_tokens=1048576")
    assert message == ("--batch_tokens=393216: expected a multiple of sequence_tokens=1048576; the "
                       "nearest is 1048576")


@pytest.mark.parametrize("argument, nearest", [
    ("--num_step=3", "num_steps"), ("--learning_rate=3", None), ("--numsteps=3", "num_steps"),
    ("--muon_rat=3", "muon_rate"), ("num_steps=3", "num_steps"), ("-num_steps=3", "num_steps"),
    ("--modeldim=3", "model_dim"), ("--=3", None), ("", None), ("laptop", None),
    ("--helpp", None), ("--no_save_model", "save_model"), ("--batch=3", None)])
def test_unknown_names_are_refused_with_the_nearest(argument, nearest):
    message = refusal(argument)
    assert message.startswith(f"{argument}: no such option; did you mean ")
    offered = re.search(r"did you mean --(\w+)=…\?", message)[1]
    assert offered in FIELDS
    assert nearest is None or nearest == offered


def test_options_are_not_abbreviated():
    """A shorter name would change its meaning when a field is added."""
    assert "no such option" in refusal("--num_step=5")
    assert "no such option" in refusal("--softc=5")


@pytest.mark.parametrize("name", ["num_steps", "softcap", "run_id", "value_layout", "preset"])
def test_a_name_without_a_value_is_refused(name):
    assert refusal(f"--{name}") == f"--{name}: expected one argument; --help lists every option"


def test_text_to_continue_needs_a_model():
    assert "--checkpoint=: expected a model.pt" in refusal("--sample=Once upon a time")
    parse_command_line(["--sample=Once", "--checkpoint=somewhere.pt"])


def test_heads_that_do_not_divide_the_width():
    """The width has to give every head a multiple of 4: half of its pairs may be rotated."""
    message = refusal("--preset=laptop", "--num_heads=5", "--model_dim=128")
    assert message == ("--model_dim=128: expected a multiple of 20 (4 × num_heads); the nearest is "
                       "120")


@pytest.mark.parametrize("error, reason", [
    (FileNotFoundError(2, "No such file or directory", "x"), "No such file or directory"),
    (KeyError("format"), "'format' is missing"), (ValueError("two\n  lines"), "two lines"),
    (ValueError(), "no reason was given"), (EOFError(), "no reason was given")])
def test_the_reason_of_a_foreign_error_names_no_class(error, reason):
    assert train_gpt.reason_of(error) == reason


# ---- help and show ----

def test_help_lists_every_field_with_its_value_here_and_its_meaning(capsys, monkeypatch):
    for gpus, preset in ((False, "laptop"), (True, "h100")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpus=gpus: gpus)
        assert train_gpt.main(["--help"]) == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 120
        entries = dict(re.findall(r"^    --(\w+) (.*(?:\n {20,}.*)?)", text, re.M))
        assert list(entries) == list(FIELDS)
        for name, value in asdict(hyperparameters(preset)).items():
            shown = f"[{value}]" if isinstance(value, bool) else str(value)
            assert entries[name].startswith(shown), name
            meaning = entries[name].removeprefix(shown)
            assert len(meaning.split()) >= 2, f"{name} has no meaning"
        for preset in PRESETS:
            assert preset in text.replace("\n", " ").rpartition("Presets")[2]


def test_help_has_the_values_of_the_other_options(capsys):
    assert train_gpt.main(["--preset=2024-12-10", "--num_steps=77", "--help"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"--num_steps 77 ", out) and re.search(r"--value_layout mirrored ", out)


def test_help_on_a_cpu_has_the_values_of_the_laptop(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert train_gpt.main(["-h"]) == 0
    text = capsys.readouterr().out
    assert f"--num_steps {LAPTOP['num_steps']} " in text
    assert f"--num_steps {DEFAULTS['num_steps']} " not in text


def test_show_prints_every_value_with_its_origin(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(train_gpt, "missing_data", lambda hp: "fineweb 7")
    assert train_gpt.main(["--preset=2024-12-10+laptop", "--num_steps=5", "--show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("=")[0] for line in lines] == [*FIELDS, "gpus", "fetch"]
    assert {"num_steps=5\t# command line", "value_layout=mirrored\t# preset 2024-12-10",
            "model_dim=64\t# preset laptop", "log_every=10\t# default",
            "preset=2024-12-10+laptop\t# command line"} <= set(lines)
    assert lines[-2].startswith("gpus=3\t# ")
    assert lines[-1].startswith("fetch=fineweb 7\t# ")


@pytest.mark.parametrize("device, gpus", [("auto", 3), ("cuda", 3), ("cpu", 0), ("mps", 0)])
def test_show_counts_the_gpus_that_the_run_would_use(capsys, monkeypatch, device, gpus):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert train_gpt.main(["--preset=h100", f"--device={device}", "--show"]) == 0
    assert f"gpus={gpus}\t" in capsys.readouterr().out


def test_show_counts_no_gpus_that_pytorch_cannot_use(capsys, monkeypatch):
    """Where the driver is too old, PyTorch may count GPUs but use none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert train_gpt.main(["--show"]) == 0
    assert "gpus=0\t" in capsys.readouterr().out


def test_show_has_nothing_to_fetch_for_shards_of_the_user_or_for_a_saved_model(
        data, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # where there is no data/enwik8
    for arguments in ([*TINY, *data], ["--preset=laptop", "--checkpoint=model.pt", "--sample=A"]):
        assert train_gpt.main([*arguments, "--show"]) == 0
        assert "\nfetch=\t" in capsys.readouterr().out


# ---- main: exit code 2, nothing half-written ----

@pytest.mark.parametrize("options, sentence", [
    (["--train_files=nowhere/*.bin"], "nowhere/*.bin: no token shards there"),
    (["--batch_tokens=1000"], "a multiple of sequence_tokens=256; the nearest is 1024"),
    (["--num_steps=500"], "38 batches of 1024 tokens and --num_steps=500 needs 500; repeat them"),
    (["--val_tokens=102400"], "--val_tokens=102400 needs 400; lower it to --val_tokens=19968"),
    (["--num_steps=many"], "--num_steps='many': expected a whole number"),
    (["--preset=labtop"], "--preset=labtop: expected one of h100,"),
    (["--run_id=../../x"], "--run_id=../../x: expected a name"),
    (["--attention=flex"], "give --attention=banded"),
    (["--device=mps"], "this machine has none"),
    (["--device=cuda"], "--device=cuda: rank 0 needs GPU 0 and there are 0"),
    (["--checkpoint=missing.pt"], "missing.pt cannot be loaded: No such file or directory"),
    (["--resume=missing.pt"], "missing.pt cannot be loaded: No such file or directory"),
    (["num_steps=3"], "num_steps=3: no such option")])
def test_wrong_options(tmp_path, capsys, monkeypatch, options, sentence):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    refused([*TINY, *make_data(tmp_path), *options], capsys, sentence)
    assert not (tmp_path / "logs").exists()


def test_the_script_itself_exits_with_2_and_one_line():
    process = run(["--preset=labtop"])
    assert process.returncode == 2 and process.stdout == ""
    assert len(process.stderr.splitlines()) == 1


def test_batch_that_the_ranks_do_not_divide(tmp_path):
    process = run([*TINY, *make_data(tmp_path), "--batch_tokens=768"], ranks=2)
    assert process.returncode == 1  # torchrun's own
    sentence = "a multiple of 2 ranks × sequence_tokens=256; the nearest is 1024"
    assert process.stderr.count(sentence) == 1


def test_a_log_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    arguments = [*TINY, *make_data(tmp_path), f"--log_dir={tmp_path}/file"]
    assert train_gpt.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--log_dir={tmp_path}/file" in line and "give another folder" in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_log_folder_without_permission(tmp_path, capsys):
    (tmp_path / "locked").mkdir(mode=0o500)
    refused([*TINY, *make_data(tmp_path), f"--log_dir={tmp_path}/locked"], capsys,
            "Permission denied")


IN_LITTLE_MEMORY = """
import resource
import sys
sys.path.insert(0, {root!r})
import train_gpt
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))
sys.exit(train_gpt.main(sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of the address space")
def test_a_model_too_large_for_the_machine_is_one_sentence(tmp_path):
    """A matrix of it has 40 GB: the first one is refused at once."""
    program = IN_LITTLE_MEMORY.format(root=str(ROOT))
    process = subprocess.run(
        [sys.executable, "-c", program, *TINY, *make_data(tmp_path), "--model_dim=100000"],
        capture_output=True, text=True, timeout=600)
    assert process.returncode == 2, process.stderr
    assert process.stderr == ("error: out of memory with --sequence_tokens=256; give "
                              "--sequence_tokens=128\n")


# ---- shards ----

TOKENS = np.arange(2000) % 60
BROKEN_SHARDS = {
    "magic": (lambda p: write_shard(p, TOKENS, magic=7), "not a token shard: it begins with 7"),
    "version": (lambda p: write_shard(p, TOKENS, version=2), "shard version 2, not 1"),
    "claims_more": (lambda p: write_shard(p, TOKENS, claimed=3000),
                    "damaged: it has 5,024 bytes instead of 7,024"),
    "claims_fewer": (lambda p: write_shard(p, TOKENS, claimed=1000),
                     "damaged: it has 5,024 bytes instead of 3,024"),
    "claims_less_than_nothing": (lambda p: write_shard(p, TOKENS, claimed=-1),
                                 "damaged: it has 5,024 bytes instead of 1,022"),
    "truncated": (lambda p: p.write_bytes(write_shard(p, TOKENS).read_bytes()[:-1]),
                  "damaged: it has 5,023 bytes instead of 5,024"),
    "shorter_than_a_header": (lambda p: p.write_bytes(b"abc"), "not a token shard"),
    "empty": (lambda p: p.write_bytes(b""), "not a token shard"),
    "a_folder": (lambda p: p.mkdir(), "Is a directory"),
    "outside_vocabulary": (lambda p: write_shard(p, TOKENS + 10), "is outside vocab_size=64"),
}


@pytest.mark.parametrize("fault", BROKEN_SHARDS)
def test_a_broken_shard_is_named(tmp_path, capsys, fault):
    data = make_data(tmp_path)
    for number in (0, 1):
        (tmp_path / f"train_00000{number}.bin").unlink()
    make, sentence = BROKEN_SHARDS[fault]
    make(tmp_path / "train_000000.bin")
    assert train_gpt.main([*TINY, *data, "--num_steps=1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert_one_sentence(line)
    assert "train_000000.bin" in line and sentence in line


def test_a_broken_shard_stops_every_rank(tmp_path):
    data = make_data(tmp_path)
    write_shard(tmp_path / "train_000000.bin", np.full(20_000, 64))
    for option, where in (("--ngram_order=0", "the 129 from "),
                          ("--ngram_order=3", "the 1986 from 513 on")):
        process = run([*TINY, *data, option], ranks=2)
        assert process.returncode == 1
        assert f"token 64 among {where}" in process.stderr
        assert "is outside vocab_size=64" in process.stderr


# ---- while training ----

@pytest.mark.parametrize("ranks, code", [(1, 2), (2, 1)])  # ours, torchrun's
def test_a_loss_that_is_not_finite_stops_every_rank_and_names_the_step(tmp_path, ranks, code):
    process = run([*TINY, *make_data(tmp_path), "--head_rate=1e38", "--softcap=0",
                   "--num_steps=10"], ranks)
    assert process.returncode == code
    assert "Traceback" not in process.stderr.partition("torch/distributed")[0]
    (sentence,) = [line for line in process.stderr.splitlines() if line.startswith("error")]
    assert "the loss of step" in sentence and "lower the rates" in sentence


def test_the_first_tensor_that_is_not_finite_is_named(data):
    trainer = make_trainer(parse_command_line([*TINY, *data]))
    with torch.no_grad():
        trainer.model.blocks[2].up.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="step 1 is nan: parameter blocks.2.up.weight is not finite;"
                                        " the batch is 0, number 0 of .*train_000000.bin"):
        next_loss(trainer, 0)


@pytest.mark.parametrize("entry, reason", [
    (math.nan, "gradient of blocks.0.mix is not finite"), (0.0, "all gradients are finite")])
def test_a_step_that_is_not_finite_names_the_gradient_and_changes_no_weight(data, entry, reason):
    trainer = make_trainer(parse_command_line([*TINY, *data]))
    trainer.model.register_forward_hook(lambda *_: torch.tensor(math.inf, requires_grad=True))
    for p in trainer.model.parameters():
        p.grad = torch.ones_like(p)
    trainer.model.blocks[0].mix.grad = torch.tensor([0.0, entry])
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(UserError, match=f"is inf: {reason}; the batch is 0"):
        next_loss(trainer, 0)
    assert all(map(torch.equal, before, trainer.model.parameters()))


# ---- checkpoints ----

def test_a_damaged_checkpoint_is_refused_and_nothing_in_it_runs(tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    torch.save(dict(format=train_gpt.CHECKPOINT_FORMAT, model=Evil()), tmp_path / "evil.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "evil.pt").read_bytes()[:100])
    torch.save(dict(format=99, step=1), tmp_path / "future.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    for name in ("evil", "cut", "future", "empty"):
        assert train_gpt.main([f"--checkpoint={tmp_path}/{name}.pt", "--device=cpu"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert_one_sentence(line)
        assert f"{name}.pt cannot be loaded: " in line
        assert "weights_only" not in line, "torch's advice is to run what is in it"
    assert not (tmp_path / "owned").exists()
