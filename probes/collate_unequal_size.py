"""The default collate function stacks the samples of a batch, so they must all have the same shape."""

from collections.abc import Callable
from functools import partial
from typing import Any

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom


def pad(batch: list[dict[str, Any]]) -> dict[str, Any]:
    """The collate function of the entry: pads tokens and labels to the longest sample."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids = [torch.as_tensor(sample["input_ids"]) for sample in batch]
    labels = [torch.as_tensor(sample["labels"]) for sample in batch]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=0),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def keep_boxes(batch: list[Any]) -> Any:
    """A collate function that stacks the images and keeps the boxes as a list, because they must not be padded."""
    import torch

    images = torch.stack([image for image, _ in batch])
    boxes = [box for _, box in batch]
    return images, boxes


def load(ctx: Context, *, padded: bool, as_lists: bool = False, workers: int = 0) -> None:
    """Loads a batch of two samples with 3 and 4 tokens; with a worker, the longer sample comes first."""
    import torch
    from torch.utils.data import DataLoader

    lengths = (4, 3) if workers else (3, 4)
    samples = [{"input_ids": [7] * length, "labels": [7] * length} for length in lengths]
    if not as_lists:
        samples = [{name: torch.tensor(value).clone() for name, value in sample.items()} for sample in samples]
    options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    ctx.reached()
    (batch,) = DataLoader(samples, batch_size=2, collate_fn=pad if padded else None, **options)
    assert batch["input_ids"].shape == (2, 4)
    assert batch["attention_mask"].sum(1).tolist() == list(lengths)
    assert batch["labels"][lengths.index(3)].tolist() == [7, 7, 7, -100]


def load_boxes(ctx: Context, *, kept: bool) -> None:
    """Loads a batch of two images of the same size, with 1 and 2 boxes."""
    import torch
    from torch.utils.data import DataLoader

    samples = [(torch.zeros(3, 8, 8), torch.zeros(count, 4)) for count in (1, 2)]
    ctx.reached()
    loader = DataLoader(samples, batch_size=2, collate_fn=keep_boxes if kept else None)
    ((images, boxes),) = loader
    assert images.shape == (2, 3, 8, 8) and [len(box) for box in boxes] == [1, 2]


def resize(ctx: Context, *, together: bool) -> None:
    """Resizes an image with one bright object to half, and its box together with it or not at all."""
    import torch

    image, box = torch.zeros(1, 1, 8, 8), torch.tensor([4, 4, 8, 8])
    image[..., 4:8, 4:8] = 1
    ctx.reached()
    image = torch.nn.functional.interpolate(image, size=(4, 4))
    if together:
        box = box // 2
    left, top, right, bottom = box.tolist()
    inside = image[0, 0, top:bottom, left:right].sum().item()
    if inside != image.sum().item():
        raise Symptom(f"{inside:.0f} of {image.sum().item():.0f} bright pixels are in the box, no error")


def fill(ctx: Context, *, ignored: bool) -> None:
    """Computes the loss of a batch whose second row is half padding, for a model that predicts every real token."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.utils.rnn import pad_sequence

    labels = pad_sequence(
        [torch.ones(4).long(), torch.ones(2).long()], batch_first=True, padding_value=-100 if ignored else 0
    )
    logits = torch.zeros(2, 4, 3)
    logits[..., 1] = 9
    ctx.reached()
    loss = cross_entropy(logits.view(-1, 3), labels.view(-1)).item()
    if loss > 0.1:
        raise Symptom(f"loss {loss:.2f} with the padding, every real token is predicted")


def load_groups(ctx: Context, *, padded: bool = False, dropped: bool = False) -> None:
    """Loads batches of equal length as the second of two accelerate processes does; the last batch is incomplete."""
    import torch
    from accelerate.data_loader import BatchSamplerShard  # type: ignore[import-not-found]
    from torch.utils.data import BatchSampler, DataLoader

    samples = [{name: torch.ones(3 + (i > 3)).long() for name in ("input_ids", "labels")} for i in range(7)]
    groups = BatchSampler(range(7), batch_size=2, drop_last=dropped)
    assert len(list(DataLoader(samples, batch_sampler=groups))) == 4 - dropped
    ctx.reached()
    shard = BatchSamplerShard(groups, num_processes=2, process_index=1)
    batches = list(DataLoader(samples, batch_sampler=shard, collate_fn=pad if padded else None))
    lengths = [batch["input_ids"].sum(1).tolist() for batch in batches]
    assert lengths == ([[3, 3]] if dropped else [[3, 3], [4, 3]])


def build_tokenizer() -> Any:
    from tokenizers import Tokenizer, models  # type: ignore[import-not-found]
    from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found]

    words = Tokenizer(models.WordLevel({"[PAD]": 0, "a": 1, "b": 2}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")


def pad_labels(ctx: Context, *, seq2seq: bool) -> None:
    """Collates samples that bring their own labels, of unequal length."""
    from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding

    samples = [{"input_ids": [1, 2, 1], "labels": [-100, 2, 1]}, {"input_ids": [1, 2], "labels": [-100, 2]}]
    tokenizer = build_tokenizer()
    if seq2seq:
        collator = DataCollatorForSeq2Seq(tokenizer)
    else:
        collator = DataCollatorWithPadding(tokenizer)
    ctx.reached()
    batch = collator(samples)
    assert batch["labels"].tolist() == [[-100, 2, 1], [-100, 2, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


def keep_labels(ctx: Context, *, seq2seq: bool) -> None:
    """Collates samples whose labels mask the prompt; DataCollatorForLanguageModeling gets them without labels."""
    from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq

    samples = [{"input_ids": [1, 2, 1], "labels": [-100, 2, 1]}, {"input_ids": [1, 2], "labels": [-100, 2]}]
    if not seq2seq:
        samples = [{"input_ids": sample["input_ids"]} for sample in samples]
    language_modeling = partial(DataCollatorForLanguageModeling, mlm=False)
    collator = (DataCollatorForSeq2Seq if seq2seq else language_modeling)(build_tokenizer())
    ctx.reached()
    labels = collator(samples)["labels"].tolist()
    if labels[0][0] != -100:
        raise Symptom(f"the prompt has the label {labels[0][0]}")
    assert labels == [[-100, 2, 1], [-100, 2, -100]]


def call(ctx: Context, *, padding: bool) -> None:
    """Passes two texts to one call of the tokenizer."""
    tokenizer = build_tokenizer()
    ctx.reached()
    words = [["a", "b", "a"], ["a", "b"]]
    batch = tokenizer(words, is_split_into_words=True, return_tensors="pt", padding=padding, truncation=padding)
    assert batch["input_ids"].tolist() == [[1, 2, 1], [1, 2, 0]]


STACK = raised(
    r"stack expects each tensor to be equal size, but got \[\d+(, 4)?\] at entry 0 and \[\d+(, 4)?\] at entry 1"
)
PADDED = "the collate function pads to the longest sample of the batch"


def pair(
    name: str, job: Callable[..., None], flag: str, expect: Expect, because: str, fix: str, **packages: str
) -> Experiment:
    """An experiment whose job gets `flag=False` in the control arm and `flag=True` in the treatment."""
    return Experiment(
        name=name,
        control=Arm(partial(job, **{flag: False}), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **{flag: True}), expect=completed(), because=fix, fidelity="cpu"),
        needs=Needs(packages={"torch": ">=2.1", **packages}),
        world_size=1,
        expected_s=(0.3, 0.3),
    )


probe = Probe(
    experiments=(
        pair("default", load, "padded", STACK, "the default collate function stacks samples of 3 and 4 tokens", PADDED),
    ),
    variants=(
        pair(
            "worker",
            partial(load, workers=1),
            "padded",
            raised(r"Trying to resize storage that is not resizable"),
            "a worker stacks the samples, and the longer one comes first; each tensor is a clone",
            PADDED,
        ),
        pair(
            "lists",
            partial(load, as_lists=True),
            "padded",
            raised(r"each element in list of batch should be of equal size"),
            "the default collate function gets lists of 3 and 4 numbers",
            PADDED,
        ),
        pair(
            "boxes",
            load_boxes,
            "kept",
            STACK,
            "the default collate function stacks the boxes of two images, which have 1 and 2 boxes",
            "the collate function stacks the images and keeps the boxes as a list",
        ),
        pair(
            "resized-alone",
            resize,
            "together",
            symptom(r"0 of 4 bright pixels are in the box, no error"),
            "the code resizes the image, but its box keeps the old coordinates",
            "the code resizes the box with the image",
        ),
        pair(
            "label-padding",
            fill,
            "ignored",
            symptom(r"loss 2\.\d\d with the padding"),
            "the labels are padded with 0, which is a token",
            "the labels are padded with -100, which the loss ignores",
        ),
        pair(
            "transformers",
            pad_labels,
            "seq2seq",
            raised(r"Unable to create tensor, you should probably activate truncation and/or padding"),
            "DataCollatorWithPadding pads the tokens, but not the labels",
            "DataCollatorForSeq2Seq pads both",
            transformers="",
        ),
        pair(
            "tokenizer-call",
            call,
            "padding",
            raised(r"Unable to create tensor, you should probably activate truncation and/or padding"),
            "the tokenizer must return two texts as one tensor, but is not told to pad",
            "the call has padding=True and truncation=True",
            transformers="",
        ),
        pair(
            "labels-dropped",
            keep_labels,
            "seq2seq",
            symptom(r"the prompt has the label 1"),
            "the labels are dropped, so DataCollatorForLanguageModeling makes new ones from all tokens",
            "DataCollatorForSeq2Seq keeps the labels of the samples",
            transformers="",
        ),
        pair(
            "groups",
            load_groups,
            "padded",
            STACK,
            "accelerate fills the last, incomplete batch with a sample of another length",
            PADDED,
            accelerate="",
        ),
        pair(
            "groups-dropped",
            load_groups,
            "dropped",
            STACK,
            "the batch sampler keeps its last, incomplete batch, and accelerate fills it with a shorter sample",
            "the batch sampler drops its last batch, so accelerate fills nothing",
            accelerate="",
        ),
    ),
)
