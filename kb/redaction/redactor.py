"""Replaces secrets, people and machines in a text by placeholders, equal values by equal placeholders.

What signatures need stays: messages, ports, ranks, paths below a home, loopback and wildcard addresses, versions. A
line is redacted until nothing changes, so redaction is idempotent. A name that a path or field revealed is also
replaced as a single word: in a stream from there on, in a text everywhere.
"""

from __future__ import annotations

import getpass
import re
import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from kb.redaction.allowlist import canonical, identifying_words, is_allowed
from kb.redaction.rules import candidate_rules

PLACEHOLDER = re.compile(r"<[a-z]+-\d+>")
COLOUR = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
WORD = re.compile(r"(?<![\w.-])[A-Za-z0-9_][\w.-]*")
KEY_LINE = re.compile(
    r"^[A-Za-z0-9+/=]+(?=\s*$)|(?<![A-Za-z0-9+/=])[A-Za-z0-9+/=]{16,}(?=(?:\\[nr])?\s*$)|(?<=\\n)[A-Za-z0-9+/=\\]{16,}"
)
MAX_KEY_LINES = 200  # lines of a private key; one with 16,384 bits has 200
FEW_WORDS = 50  # up to so many, searching for each is faster than looking up each word of a line
TRAILING = ",;:)]}."
MAX_PASSES = 4  # a replacement may let another rule match; a fifth pass was never needed
CHUNK = 1 << 20  # bytes of one line that are redacted together
MARGIN = 4096  # bytes at the end of such a chunk that are searched for a gap between words
CREDENTIAL_AHEAD = re.compile(
    rb"(?i)(?:key|token|passw|phrase|secret|bearer|authorization|credential|cookie|user|host|--)[^\n]{0,40}\Z"
)


class Redactor:
    """Remembers what it has replaced. Use one redactor for everything in which equal values get equal placeholders."""

    def __init__(self, users: Iterable[str] = (), hosts: Iterable[str] = ()) -> None:
        """`users` and `hosts` are replaced wherever they occur as words."""
        self._placeholders: dict[str, str] = {}  # by canonical value
        self._words: dict[str, tuple[str, str]] = {}  # the kind and canonical value that each word identifies
        self._counts: Counter[str] = Counter()  # placeholders by kind
        self._key_lines = 0  # most lines of the current private key that may follow
        for kind, names in (("user", users), ("host", hosts)):
            for name in names:
                if not is_allowed(kind, name):
                    self._remember(kind, canonical(kind, name))

    def text(self, text: str) -> str:
        """Redact a whole text: names that its end reveals are replaced at its beginning too."""
        for _ in range(MAX_PASSES):
            before, text = text, "".join(map(self.line, text.splitlines(keepends=True)))
            if text == before:
                break
        return text

    def lines(self, stream: BinaryIO) -> Iterator[bytes]:
        """Redact a stream of any bytes line by line. It holds one line in memory, or `CHUNK` bytes of a longer one."""
        for chunk in read_chunks(stream):
            text = chunk.decode("utf-8", "surrogateescape")
            parts = text.splitlines(keepends=True) if "\r" in text else (text,)
            yield "".join(map(self.line, parts)).encode("utf-8", "surrogateescape")

    def line(self, line: str) -> str:
        """Redact one line. A changed line loses its colours, which may separate a key from its value."""
        uncoloured = COLOUR.sub("", line) if "\x1b" in line else line
        redacted = self._private_key(uncoloured)
        for _ in range(MAX_PASSES):
            before, redacted = redacted, self._pass(redacted)
            if redacted == before:
                break
        return line if redacted == uncoloured else redacted

    def _pass(self, line: str) -> str:
        lowered = line.lower()
        for rule in candidate_rules(line):
            if rule.find(line):
                line = rule.pattern.sub(self._replace_groups, line)
        if len(self._words) > FEW_WORDS or any(word in lowered for word in self._words):
            line = WORD.sub(self._replace_word, line)
        return line

    def _replace_groups(self, match: re.Match[str]) -> str:
        """The match with the value of each group replaced, the last group first."""
        text, start = match.group(), match.start()
        groups = [(match.span(name), name.rstrip("0123456789")) for name, value in match.groupdict().items() if value]
        for (begin, end), kind in sorted(groups, reverse=True):
            value = match.string[begin:end]
            tail = "" if kind in ("token", "ip") else value[len(value.rstrip(TRAILING)) :]
            text = text[: begin - start] + self._redact(kind, value.removesuffix(tail)) + tail + text[end - start :]
        return text

    def _redact(self, kind: str, value: str) -> str:
        """The placeholder of a value; the value itself if it is allowed or already a placeholder."""
        key = canonical(kind, value)
        if not key or PLACEHOLDER.fullmatch(value) or is_allowed(kind, value):
            return value
        return self._placeholders.get(key) or self._new_placeholder(kind, key)

    def _new_placeholder(self, kind: str, key: str) -> str:
        self._counts[kind] += 1
        placeholder = self._placeholders[key] = f"<{kind}-{self._counts[kind]}>"
        self._remember(kind, key)
        return placeholder

    def _remember(self, kind: str, key: str) -> None:
        for word in identifying_words(kind, key):
            self._words.setdefault(word, (kind, key))

    def _replace_word(self, match: re.Match[str]) -> str:
        """Replace a word that was revealed elsewhere, even before a dot: `gpu-03.log`."""
        word = match.group()
        name = word.rstrip(".-")
        if identified := self._words.get(name.lower()):
            return self._redact(*identified) + word[len(name) :]
        first, dot, rest = word.partition(".")
        kind, key = self._words.get(first.lower(), ("", ""))
        return self._redact(kind, key) + dot + rest if kind == "host" else word

    def _private_key(self, line: str) -> str:
        """Replace the body of a PEM block (RFC 7468), which may have several lines; each line stays a line."""
        if self._key_lines:
            body = KEY_LINE.sub(lambda match: self._redact("key", match.group()), line)
            is_inside = body != line or not line.strip() or ": " in line[:20]
            self._key_lines = self._key_lines - 1 if is_inside and "-----END" not in line else 0
            return body
        begin = line.find("PRIVATE KEY-----")
        if begin < 0 or "-----BEGIN" not in line[:begin]:
            return line
        begin += len("PRIVATE KEY-----")
        end = line.find("-----END", begin)
        self._key_lines = 0 if end >= 0 else MAX_KEY_LINES
        body = line[begin : end if end >= 0 else len(line)]
        tail = body[len(body.rstrip()) :]
        if len(body.strip()) < len("\\n") + 1 or PLACEHOLDER.fullmatch(body.strip()):
            return line
        return line[:begin] + self._redact("key", body.strip()) + tail + (line[end:] if end >= 0 else "")


def local_redactor() -> Redactor:
    """A redactor that knows the names of the current user and this machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container, the user id may have no name
        user = ""
    return Redactor(users=[user], hosts=[socket.gethostname()])


def redact(text: str) -> str:
    """The text with secrets, people and machines replaced by placeholders."""
    return local_redactor().text(text)


def read_chunks(stream: BinaryIO) -> Iterator[bytes]:
    """Lines with line ends. A line longer than `CHUNK` is cut between words, but never right after a secret's name."""
    chunk = b""
    while line := stream.readline(CHUNK):
        chunk += line
        if line.endswith(b"\n") or len(chunk) < CHUNK:
            yield chunk
            chunk = b""
            continue
        cut = _cut_position(chunk)
        yield chunk[:cut]
        chunk = chunk[cut:]
    if chunk:
        yield chunk


def _cut_position(chunk: bytes) -> int:
    """The position after a blank or comma near the end that does not follow the name of a secret, else the end."""
    for gap in reversed(list(re.finditer(rb"[\s,;]", chunk[-MARGIN:]))):
        cut = len(chunk) - MARGIN + gap.end()
        if not CREDENTIAL_AHEAD.search(chunk[max(cut - 64, 0) : cut]):
            return cut
    return len(chunk)
