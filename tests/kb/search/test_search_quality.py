"""Kinds of questions: however something is spelt, pasted or said, the same entry answers.

The texts are made up for these tests. What share of real questions is answered is measured by tests/bench.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kb.content.roots import builtin_root
from kb.search import synonyms
from kb.search.index import Index
from kb.search.index_cache import open_index
from kb.search.query import concepts, units_of
from kb.search.ranking import search
from kb.search.tokenizer import terms


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with open_index((builtin_root(),)) as opened:
            yield opened


def first(index: Index, text: str, count: int = 1) -> list[str]:
    return [hit.id for hit in search(index, text).hits[:count]]


@pytest.mark.parametrize(
    "slip, meant, entry",
    [
        (
            "NCLL timout while savign the model",
            "NCCL timeout while saving the model",
            "checkpoint-save-allgather-timeout",
        ),
        ("adress alredy in use", "address already in use", "address-in-use"),
        ("Conection reset by pear", "Connection reset by peer", "connection-reset-by-peer"),
        ("uncorectable ECC eror", "uncorrectable ECC error", "gpu-xid-hardware-fault"),
    ],
)
def test_a_misspelt_question_finds_what_the_right_spelling_finds(
    index: Index, slip: str, meant: str, entry: str
) -> None:
    assert first(index, meant) == [entry]
    assert first(index, slip) == [entry]


ERRORS = {
    "DataLoader worker (pid 4711) is killed by signal: Bus error.": "dataloader-shm-bus-error",
    "RuntimeError: Cannot re-initialize CUDA in forked subprocess.": "cuda-in-forked-subprocess",
    "NVRM: Xid (PCI:0000:c1:00): 79, pid=2211, GPU has fallen off the bus.": "gpu-xid-hardware-fault",
    "OSError: [Errno 24] Too many open files: '/data/shard-00017.tar'": "too-many-open-files",
}
PREFIXES = (
    "",
    "[rank13]: ",
    "[default5]:",
    "2031-05-04 23:11:07,502 ",
    "[2031-05-04T23:11:07.502Z] node-7 pid=88123 0x7f3bd41c2a90 ",
    "E0504 23:11:07.502000 140263881 /opt/conda/lib/python3.11/site-packages/torch/x.py:870] ",
)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("error", ERRORS)
def test_a_log_line_is_found_whatever_its_time_rank_and_process(index: Index, error: str, prefix: str) -> None:
    assert first(index, prefix + error) == [ERRORS[error]]


def test_a_pasted_traceback_finds_what_its_last_line_finds(index: Index) -> None:
    frames = "".join(
        f'  File "/home/someone/venv-{number}/lib/site-packages/torch/nn/modules/module.py", line {number}, in _call_impl\n'
        "    return forward_call(*args, **kwargs)\n"
        for number in range(1511, 1519)
    )
    last = "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn"
    assert first(index, f"Traceback (most recent call last):\n{frames}{last}") == first(index, last)
    assert first(index, last) == ["grad-checkpoint-no-grad"]


@pytest.mark.parametrize(
    "name", ["ALLGATHER", "AllGather", "all_gather", "all-gather", "all gather", "_ALLGATHER_BASE"]
)
def test_an_identifier_is_found_in_every_spelling(index: Index, name: str) -> None:
    assert first(index, f"{name} timeout when a checkpoint is saved") == ["checkpoint-save-allgather-timeout"]


@pytest.mark.parametrize("written", ["multi-gpu", "multi gpu", "Multi-GPU", "multiple gpus", "多卡"])
def test_a_hyphen_does_not_hide_a_word_of_the_glossary(written: str) -> None:
    (concept,) = concepts(units_of(written), lambda _: False, synonyms.synonyms())
    alternatives = {"".join(alternative.terms) for alternative in concept.alternatives}
    assert "多卡" in alternatives
    assert "multigpu" in alternatives


def test_the_names_in_a_mangled_symbol_are_terms() -> None:
    texts = {term.text for term in terms("undefined symbol: _ZN3c104cuda11some_kernelERKNS_6TensorE")}
    assert {"c10", "cuda", "some_kernel", "tensor"} <= texts


def test_a_symbol_that_no_entry_shows_is_still_a_symbol_of_torch(index: Index) -> None:
    text = "ImportError: my_ops.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZNK3c1010TensorImpl7stridesEv"
    assert first(index, text) == ["extension-abi-mismatch"]


def test_a_number_of_gpus_does_not_hide_their_model() -> None:
    assert "h100" in {term.text for term in terms("8xH100")} & {term.text for term in terms("H100")}


@pytest.mark.parametrize(
    "question, entry",
    [
        ("DataLoader 在容器里报 Bus error", "dataloader-shm-bus-error"),
        ("torchrun 报 EADDRINUSE 端口冲突", "address-in-use"),
        ("FSDP 包装 LoRA 报 uniform requires_grad", "fsdp-mixed-requires-grad"),
        ("safetensors 报HeaderTooLarge加载失败", "incomplete-model-download"),
        ("磁盘写满之后检查点损坏", "checkpoint-corrupt"),
        ("显存碎片太多", "oom-fragmentation"),
        ("换了卡数之后无法断点续训", "resume-world-size-mismatch"),
    ],
)
def test_chinese_is_found_alone_and_with_english_words_in_it(index: Index, question: str, entry: str) -> None:
    assert first(index, question) == [entry]


def test_a_bigram_across_two_known_chinese_words_is_no_concept() -> None:
    surfaces = [concept.surface for concept in concepts(units_of("单机多卡超时"), lambda _: False, synonyms.synonyms())]
    assert surfaces == ["单机", "多卡", "超时"]


@pytest.mark.parametrize(
    "question, entry",
    [
        ("Lightning trainer.validate never comes back, one rank has fewer batches", "uneven-inputs-hang"),
        ("DeepSpeed ZeRO-3 model.generate does not return on two GPUs", "zero3-generate-hang"),
        ("accelerate launch ends with ChildFailedError and no traceback", "torchrun-root-cause-hidden"),
        ("worked with the older release, broken after pip install -U of a library", "library-version-regression"),
        ("torch 2.6 torch.load refuses my checkpoint", "weights-only-load"),
    ],
)
def test_a_symptom_in_the_words_of_a_framework_or_with_a_version_is_found(
    index: Index, question: str, entry: str
) -> None:
    assert entry in first(index, question, 3)


def test_a_chinese_word_finds_what_is_written_in_english_only(index: Index) -> None:
    """Through the glossary: an entry of a team may have no Chinese beyond its title."""
    (concept,) = concepts(units_of("超时"), lambda _: False, index.synonyms)
    assert ("timeout",) in [alternative.terms for alternative in concept.alternatives]


def test_an_empty_or_meaningless_question_is_answered_with_nothing(index: Index) -> None:
    assert [search(index, text).hits for text in ("", "   ", "the of and", "，。！")] == [()] * 4
