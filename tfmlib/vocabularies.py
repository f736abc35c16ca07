"""Vocabularies that others trained, read from the files in which they were published.

Each reader returns (vocab {id: bytes}, merges, special tokens), as `tokens.Tokenizer` takes them.
"""

import json
import struct
from pathlib import Path

Vocabulary = tuple[dict[int, bytes], list[tuple[bytes, bytes]], list[str]]


def gpt2_byte_names() -> dict[str, int]:
    """The printable character that stands for each byte in GPT-2's files: {character: byte}.

    Printable Latin-1 stands for itself; the other 68 bytes, in order, are the characters from U+0100 on. So a space
    is "Ġ". Radford et al. (2019), released code.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def read_gpt2(encoder_json: str | Path, vocab_bpe: str | Path) -> Vocabulary:
    """Read `encoder.json` (symbol -> id) and `vocab.bpe` (one merge a line).

    Raises ValueError naming the symbol or line for what is not in GPT-2's format.
    """
    names = gpt2_byte_names()

    def as_bytes(symbol: str, where: str) -> bytes:
        strange = [character for character in symbol if character not in names]
        if strange:
            raise ValueError(f"{where}: {symbol!r} has {strange[0]!r}, which stands for no byte in GPT-2's format")
        return bytes(names[character] for character in symbol)

    table = json.loads(Path(encoder_json).read_text(encoding="utf-8"))
    if not isinstance(table, dict) or not all(isinstance(i, int) for i in table.values()):
        raise ValueError(f"{encoder_json} must be one JSON object {{symbol: id}}")
    in_order = sorted(table.items(), key=lambda item: item[1])
    vocab = {i: as_bytes(symbol, f"{encoder_json}, id {i}") for symbol, i in in_order}
    merges = []
    lines = Path(vocab_bpe).read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if (number == 1 and line.startswith("#version")) or not line.strip():
            continue
        pair = line.split()
        if len(pair) != 2:
            raise ValueError(f"{vocab_bpe}, line {number}: expected two symbols, got {line!r}")
        left, right = (as_bytes(symbol, f"{vocab_bpe}, line {number}") for symbol in pair)
        merges.append((left, right))
    return vocab, merges, [special for special in ("<|endoftext|>",) if special in table]


def read_llama2c(path: str | Path) -> Vocabulary:
    """Read llama2.c's tokenizer: an int32, then for each token a float32 score, an int32 length and its text.

    The file has scores in place of merges: of all pairs whose joined text is a token, the one of the highest score is
    joined first. So a merge is made for each way to cut a token in two. A character of several bytes is one symbol
    from the start: its bytes are joined before anything else. Of two ids for equal bytes, a piece comes before the
    byte token `<0x41>`. Raises ValueError naming the byte at which the file ends too early.
    """
    data = Path(path).read_bytes()
    tokens: list[tuple[float, bytes]] = []
    at = 4  # after the length of the longest token, which nothing here needs
    while at < len(data) or not tokens:
        if at + 8 > len(data):
            raise ValueError(f"{path} ends at byte {len(data)}, within the header of token {len(tokens)}")
        score, length = struct.unpack_from("<fi", data, at)
        at += 8
        if length < 0 or at + length > len(data):
            raise ValueError(f"{path}: token {len(tokens)} at byte {at} has length {length}; the file ends too early")
        tokens.append((score, data[at : at + length]))
        at += length
    named = {f"<0x{byte:02X}>".encode(): bytes([byte]) for byte in range(256)}
    specials = {i: text.strip() for i, (_, text) in enumerate(tokens[:3])}  # <unk>, <s>, </s>
    single = {i: named[text] for i, (_, text) in enumerate(tokens) if text in named}
    pieces = {i: text for i, (_, text) in enumerate(tokens) if i not in specials and i not in single}
    vocab = specials | pieces | single
    return vocab, _merges(tokens, pieces), [special.decode() for special in specials.values()]


def _merges(tokens: list[tuple[float, bytes]], pieces: dict[int, bytes]) -> list[tuple[bytes, bytes]]:
    known = set(pieces.values())
    characters = {character.encode() for text in known for character in text.decode(errors="ignore")}
    wide = sorted(character for character in characters if len(character) > 1 and character in known)
    merges = [(character[:n], character[n : n + 1]) for character in wide for n in range(1, len(character))]
    for i in sorted(pieces, key=lambda i: -tokens[i][0]):
        text = pieces[i].decode(errors="ignore")
        cuts = [(text[:n].encode(), text[n:].encode()) for n in range(1, len(text))]
        merges += [(left, right) for left, right in cuts if left in known and right in known]
    return merges
