"""Text with secrets, people and machines to the same text with placeholders: equal ones to equal placeholders.

What a signature needs stays: messages, ports, ranks, paths below a home, loopback and wildcard addresses, versions. A
line is redacted until nothing more is found, so that redacting twice is redacting once. A name that a path or a field
gave away is hidden as a mere word too: in a stream from there on, in a text everywhere.
"""

from __future__ import annotations

import getpass
import re
import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from kb.redaction.allowlist import canonical, is_harmless, words_of
from kb.redaction.rules import RULES, Rule

PLACEHOLDER = re.compile(r"<[a-z]+-\d+>")
COLOUR = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
WORD = re.compile(r"(?<![\w.-])[A-Za-z0-9_][\w.-]*")
KEY_LINE = re.compile(
    r"^[A-Za-z0-9+/=]+(?=\s*$)|(?<![A-Za-z0-9+/=])[A-Za-z0-9+/=]{16,}(?=(?:\\[nr])?\s*$)|(?<=\\n)[A-Za-z0-9+/=\\]{16,}"
)
LONGEST_KEY = 200  # lines; one of 16,384 bits has 200
FEW_WORDS = 50  # up to which looking for each of them is quicker than looking at each word of a line
TRAILING = ",;:)]}."
TURNS = 4  # what one rule hides may show another one its place; a fifth turn was never needed
PIECE = 1 << 20  # bytes of one line that are looked at together
MARGIN = 4096  # bytes at the end of such a piece where a gap between words is looked for
MENTIONS = re.compile(
    rb"(?i)(?:key|token|passw|phrase|secret|bearer|authorization|credential|cookie|user|host|--)[^\n]{0,40}\Z"
)


class Redactor:
    """Knows what it has hidden: one for each text or stream whose placeholders are to agree."""

    def __init__(self, users: Iterable[str] = (), hosts: Iterable[str] = ()) -> None:
        """`users` and `hosts` are hidden wherever they stand as words."""
        self._given: dict[str, str] = {}
        self._words: dict[str, tuple[str, str]] = {}  # to the kind and value that they tell of
        self._counts: Counter[str] = Counter()
        self._key_lines = 0  # that a private key may still have
        for kind, names in (("user", users), ("host", hosts)):
            for name in names:
                if not is_harmless(kind, name):
                    self._learn(kind, canonical(kind, name))

    def text(self, text: str) -> str:
        """A text that is held as a whole: what its end gives away is hidden at its beginning too."""
        for _ in range(TURNS):
            before, text = text, "".join(map(self.line, text.splitlines(keepends=True)))
            if text == before:
                break
        return text

    def lines(self, stream: BinaryIO) -> Iterator[bytes]:
        """A stream, line by line, whatever its bytes; memory for one line, and for `PIECE` of a longer one."""
        for piece in pieces(stream):
            text = piece.decode("utf-8", "surrogateescape")
            parts = text.splitlines(keepends=True) if "\r" in text else (text,)
            yield "".join(map(self.line, parts)).encode("utf-8", "surrogateescape")

    def line(self, line: str) -> str:
        """One line. Its colours go when something is hidden in it: they stand between a key and its value."""
        plain = COLOUR.sub("", line) if "\x1b" in line else line
        redacted = self._private_key(plain)
        for _ in range(TURNS):
            before, redacted = redacted, self._once(redacted)
            if redacted == before:
                break
        return line if redacted == plain else redacted

    def _once(self, line: str) -> str:
        lowered = line.lower()
        for rule in RULES:
            if may_match(rule, lowered) and rule.find(line):
                line = rule.pattern.sub(self._replace, line)
        if len(self._words) > FEW_WORDS or any(word in lowered for word in self._words):
            line = WORD.sub(self._known, line)
        return line

    def _replace(self, match: re.Match[str]) -> str:
        """The match with each of its groups hidden, the last one first."""
        text, start = match.group(), match.start()
        named = [(match.span(name), name.rstrip("0123456789")) for name, value in match.groupdict().items() if value]
        for (begin, end), kind in sorted(named, reverse=True):
            value = match.string[begin:end]
            kept = "" if kind in ("token", "ip") else value[len(value.rstrip(TRAILING)) :]
            text = text[: begin - start] + self._hidden(kind, value.removesuffix(kept)) + kept + text[end - start :]
        return text

    def _hidden(self, kind: str, value: str) -> str:
        key = canonical(kind, value)
        if not key or PLACEHOLDER.fullmatch(value) or is_harmless(kind, value):
            return value
        return self._given.get(key) or self._new(kind, key)

    def _new(self, kind: str, key: str) -> str:
        self._counts[kind] += 1
        placeholder = self._given[key] = f"<{kind}-{self._counts[kind]}>"
        self._learn(kind, key)
        return placeholder

    def _learn(self, kind: str, key: str) -> None:
        for word in words_of(kind, key):
            self._words.setdefault(word, (kind, key))

    def _known(self, match: re.Match[str]) -> str:
        """A word that was given away elsewhere, also before a dot: `gpu-03.log`."""
        word = match.group()
        name = word.rstrip(".-")
        if meant := self._words.get(name.lower()):
            return self._hidden(*meant) + word[len(name) :]
        first, dot, rest = word.partition(".")
        kind, key = self._words.get(first.lower(), ("", ""))
        return self._hidden(kind, key) + dot + rest if kind == "host" else word

    def _private_key(self, line: str) -> str:
        """The body of a PEM block (RFC 7468), over as many lines as it has; each line stays a line."""
        if self._key_lines:
            body = KEY_LINE.sub(lambda match: self._hidden("key", match.group()), line)
            is_inside = body != line or not line.strip() or ": " in line[:20]
            self._key_lines = self._key_lines - 1 if is_inside and "-----END" not in line else 0
            return body
        begin = line.find("PRIVATE KEY-----")
        if begin < 0 or "-----BEGIN" not in line[:begin]:
            return line
        begin += len("PRIVATE KEY-----")
        end = line.find("-----END", begin)
        self._key_lines = 0 if end >= 0 else LONGEST_KEY
        body = line[begin : end if end >= 0 else len(line)]
        kept = body[len(body.rstrip()) :]
        if len(body.strip()) < len("\\n") + 1 or PLACEHOLDER.fullmatch(body.strip()):
            return line
        return line[:begin] + self._hidden("key", body.strip()) + kept + (line[end:] if end >= 0 else "")


def here() -> Redactor:
    """One that knows the name of the running user and of this machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that has no name
        user = ""
    return Redactor(users=[user], hosts=[socket.gethostname()])


def redact(text: str) -> str:
    """A text without secrets, people and machines."""
    return here().text(text)


def pieces(stream: BinaryIO) -> Iterator[bytes]:
    """Lines with their ends; a longer one than `PIECE` in pieces, cut between words but not behind a secret's name."""
    held = b""
    while read := stream.readline(PIECE):
        held += read
        if read.endswith(b"\n") or len(held) < PIECE:
            yield held
            held = b""
            continue
        cut = _gap(held)
        yield held[:cut]
        held = held[cut:]
    if held:
        yield held


def may_match(rule: Rule, lowered: str) -> bool:
    """Whether a rule is worth trying on a line; `lowered` is the line in lower case."""
    if rule.least and lowered.count(rule.least[0]) >= len(rule.least):
        return True
    for hint in rule.hints:  # noqa: SIM110 - any() would take twice as long
        if hint in lowered:
            return True
    return False


def _gap(held: bytes) -> int:
    """Where to cut: behind a blank or comma near the end, before which no secret is announced; else at the end."""
    for gap in reversed(list(re.finditer(rb"[\s,;]", held[-MARGIN:]))):
        cut = len(held) - MARGIN + gap.end()
        if not MENTIONS.search(held[max(cut - 64, 0) : cut]):
            return cut
    return len(held)
