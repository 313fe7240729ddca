"""The check of every probe on machines that lie: programs that print nonsense, odd variables, the wrong file.

A check may not know, and then says so; it may not fail, nor call a file healthy that it could not read.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from kb.content.catalog import load_catalog
from kb.content.roots import builtin_root
from kb.probe import STATES, Finding, Probe
from kb.runtime.worker import load_probe

# What a program prints where it is broken, another's of the same name, or asked about a divided GPU.
ANSWERS = {
    "nothing": "exit 0",
    "failure": "echo 'it has failed' >&2; exit 9",
    "words": r"printf '[Unknown Error], , [N/A], Ünknown, 12 %%, -\n\n,,,,,,,,,\n'",
    "bytes": r"printf '\200\201\377\n\0\001'",
    "a-lot": "yes '0, 1, 2, 3, GPU 0: [N/A]' | head -n 5000",
}
PROGRAMS = ("nvidia-smi", "dmesg", "ldd", "getent", "gcc", "cc", "nvcc", "ninja", "ld", "mount", "ibstat", "scontrol")
TEXTS = ("", " ", "0,,x", "garbage", "-1", "9" * 25, "1e400", "nan", "\udcff", "/nonexistent/x", "[({*?+", "::::")
ODD = {"int": (0, -1, 10**18), "float": (0.0, -1.0, float("inf"), float("nan")), "str": TEXTS}
OF_EVERY_PROCESS = {"PATH", "HOME", "TMPDIR", "PWD", "PYTHONPATH"}

# No healthy file of any kind: named by mistake, cut short, never filled.
FILES = {
    "empty": b"",
    "zeros": b"\0" * 5000,
    "bytes": bytes(range(256)) * 40,
    "number": b"17",
    "null": b"null",
    "list": b"[1, null, [], {}]",
    "nested": b"[" * 100_000,
    "braces": b'{"a":' * 50_000,
    "utf-16": b"\xff\xfe{\0}\0",
    "half": b'{"train_batch_size": ',
    "wrong-types": b'{"zero_optimization": [1], "fp16": "x", "vocab_size": "many", "weight_map": [], "optimizer": 5}',
    "yaml": b"a: 1\r\nb: [\r\n",
    "prose": "Nothing to see here, 没有\n".encode() * 50,
}
SUFFIXES = (".json", ".py", ".safetensors", ".bin")
IN_A_FOLDER = (
    "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "trainer_state.json", "latest",
    "model.safetensors.index.json", "model.safetensors", "pytorch_model.bin", "adapter_config.json", ".metadata",
    "adapter_model.safetensors",
)  # fmt: skip
NO_LOCK_IS_NO_LOCK = "stale-cache-lock"  # of any folder the check can say that no lock lies in it


def checks() -> dict[str, tuple[Path, Probe]]:
    catalog = load_catalog((builtin_root(),))
    files = {entry.id: catalog.probe_file(entry) for entry in catalog.current()}
    found = {entry_id: (file, load_probe(str(file))) for entry_id, file in files.items() if file}
    return {entry_id: (file, probe) for entry_id, (file, probe) in found.items() if probe.check}


CHECKS = checks()
WITH_FILES = [entry_id for entry_id, (_, probe) in CHECKS.items() if "path" in {p.type for p in probe.params.values()}]


@pytest.fixture(scope="module", params=ANSWERS)
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of programs that all give one answer."""
    folder = tmp_path_factory.mktemp("programs")
    for name in PROGRAMS:
        (folder / name).write_text(f"#!/bin/sh\n{ANSWERS[request.param]}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def wrong_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("files")
    files = [folder / f"{name}{suffix}" for name in FILES for suffix in SUFFIXES]
    for file in files:
        file.write_bytes(FILES[file.stem])
    for name in ("nothing-in-it", "nonsense-in-it"):
        (folder / name).mkdir()
    for name in IN_A_FOLDER:
        (folder / "nonsense-in-it" / name).write_bytes(FILES["list"])
    return [*files, folder / "nothing-in-it", folder / "nonsense-in-it", folder / "missing"]


def ask(entry_id: str, **given: Any) -> Finding:
    probe = CHECKS[entry_id][1]
    assert probe.check
    finding = probe.check({**{name: param.default for name, param in probe.params.items()}, **given})
    assert finding.state in STATES
    assert finding.evidence and all(isinstance(line, str) and line for line in finding.evidence)
    return finding


@pytest.mark.parametrize("entry_id", CHECKS)
def test_programs_that_print_nonsense(entry_id: str, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    ask(entry_id)


@pytest.mark.parametrize("entry_id", CHECKS)
def test_no_programs_at_all(entry_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ask(entry_id)


@pytest.mark.parametrize("entry_id", CHECKS)
def test_variables_with_odd_values(entry_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variable that the probe file names, with one value after the other."""
    file, _ = CHECKS[entry_id]
    names = set(re.findall(r'"([A-Z][A-Z0-9]+(?:_[A-Z0-9]+)+)"', file.read_text())) - OF_EVERY_PROCESS
    for value in TEXTS:
        for name in names:
            monkeypatch.setenv(name, value)
        ask(entry_id)


@pytest.mark.parametrize("entry_id", CHECKS)
def test_params_with_odd_values(entry_id: str) -> None:
    for name, param in CHECKS[entry_id][1].params.items():
        for value in ODD.get(param.type, ()):
            ask(entry_id, **{name: value})


@pytest.mark.parametrize("entry_id", WITH_FILES)
def test_the_wrong_file_is_not_clear(entry_id: str, wrong_files: list[Path]) -> None:
    for name, param in CHECKS[entry_id][1].params.items():
        for file in wrong_files if param.type == "path" else ():
            finding = ask(entry_id, **{name: file})
            assert finding.state != "clear" or entry_id == NO_LOCK_IS_NO_LOCK, (name, file.name, finding)
