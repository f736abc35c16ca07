"""Corpora come whole or not at all, and what is wrong with a file is said."""

import hashlib
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from tfmlib import data, downloads

from .data import data as published


def test_pythons_documentation_is_at_hand():
    text = data.load_corpus("python-docs")
    assert len(text) > 100_000
    assert "lambda" in text
    assert text == data.load_corpus()


def test_tiny_shakespeare_is_the_published_file(tmp_path):
    path = published("tinyshakespeare.txt")
    text = data.tiny_shakespeare(path)
    assert len(text) == 1_115_394
    assert text.startswith("First Citizen:\nBefore we proceed any further")
    assert len(set(text)) == 65
    changed = tmp_path / "shakespeare.txt"
    changed.write_text(text + "!", encoding="utf-8")
    with pytest.raises(ValueError, match="is not Tiny Shakespeare"):
        data.tiny_shakespeare(changed)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"caf\xe9", "byte 3 is 0xe9"),
        (b"\x89PNG\r\n\x1a\n", "not text in UTF-8"),
        (b"a\0b", "character 1 is NUL"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, raw, why):
    path = tmp_path / "corpus.txt"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=why):
        data.load_corpus(path)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="python-docs"):
        data.load_corpus(tmp_path / "nothing.txt")
    with pytest.raises(ValueError, match="is a folder"):
        data.load_corpus(tmp_path)


def test_line_ends_and_a_byte_order_mark_are_no_characters(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert data.load_corpus(path) == "one\ntwo\nthree\n"


def test_characters_there_and_back():
    text = data.load_corpus("python-docs")
    characters = data.Characters(text)
    assert characters.decode(characters.encode(text[:1000])) == text[:1000]
    assert characters.vocab_size == len(set(text))
    with pytest.raises(ValueError, match="has no '\N{SNOWMAN}'"):
        characters.encode("\N{SNOWMAN}")


def test_a_text_that_is_too_short_is_refused():
    tokens = torch.arange(100)
    seen, unseen = data.split(tokens, length=9)
    assert torch.equal(torch.cat([seen, unseen]), tokens)
    assert len(unseen) == 10
    with pytest.raises(ValueError, match="100 tokens leave 10 for validation"):
        data.split(tokens, length=10)


def test_whole_windows_count_every_label_once():
    batches = data.whole_windows(torch.arange(100), B=4, T=7)
    inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert torch.equal(inputs.flatten(), torch.arange(98))
    assert torch.equal(labels.flatten(), torch.arange(1, 99))
    assert [len(part) for part, _ in batches] == [4, 4, 4, 2]
    with pytest.raises(ValueError, match="at least 8"):
        data.whole_windows(torch.arange(7), B=4, T=7)


# Downloads ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    """A server that breaks off its first answers, as many as a test wants, and counts what was asked."""
    content = b"To be, or not to be\n" * 1000

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            server.asked += 1
            if self.path == "/nothing":
                self.send_error(404)
                return
            broken = server.asked <= server.breaks
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if broken else content)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.asked, server.breaks, server.sha256 = 0, 0, hashlib.sha256(content).hexdigest()
    server.url = f"http://127.0.0.1:{server.server_address[1]}/"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_download_that_breaks_is_tried_again(server, tmp_path):
    server.breaks = 2
    downloads.download(server.url, server.sha256, tmp_path / "new" / "text", wait_seconds=0)
    assert server.asked == 3
    assert os.listdir(tmp_path / "new") == ["text"]
    assert downloads.sha256_of(tmp_path / "new" / "text") == server.sha256


def test_a_download_that_keeps_breaking_says_what_to_do(server, tmp_path):
    server.breaks = 9
    with pytest.raises(OSError, match="put the file there yourself"):
        downloads.download(server.url, server.sha256, tmp_path / "text", wait_seconds=0)
    assert server.asked == 3
    assert os.listdir(tmp_path) == []


def test_what_is_not_there_is_asked_for_once(server, tmp_path):
    with pytest.raises(OSError, match="404"):
        downloads.download(server.url + "nothing", server.sha256, tmp_path / "text")
    assert server.asked == 1


def test_another_file_is_not_taken(server, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "SHAKESPEARE_URL", server.url)
    with pytest.raises(ValueError, match="SHA-256"):
        data.tiny_shakespeare(tmp_path / "text")
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(data, "SHAKESPEARE_SHA256", server.sha256)
    assert data.tiny_shakespeare(tmp_path / "text").startswith("To be")
    assert data.tiny_shakespeare(tmp_path / "text").startswith("To be")
    assert server.asked == 2
