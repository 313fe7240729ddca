"""Training configurations are told apart by their keys, and what is none is one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest

from kb.training_config import UnreadableConfig, read_config

KINDS = {
    '{"train_batch_size": 32, "zero_optimization": {"stage": 3}}': "deepspeed",
    '{"bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": "auto"}': "deepspeed",
    "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 8\n": "accelerate",
    "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\noutput_dir: out\nbf16: true\n": "arguments",
    "deepspeed: ds.json\nlearning_rate: 1.0e-4\n": "arguments",
}


@pytest.mark.parametrize("text, kind", KINDS.items(), ids=KINDS.values())
def test_a_configuration_is_known_by_its_keys(tmp_path: Path, text: str, kind: str) -> None:
    (tmp_path / "config").write_text(text)
    assert read_config(tmp_path / "config").kind == kind


BROKEN = {
    "no mapping": ("- 1\n- 2\n", "holds no mapping"),
    "broken JSON": ('{"a": 1,}', "not plain JSON"),
    "an object in YAML": ("a: !!python/object:os.system {}\n", "neither JSON nor YAML"),
    "bytes": ("\udcff\udcfe", "cannot be read"),
    "depth": ("[" * 100_000, "not plain JSON"),
}


@pytest.mark.parametrize("text, told", BROKEN.values(), ids=BROKEN)
def test_what_is_no_configuration_is_one_error(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "config").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UnreadableConfig, match=told):
        read_config(tmp_path / "config")


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(UnreadableConfig, match="is not a file"):
        read_config(tmp_path / "none.json")
