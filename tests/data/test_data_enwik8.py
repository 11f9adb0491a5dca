"""data/enwik8.py and data/shards.py: tokens, splits, archives that are only read, kills."""

import gzip
import hashlib
import io
import re
import tarfile
import zipfile

import numpy as np
import pytest
from data_helpers import crash, environment, manifest_of, run, tokens_of, visible_files

import archives
import enwik8
import shards

PAGE = b"  <page>\n    <title>%d</title>\n    not a start:   <page> here\n  </page>\n"
PAYLOAD = b"<mediawiki>\n" + b"".join(
    PAGE % number + b"text \xc3\xa9\n" * (number % 7) for number in range(300)
)
ENDS = {"train": len(PAYLOAD) * 9 // 10, "val": len(PAYLOAD) * 19 // 20, "test": len(PAYLOAD)}
# The script with a small payload in the place of the real one.
SMALL = f"""
import enwik8
enwik8.PAYLOAD_BYTES = {len(PAYLOAD)}
enwik8.PAYLOAD_SHA256 = {hashlib.sha256(PAYLOAD).hexdigest()!r}
enwik8.SPLIT_ENDS = {ENDS!r}
enwik8.run(enwik8.main)
"""


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(enwik8, "PAYLOAD_BYTES", len(PAYLOAD))
    monkeypatch.setattr(enwik8, "PAYLOAD_SHA256", hashlib.sha256(PAYLOAD).hexdigest())
    monkeypatch.setattr(enwik8, "SPLIT_ENDS", ENDS)


def tar_of(members: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def packings(folder) -> dict:
    """The payload in each form that --from takes."""
    with zipfile.ZipFile(folder / "enwik8.zip", "w") as archive:
        archive.writestr("README", "other")
        archive.writestr("enwik8", PAYLOAD)
    (folder / "enwik8").write_bytes(PAYLOAD)
    (folder / "enwik8.gz").write_bytes(gzip.compress(PAYLOAD))
    (folder / "package-1.tar.gz").write_bytes(
        tar_of({"package-1/setup.py": b"", "package-1/data/enwik8.gz": gzip.compress(PAYLOAD)})
    )
    return {
        name: folder / name for name in ("enwik8", "enwik8.gz", "enwik8.zip", "package-1.tar.gz")
    }


def test_tokens_are_the_bytes_with_a_token_before_each_page(tmp_path, small):
    (tmp_path / "enwik8").write_bytes(PAYLOAD)
    assert enwik8.main([f"--from={tmp_path / 'enwik8'}", f"--out={tmp_path / 'out'}"]) == 0
    manifest = manifest_of(tmp_path / "out")
    whole = []
    start = 0
    pages = 0
    for split, end in ENDS.items():
        tokens = tokens_of(tmp_path / "out" / f"enwik8_{split}_000000.bin")
        (entry,) = [entry for entry in manifest["shards"] if entry["split"] == split]
        assert bytes(tokens[tokens != 256].astype(np.uint8)) == PAYLOAD[start:end]
        assert entry["tokens"] == len(tokens) and entry["text_bytes"] == end - start
        assert entry["documents"] == np.count_nonzero(tokens == 256)
        assert (
            entry["sha256"]
            == hashlib.sha256((tmp_path / "out" / entry["file"]).read_bytes()).hexdigest()
        )
        whole += tokens.tolist()
        start = end
        pages += entry["documents"]
    assert pages == 300
    assert manifest["complete"] and (manifest["vocab_size"], manifest["document_token"]) == (
        257,
        256,
    )
    # Token by token: 256 stands before, and only before, a line that is exactly "  <page>".
    text = "".join(chr(token) if token < 256 else "\uffff" for token in whole)
    assert text == re.sub("(?m)^(?=  <page>$)", "\uffff", PAYLOAD.decode("latin-1"))


def test_every_form_of_copy_gives_the_same_shards(tmp_path, small):
    found = set()
    for name, path in packings(tmp_path).items():
        assert enwik8.main([f"--from={path}", f"--out={tmp_path / (name + '_out')}"]) == 0
        found.add((tmp_path / (name + "_out") / "manifest.json").read_text())
    assert len(found) == 1


def zip_of(name: str, content: bytes, **changes) -> bytes:
    """A zip archive; `changes` of the flags or the method are written into its headers."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(name, content)
    raw = bytearray(packed.getvalue())
    central = raw.index(b"PK\1\2")
    for offset, value in changes.items():
        place = {"flags": (6, 8), "method": (8, 10)}[offset]
        raw[place[0]] = raw[central + place[1]] = value
    return bytes(raw)


TRUNCATED = gzip.compress(PAYLOAD)[:-9]
ODD_COPIES = {
    "another text": (b"another text", "not enwik8"),
    "a byte more": (PAYLOAD + b"x", "not enwik8"),
    "empty": (b"", "not enwik8"),
    "zeros": (gzip.compress(b"\0" * 10**6), "not enwik8"),
    "another package": (tar_of({"package/setup.py": b"1"}), "not enwik8"),
    "truncated gzip": (TRUNCATED, "cannot be read or unpacked"),
    "truncated gzip in a package": (
        tar_of({"package/data/enwik8.gz": TRUNCATED}),
        "cannot be read or unpacked",
    ),
    "no gzip in a package": (
        tar_of({"package/data/enwik8.gz": b"text"}),
        "cannot be read or unpacked",
    ),
    "truncated package": (
        tar_of({"package/data/enwik8.gz": gzip.compress(PAYLOAD)})[:-99],
        "cannot be read or unpacked|not enwik8",
    ),
    "encrypted zip": (zip_of("enwik8", PAYLOAD, flags=1), "cannot be read or unpacked .*encrypted"),
    "unknown zip": (zip_of("enwik8", PAYLOAD, method=99), "cannot be read or unpacked"),
    "zip of a folder": (zip_of("folder/", b""), "not enwik8"),
}


@pytest.mark.parametrize("kind", ODD_COPIES)
def test_another_text_is_refused(tmp_path, small, kind):
    content, said = ODD_COPIES[kind]
    (tmp_path / "copy").write_bytes(content)
    with pytest.raises(shards.UserError, match=said) as refused:
        enwik8.main([f"--from={tmp_path / 'copy'}", f"--out={tmp_path / 'out'}"])
    assert not re.search(r"[A-Z]\w+(Error|File)\b|Errno|\n", str(refused.value))
    assert (
        not list((tmp_path / "out").glob("*.bin*"))
        and not (tmp_path / "out" / "manifest.json").exists()
    )


def test_files_that_cannot_be_read_or_written_are_one_sentence(tmp_path):
    (tmp_path / "file").write_text("x")
    for arguments, said in (
        (["--from=absent"], "--from=absent: not a file"),
        ([f"--from={tmp_path}"], f"--from={tmp_path}: not a file"),
        (["--from=/dev/null"], "--from=/dev/null: not a file"),
        ([f"--out={tmp_path / 'file'}"], "File exists"),
        ([f"--out={tmp_path / 'file' / 'below'}"], "Not a directory"),
    ):
        done = run("enwik8.py", *arguments)
        assert (
            done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1
        ), done.stderr
        assert "Error" not in done.stderr and "Errno" not in done.stderr


def test_a_copy_without_permission_is_one_sentence(tmp_path, small, monkeypatch):
    (tmp_path / "copy").write_bytes(PAYLOAD)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(enwik8, "unpack", refuse)
    with pytest.raises(
        shards.UserError, match=r"copy: cannot be read or unpacked \(Permission denied\)"
    ):
        enwik8.main([f"--from={tmp_path / 'copy'}", f"--out={tmp_path / 'out'}"])


def test_pip_enforces_the_hash_and_no_code_of_the_archive_runs(
    tmp_path, small, monkeypatch, capsys
):
    marker = tmp_path / "ran"
    code = (
        f"open({str(marker)!r}, 'w')\n"
        "import setuptools\nsetuptools.setup(name='second', version='1.0')\n"
    )
    for name in ("first", "second"):
        (tmp_path / f"{name}-1.0.tar.gz").write_bytes(
            tar_of(
                {
                    f"{name}-1.0/setup.py": code.encode(),
                    f"{name}-1.0/PKG-INFO": b"Metadata-Version: 2.1\nName: x\nVersion: 1.0\n",
                    f"{name}-1.0/data/enwik8.gz": gzip.compress(PAYLOAD),
                }
            )
        )
    right = hashlib.sha256((tmp_path / "second-1.0.tar.gz").read_bytes()).hexdigest()
    # The first does not have the expected hash, the second does: one is refused, the other taken.
    monkeypatch.setattr(
        enwik8,
        "ARCHIVES",
        (("absent", "1.0", "1" * 64), ("first", "1.0", "0" * 64), ("second", "1.0", right)),
    )
    for name, value in environment(PIP_FIND_LINKS=str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    assert enwik8.main([f"--out={tmp_path / 'out'}"]) == 0
    assert shards.is_complete(tmp_path / "out")
    said = capsys.readouterr().out
    assert re.search(
        "absent-1.0.tar.gz: .*No matching distribution|absent-1.0.tar.gz: Could not find", said
    )
    assert re.search("first-1.0.tar.gz: .*DO NOT MATCH THE HASHES", said)
    assert not marker.exists()


def test_no_archive_from_pypi_is_one_sentence(tmp_path, small, monkeypatch):
    failed = type("Done", (), {"stderr": "ERROR: No network."})
    monkeypatch.setattr(archives.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(
        shards.UserError, match=r"none of 5 archives .* No network\); .* --from=PATH"
    ):
        enwik8.main([f"--out={tmp_path}"])


def test_killed_at_every_step(tmp_path, small):
    (tmp_path / "enwik8").write_bytes(PAYLOAD)
    enwik8.main([f"--from={tmp_path / 'enwik8'}", f"--out={tmp_path / 'whole'}"])
    whole = visible_files(tmp_path / "whole")
    out = tmp_path / "out"
    arguments = (f"--from={tmp_path / 'enwik8'}", f"--out={out}")
    step = 0
    while crash(step, "enwik8.py", *arguments, prepare=SMALL):
        manifest = shards.read_manifest(out)
        if manifest is None:
            assert not list(out.glob("*.bin")), step
        elif manifest["complete"]:  # killed after the last rename
            assert all((out / name).read_bytes() == content for name, content in whole.items()), (
                step
            )
        else:
            assert not manifest["shards"] and not shards.is_complete(out), step
        step += 1
    assert step >= 8
    assert visible_files(out) == whole


def test_a_shard_set_keeps_what_was_there_until_it_commits(tmp_path):
    def write(tokens, limit=10, commit=True):
        with shards.ShardSet(
            tmp_path, "x", "bytes", 257, 256, shards.BYTE_LENGTHS, limit
        ) as writer:
            writer.append("train", np.asarray(tokens))
            if commit:
                writer.commit("test")

    write(np.arange(35))
    assert [len(tokens_of(tmp_path / f"x_train_{n:06d}.bin")) for n in range(4)] == [10, 10, 10, 5]
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "x_notes.bin").write_bytes(b"the user's own")
    write(np.arange(99), commit=False)
    assert {
        path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "x_notes.bin"
    } == before
    write([256, 1, 2, 3])
    assert {path.name for path in tmp_path.glob("*.bin")} == {"x_train_000000.bin", "x_notes.bin"}
    assert shards.read_manifest(tmp_path)["shards"][0]["text_bytes"] == 3


def test_two_writers_exclude_each_other(tmp_path):
    with (
        shards.exclusive(tmp_path),
        pytest.raises(shards.UserError, match="another process is writing there"),
    ):
        with shards.exclusive(tmp_path):
            pass


def test_a_folder_of_other_shards_is_left_alone(tmp_path, small):
    with shards.ShardSet(tmp_path, "mine", "bytes", 257, 256, shards.BYTE_LENGTHS) as writer:
        writer.append("train", np.arange(9))
        writer.commit("test")
    (tmp_path / "enwik8").write_bytes(PAYLOAD)
    with pytest.raises(shards.UserError, match="holds other shards"):
        enwik8.main([f"--from={tmp_path / 'enwik8'}", f"--out={tmp_path}"])
    assert shards.is_complete(tmp_path)
