"""Speed of data/tokenize_text.py in one process: python tests/commands/bench_data.py [TEXT]

GPT-2 tokens against tiktoken alone on the same documents (at least 0.7 times as fast), and bytes
(at least 100 MB/s). Both start with the text on the disk and end with hashed shards. TEXT is
any large text file; without it, made-up text is used.
"""

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "data"))

import numpy as np

import tokenize_text
import vocabulary

BPE_BYTES, BYTE_BYTES = 10_000_000, 100_000_000
REQUIRED = {"gpt2 / tiktoken alone": 0.7, "bytes / 100 MB/s": 1.0}
SEPARATOR = "\n\x1e\n"


def made_up_text(num_bytes: int) -> str:
    """Words with the frequencies of a natural language, in paragraphs."""
    generator = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    words = [
        "".join(letters[np.minimum(generator.geometric(0.12, length) - 1, 21)])
        for length in generator.integers(2, 11, 20_000)
    ]
    chosen = np.minimum(generator.zipf(1.2, num_bytes // 6), 20_000) - 1
    return " ".join(words[number] for number in chosen)[:num_bytes]


def documents_of(text: str) -> list[str]:
    return [text[start : start + 4000] for start in range(0, len(text), 4000)]


def seconds(action, repeats: int = 3) -> float:
    """Seconds of one core, the system's work included; the fastest of several."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        action()
        times.append(time.process_time() - began)
    return min(times)


def tokenize(path: Path, out: Path, tokenizer: str) -> None:
    options = tokenize_text.parse(
        [
            str(path),
            f"--out={out}",
            "--processes=1",
            f"--tokenizer={tokenizer}",
            f"--separator={SEPARATOR}",
            "--val=0.02",
        ]
    )
    if tokenizer == "gpt2":
        about = "gpt2", vocabulary.VOCAB_SIZE, vocabulary.DOCUMENT_TOKEN, vocabulary.lengths()
    else:
        about = "bytes", 257, 256, tokenize_text.BYTE_LENGTHS
    with tokenize_text.ShardSet(out, "bench", *about) as shards:
        tokenize_text.write_shards(options, tokenize_text.Settings(tokenizer), shards)


def measure(text: str) -> dict[str, float]:
    """Each ratio that is required, as measured."""
    bpe, encoding = documents_of(text[:BPE_BYTES]), vocabulary.gpt2()
    repeated = documents_of((text * (BYTE_BYTES // len(text) + 1))[:BYTE_BYTES])
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "text", Path(folder) / "out"
        path.write_text(SEPARATOR.join(bpe))
        alone = seconds(lambda: [encoding.encode_ordinary(document) for document in bpe])
        ours = seconds(lambda: tokenize(path, out, "gpt2"))
        path.write_text(SEPARATOR.join(repeated))
        speed = path.stat().st_size / seconds(lambda: tokenize(path, out, "bytes"))
    return {"gpt2 / tiktoken alone": alone / ours, "bytes / 100 MB/s": speed / 1e8}


def main() -> int:
    text = (
        Path(sys.argv[1]).read_text(errors="replace")
        if len(sys.argv) > 1
        else made_up_text(BPE_BYTES)
    )
    ratios = measure(text)
    print(f"{'tokenizing, one core':<26}{'ratio':>8}{'required':>10}")
    for name, ratio in ratios.items():
        print(
            f"{name:<26}{ratio:>8.2f}{REQUIRED[name]:>10.2f}  "
            f"{'ok' if ratio >= REQUIRED[name] else 'TOO SLOW'}"
        )
    return 0 if all(ratio >= REQUIRED[name] for name, ratio in ratios.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
