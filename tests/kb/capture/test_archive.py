"""A bundle is written whole or not at all, for its owner alone, and never to a folder that does not answer."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from kb.capture import archive
from kb.errors import CaptureFailed, UsageError


def test_it_is_whole_and_only_for_its_owner(tmp_path: Path) -> None:
    path = archive.write(tmp_path, "kb-capture-1", b"data")
    assert (path.name, path.read_bytes(), path.stat().st_mode & 0o777) == ("kb-capture-1.tar.zst", b"data", 0o600)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_on_a_full_disk_nothing_is_left_and_the_size_is_named(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("this machine mounts no tmpfs")
    try:
        with pytest.raises(CaptureFailed, match="No space left on device") as failed:
            archive.write(tmp_path, "kb-capture-1", b"x" * 200_000)
        assert "200,000 bytes" in failed.value.hint
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_folder_that_is_none_is_a_usage_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="no folder that can be read"):
        archive.check_folder(tmp_path / name)


def test_a_folder_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(archive, "PROBE_S", 0.3)
    began = time.monotonic()
    with pytest.raises(UsageError, match="did not answer"):
        archive.check_folder(tmp_path)
    assert time.monotonic() - began < 10
