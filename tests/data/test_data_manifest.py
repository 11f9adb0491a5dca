"""What the trainer asks of data/: check_manifest of shards.py, gpt2_codec of vocabulary.py."""

import json
import subprocess
import sys

import pytest
from data_helpers import DATA, ROOT, environment
from hypothesis import given, settings
from hypothesis import strategies as st
from fuzz import mutate, mutations

import shards
import vocabulary

TOKENS = {"a_train_000000.bin": 3000, "a_train_000001.bin": 2000}
SHA256 = "ab" * 32


def write_manifest(folder, **changes) -> None:
    entries = [
        dict(
            file=file,
            split="train",
            tokens=tokens,
            documents=1,
            text_bytes=3 * tokens,
            sha256=SHA256,
        )
        for file, tokens in TOKENS.items()
    ]
    manifest = dict(
        format=1,
        complete=True,
        source="a test",
        tokenizer="bytes",
        vocab_size=64,
        document_token=63,
        shards=entries,
    )
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


def check(folder, tokens=TOKENS) -> dict:
    return shards.check_manifest(folder, tokens, 64, 63)


def test_a_manifest_that_fits_is_summed_up(tmp_path):
    write_manifest(tmp_path)
    assert check(tmp_path) == {
        "text_bytes": 15_000,
        "tokens": 5000,
        "sha256": dict.fromkeys(TOKENS, SHA256),
    }
    one = {"a_train_000001.bin": 2000}
    assert check(tmp_path, one) == {
        "text_bytes": 6000,
        "tokens": 2000,
        "sha256": dict.fromkeys(one, SHA256),
    }


def entry(**changes) -> dict:
    whole = dict(
        file="a_train_000000.bin", split="train", tokens=3000, documents=1, text_bytes=9000
    )
    return {key: value for key, value in (whole | changes).items() if value != "gone"}


def test_what_a_manifest_does_not_know_stays_unknown(tmp_path):
    write_manifest(
        tmp_path,
        shards=[entry(text_bytes=None), entry(file="a_train_000001.bin", tokens=2000, sha256="")],
    )
    assert check(tmp_path) == {"text_bytes": None, "tokens": 5000, "sha256": dict.fromkeys(TOKENS)}


def test_the_manifests_of_the_scripts_pass(tmp_path):
    with shards.ShardSet(tmp_path, "x", "bytes", 257, 256, shards.BYTE_LENGTHS) as writer:
        writer.append("train", shards.np.array([256, 65, 66]))
        writer.commit("a test")
    found = shards.check_manifest(tmp_path, {"x_train_000000.bin": 3}, 257, 256)
    sha256 = shards.sha256_of(tmp_path / "x_train_000000.bin")
    assert found == {"text_bytes": 2, "tokens": 3, "sha256": {"x_train_000000.bin": sha256}}


@pytest.mark.parametrize(
    "changes, sentence",
    [
        (
            dict(vocab_size=50257),
            r"^--vocab_size=64: \S+/manifest.json says 50257; give --vocab_size=50257$",
        ),
        (
            dict(document_token=0),
            r"^--document_token=63: \S+/manifest.json says 0; give --document_token=0$",
        ),
        (dict(complete=False), "not complete, .* run it again"),
        (dict(complete="no"), "not complete"),
        (dict(format=2), "format 2, expected 1"),
        (dict(format=["\n" * 9999]), "format .*, expected 1"),
        (dict(vocab_size="64"), "damaged, its vocab_size is not a number"),
        (dict(document_token=True), "damaged, its document_token is not a number"),
        (dict(shards=[]), "a_train_000000.bin: not in manifest.json"),
        (dict(shards=3), "damaged, its shards are not a list"),
        (dict(shards=[3]), "damaged, entry 0"),
        (dict(shards=[entry(file="gone")]), "damaged, entry 0 .* no file"),
        (dict(shards=[entry(split="gone")]), "damaged, entry 0 .* no split"),
        (dict(shards=[entry(), entry(tokens="gone")]), "damaged, the tokens of entry 1"),
        (dict(shards=[entry(text_bytes="gone")]), "damaged, the text_bytes of entry 0"),
        (dict(shards=[entry(text_bytes=10**400)]), "damaged, the text_bytes of entry 0"),
        (dict(shards=[entry(text_bytes=-5)]), "damaged, the text_bytes of entry 0"),
        (dict(shards=[entry(tokens=3000.0)]), "damaged, the tokens of entry 0"),
        (dict(shards=[entry(sha256=[1])]), "damaged, the sha256 of entry 0"),
        (
            dict(shards=[entry(tokens=2999)]),
            r"a_train_000000.bin: it holds 3,000 tokens and manifest.json says 2,999",
        ),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(tmp_path, changes, sentence):
    write_manifest(tmp_path, **changes)
    with pytest.raises(shards.UserError, match=sentence) as refused:
        check(tmp_path)
    assert "\n" not in str(refused.value) and "Error" not in str(refused.value)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b"1" * 5000]
)
def test_what_is_no_manifest_is_refused(tmp_path, content):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(
        shards.UserError, match="manifest.json: (damaged, it is not JSON|format None, expected 1)"
    ):
        check(tmp_path)


def test_shards_of_several_folders(tmp_path):
    paths = {}
    for name in ("first", "second", "without"):
        (tmp_path / name).mkdir()
        paths[name] = (
            f"{tmp_path}/{name}//a_train_000000.bin"  # as given, not as Path would write it
        )
    write_manifest(tmp_path / "first")
    write_manifest(tmp_path / "second", shards=[entry(text_bytes=3000)])
    held = {paths["first"]: 3000, paths["second"]: 3000}
    assert shards.check_manifests(held, 64, 63) == (
        {paths["first"]: SHA256, paths["second"]: None},
        2.0,
    )
    held[paths["without"]] = 500
    hashes, ratio = shards.check_manifests(held, 64, 63)
    assert ratio is None and hashes == {
        paths["first"]: SHA256,
        paths["second"]: None,
        paths["without"]: None,
    }
    with pytest.raises(shards.UserError, match="give --vocab_size=64"):
        shards.check_manifests(held, 65, 63)


def test_what_a_run_has_to_fetch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    laptop = ("data/enwik8/enwik8_train_*.bin", "data/enwik8/enwik8_val_*.bin")
    public = ("data/fineweb10B/fineweb_train_*.bin", "data/fineweb10B/fineweb_val_*.bin")
    assert shards.what_to_fetch(*laptop, 320, 4096, 1) == "enwik8"
    assert shards.what_to_fetch(*public, 1390, 8 * 64 * 1024, 1) == "fineweb 8"
    assert shards.what_to_fetch(*public, 1390, 8 * 64 * 1024, 4) == "fineweb 2"
    assert shards.what_to_fetch("own/*.bin", "own/*.bin", 10, 4096, 1) == ""
    for pattern in (*laptop, *public):
        path = tmp_path / pattern.replace("*", "000000")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert shards.what_to_fetch(*laptop, 320, 4096, 1) == ""
    assert shards.what_to_fetch(*public, 10, 4096, 1) == ""
    assert shards.what_to_fetch(*public, 1390, 8 * 64 * 1024, 1) == "fineweb 8"


def fuzz_manifest(folder, changes: list) -> None:
    """A manifest with changed bytes. tests/commands/faults.py uses it too."""
    write_manifest(folder)
    path = folder / "manifest.json"
    path.write_bytes(mutate(path.read_bytes(), changes))
    assert_read_or_refused(folder)
    path.unlink()


def assert_read_or_refused(folder) -> None:
    """Whatever is in a manifest, it is read right or refused in one sentence."""
    try:
        found = check(folder)
    except shards.UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 500
    else:
        assert found["tokens"] == 5000 and found["sha256"].keys() == TOKENS.keys()
        assert found["text_bytes"] is None or type(found["text_bytes"]) is int
        assert 0 <= (found["text_bytes"] or 0) < 2**64


@settings(max_examples=150)
@given(changes=mutations())
def test_mutated_manifests(tmp_path_factory, changes):
    fuzz_manifest(tmp_path_factory.getbasetemp(), changes)


ODD = st.sampled_from(
    [None, True, -1, 0, 2**63, 10**30, 1.5, float("nan"), "", "text", [], {}, [[]], {"a": 1}]
)


@given(st.data())
def test_manifests_with_odd_values(tmp_path_factory, data):
    """One value is exchanged, in a manifest that stays JSON."""
    folder = tmp_path_factory.getbasetemp()
    write_manifest(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    place = data.draw(st.sampled_from([manifest, *manifest["shards"]]))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(ODD)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert_read_or_refused(folder)


def test_the_module_is_light():
    """The trainer imports it at every start."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import shards, hellaswag, vocabulary\n"
        "heavy = ('torch', 'tqdm', 'huggingface_hub', 'tiktoken')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, DATA], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


# GPT-2's text -------------------------------------------------------------------------------------


def test_gpt2_text_there_and_back(gpt2):
    encode, decode = vocabulary.gpt2_codec()
    text = "Hello <|endoftext|> naïve 你好"
    assert encode(text) == gpt2.encode_ordinary(text) and isinstance(encode(text), list)
    assert decode(encode(text)) == text
    assert decode([50256]) == "<|endoftext|>"


CODEC = """
import sys
sys.path.insert(0, sys.argv[1])
if sys.argv[2] == "without tiktoken":
    sys.modules["tiktoken"] = None
import shards, vocabulary
try:
    vocabulary.gpt2_codec()
except shards.UserError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "case, missing", [("without tiktoken", "tiktoken"), ("empty cache", "GPT-2's vocabulary")]
)
def test_a_missing_vocabulary_is_one_sentence_and_no_download(tmp_path, case, missing):
    done = subprocess.run(
        [sys.executable, "-c", CODEC, DATA, case],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(TIKTOKEN_CACHE_DIR=str(tmp_path)),
    )
    assert done.stdout == (
        f"text needs {missing}; pip install -r data/requirements.txt, then python "
        "data/vocabulary.py\n"
    ), done.stderr
    assert not list(tmp_path.iterdir())
