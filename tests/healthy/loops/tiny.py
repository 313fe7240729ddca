"""A model of a few thousand weights and a tokenizer, made here: nothing is downloaded."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["[UNK]", "[PAD]", "[EOS]", "a", "cat", "sat", "on", "the", "mat", "user", "assistant", ":"]
TEMPLATE = "{% for one in messages %}{{ one['role'] }} : {{ one['content'] }} [EOS] {% endfor %}"


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", eos_token="[EOS]")
    fast.chat_template = TEMPLATE
    return fast


def model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=64, **sizes))
