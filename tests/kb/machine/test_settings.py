"""kb.machine.settings: what NCCL and torch are told is shown, secrets are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kb.machine import settings
from kb.runtime.survey_fields import Reader


def test_variables_are_shown_and_secrets_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("NVIDIA_API_KEY", "nvapi-1")
    monkeypatch.setenv("TORCH_HUB_token", "t-1")
    monkeypatch.setenv("TORCH_PROXY", "http://me:pw@proxy")
    monkeypatch.setenv("AWS_REGION", "mars")
    result = settings.variables()
    assert result["NCCL_SOCKET_IFNAME"] == "eth0"
    assert result["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert {result[name] for name in ("NVIDIA_API_KEY", "TORCH_HUB_token", "TORCH_PROXY")} == {"(redacted)"}
    assert "AWS_REGION" not in result


def test_shows_the_file_that_nccl_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "nccl.conf"
    path.write_text("# ours\nNCCL_IB_DISABLE=1\nNCCL_AUTH_TOKEN=t-1\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(path))
    files = settings.nccl_files()
    assert set(files) == {"/etc/nccl.conf", str(path)}  # and not the user's own: NCCL reads one or the other
    assert files[str(path)]() == "# ours\nNCCL_IB_DISABLE=1\nNCCL_AUTH_TOKEN=(redacted)"


def test_the_users_own_file_is_not_looked_for_in_the_home_variable(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_CONF_FILE", raising=False)
    (home / ".nccl.conf").write_text("# HOME is not where NCCL looks\n")
    result = Reader().values("nccl_files", settings.nccl_files())
    assert "~/.nccl.conf" in result
    assert result["~/.nccl.conf"] != "# HOME is not where NCCL looks"
