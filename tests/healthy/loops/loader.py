"""DataLoader workers by fork or spawn, with a tokenizer used before, and a dataset mapped by several processes."""

import sys

import datasets
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

method = sys.argv[1]
tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "cat": 2, "sat": 3}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = Whitespace()
tokenizer.encode_batch(["a cat sat"] * 64)


class Words(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, 1, 2])


def encode(rows: dict) -> dict:
    return {"ids": [tokenizer.encode(text).ids for text in rows["text"]]}


if __name__ == "__main__":
    rows = datasets.Dataset.from_dict({"text": ["a cat sat"] * 2000})
    mapped = rows.map(encode, batched=True, num_proc=2, desc="Running tokenizer on dataset")
    mapped = mapped.filter(lambda row: len(row["ids"]) > 1, num_proc=2)
    print(mapped)
    loader = torch.utils.data.DataLoader(
        Words(), batch_size=8, num_workers=2, multiprocessing_context=method, persistent_workers=True, pin_memory=True
    )
    for epoch in range(2):
        print("epoch", epoch, "batches", sum(1 for _ in loader))
