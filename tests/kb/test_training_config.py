"""Training configurations are distinguished by their keys, and an invalid one is one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest

from kb.training_config import UnreadableConfig, micro_batch_tokens, read_config, spans_nodes

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


@pytest.mark.parametrize("text, message", BROKEN.values(), ids=BROKEN)
def test_an_invalid_configuration_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UnreadableConfig, match=message):
        read_config(tmp_path / "config")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnreadableConfig, match="is not a file"):
        read_config(tmp_path / "none.json")


def test_tokens_of_a_micro_batch_need_length_and_batch_size() -> None:
    assert micro_batch_tokens({"cutoff_len": 4096, "per_device_train_batch_size": 2}) == 8192
    assert micro_batch_tokens({"cutoff_len": 4096, "train_micro_batch_size_per_gpu": "auto"}) is None


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, True),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, False),
        ({"SLURM_NNODES": "2"}, True),
    ],
)
def test_the_launcher_says_whether_a_job_spans_nodes(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: bool | None
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert spans_nodes(0) is expected
    assert spans_nodes(-3) is expected
    assert spans_nodes(3) is True
