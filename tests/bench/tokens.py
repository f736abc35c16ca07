"""Train 2,000 tokens on 5 MB of text, and encode it, beside Hugging Face's tokenizers (Rust, all cores and one).

    python -m tests.bench.tokens

The text is the source of Python's standard library, which every machine has. Prints a Markdown table; the one that is
kept is in README.md beside this file.
"""

import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

VOCAB_SIZE, N_BYTES = 2_000, 5_000_000


def library_source() -> str:
    """The first 5 MB of the standard library's source, file after file in the order of their names."""
    parts, size = [], 0
    for path in sorted(Path(os.__file__).parent.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        parts.append(path.read_text(encoding="utf-8", errors="ignore"))
        size += len(parts[-1].encode())
        if size >= N_BYTES:
            break
    return "".join(parts).encode()[:N_BYTES].decode(errors="ignore")


def trained_by_tokenizers(text: str, vocab_size: int = VOCAB_SIZE) -> tuple[object, list[tuple[bytes, bytes]]]:
    """Their tokenizer and its merges, as bytes. It breaks ties in its own way."""
    import tokenizers

    from tfmlib.vocabularies import gpt2_byte_names

    level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = level(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    names = gpt2_byte_names()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return tokenizer, [tuple(bytes(names[c] for c in symbol) for symbol in pair) for pair in merges]


def seconds(call) -> tuple[float, object]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def ties(text: str, merges: list[tuple[bytes, bytes]]) -> Iterator[set[tuple[bytes, bytes]]]:
    """For each merge, all pairs that occurred most often when its turn came. Everything is counted anew."""
    from tfmlib import tokens

    words = {
        tuple(bytes([byte]) for byte in word.encode()): n
        for word, n in Counter(tokens.GPT2_PATTERN.findall(text)).items()
    }
    for pair in merges:
        counts = tokens.pair_counts(words)
        most = max(counts.values())
        yield {p for p, n in counts.items() if n == most}
        words = {tokens.merge_pair(word, pair): n for word, n in words.items()}  # they stay distinct: same bytes


def main() -> None:
    from tfmlib import tokens

    if "--one-core" in sys.argv:
        os.environ["RAYON_NUM_THREADS"] = "1"
    text = library_source()
    our_time, (vocab, ours) = seconds(lambda: tokens.train_bpe(text, VOCAB_SIZE))
    their_time, (their_tokenizer, theirs) = seconds(lambda: trained_by_tokenizers(text))
    our_tokenizer = tokens.Tokenizer(vocab, ours)
    our_encode, ids = seconds(lambda: our_tokenizer.encode(text))
    their_encode, encoded = seconds(lambda: their_tokenizer.encode(text))
    first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
    parted = "never" if first == len(ours) else f"at merge {first}"
    if first < len(ours):
        *_, tied = ties(text, ours[: first + 1])
        parted += ", a tie" if {ours[first], theirs[first]} <= tied else ", NOT a tie"
    cores = 1 if "--one-core" in sys.argv else os.cpu_count()
    print(f"Python {platform.python_version()}, tokenizers {version('tokenizers')} on {cores} core(s); ", end="")
    print(f"{len(text.encode()):,} bytes of text, {len(vocab):,} tokens\n")
    print("| | tfmlib (pure Python) | tokenizers (Rust) | ratio |")
    print("|---|---|---|---|")
    print(f"| training | {our_time:.1f} s | {their_time:.1f} s | {our_time / their_time:.1f} |")
    print(f"| encoding the text | {our_encode:.1f} s | {their_encode:.1f} s | {our_encode / their_encode:.1f} |")
    common = len(set(ours) & set(theirs))
    print(f"\nMerges in common: {common:,} of {len(ours):,}; the lists part {parted}. ", end="")
    print(f"Tokens of the text: {len(ids):,} and {len(encoded.ids):,}.")


if __name__ == "__main__":
    main()
