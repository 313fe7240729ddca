"""PEFT looks for layers by name, but the model has no layer of that name, or the name belongs to something else."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, List, Optional, Union

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom

NOT_FOUND = raised(r"Target modules .* not found in the base model")


def gpt2() -> Any:
    """A GPT-2 of one layer, with c_attn, c_proj and c_fc."""
    from transformers import GPT2Config, GPT2LMHeadModel  # type: ignore[import-not-found]

    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8))


def llama() -> Any:
    """A Llama of one layer, with q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 16, "vocab_size": 16, "max_position_embeddings": 8}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, **sizes))


def mixture() -> Any:
    """A mixture of experts of one layer; its experts are two parameters, not layers."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 16, "moe_intermediate_size": 4, "vocab_size": 16, "head_dim": 4}
    counts = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts_per_tok=2, **counts, **sizes))


def mamba() -> Any:
    """A Mamba of one layer, with in_proj, x_proj, dt_proj, out_proj and conv1d."""
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(hidden_size=8, state_size=4, num_hidden_layers=1, vocab_size=16))


def custom_model() -> Any:
    """A model of a custom class, for which PEFT has no default names."""
    import torch

    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


def adapted(model: Any) -> List[str]:
    """The names of the layers that have an adapter."""
    return sorted(name[: -len(".lora_A")] for name, _ in model.named_modules() if name.endswith(".lora_A"))


def adapt(
    ctx: Context, *, target_modules: Optional[Union[str, List[str]]], model: Callable[[], Any], layers: List[str]
) -> None:
    """Adds LoRA to `target_modules`; exactly `layers` must have an adapter, and the adapters must get gradients."""
    import torch
    from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]

    base = model()
    ctx.reached()
    peft_model = get_peft_model(base, LoraConfig(r=2, target_modules=target_modules))
    actual = sorted({name.rpartition(".")[2] for name in adapted(peft_model)})
    missing = [name for name in layers if name not in actual]
    if missing:
        raise Symptom("%s has no adapter, but PEFT reports no error" % ", ".join(missing))
    assert actual == layers, actual
    if model is not custom_model:
        tokens = torch.tensor([[1, 2, 3]])
        peft_model(input_ids=tokens, labels=tokens).loss.backward()
        gradients = [p.grad for name, p in peft_model.named_parameters() if "lora_B" in name]
        assert gradients and all(g is not None and g.abs().sum() > 0 for g in gradients)


def adapt_experts(ctx: Context, *, by_parameter: bool) -> None:
    """Names the experts of a mixture as layers, or as the two parameters that hold them."""
    import torch
    from peft import LoraConfig, get_peft_model

    base = mixture()
    ctx.reached()
    config = LoraConfig(target_modules=["gate_proj"])
    if by_parameter:
        config = LoraConfig(
            target_modules=["q_proj", "v_proj"],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
            lora_dropout=0,
        )
    model = get_peft_model(base, config)
    actual = sorted({name.rpartition(".")[2] for name in adapted(model)})
    assert actual == ["base_layer", "experts", *QUERIES], actual
    tokens = torch.tensor([[1, 2, 3]])
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for name, p in model.named_parameters() if "lora_B" in name
    )


def load(ctx: Context, *, same_base: bool) -> None:
    """Loads a saved adapter onto the base model on which it was trained, or onto another one."""
    from peft import LoraConfig, PeftModel, get_peft_model

    get_peft_model(llama(), LoraConfig(r=2, target_modules=QUERIES)).save_pretrained(ctx.path("adapter"))
    base = llama() if same_base else gpt2()
    ctx.reached()
    model = PeftModel.from_pretrained(base, ctx.path("adapter"))
    assert len(adapted(model)) == 2


def pair(
    name: str,
    broken: Any,
    right: Any,
    model: Callable[[], Any],
    layers: List[str],
    because: str,
    fix: str,
    expect: Expect = NOT_FOUND,
    **packages: str,
) -> Experiment:
    """`broken` and `right` are the values of target_modules in the control and in the treatment arm."""
    job = partial(adapt, model=model, layers=layers)
    broken, right = partial(job, target_modules=broken), partial(job, target_modules=right)
    return experiment(name, broken, right, because, fix, expect, **packages)


def experiment(
    name: str, broken: Any, right: Any, because: str, fix: str, expect: Expect = NOT_FOUND, **packages: str
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(broken, expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(right, expect=completed(), because=fix, fidelity="cpu"),
        world_size=1,
        needs=Needs(packages={"torch": ">=2.1", "peft": ">=0.8", "transformers": ">=4.38", **packages}),
        deadline_s=60.0,
        expected_s=(3.0, 3.0),
    )


QUERIES = ["q_proj", "v_proj"]

probe = Probe(
    experiments=(
        pair(
            "names",
            QUERIES,
            ["c_attn"],
            gpt2,
            ["c_attn"],
            "target_modules names q_proj and v_proj, but GPT-2 has no such layers",
            "target_modules names c_attn, which GPT-2 has",
        ),
    ),
    variants=(
        pair(
            "all-linear",
            QUERIES,
            "all-linear",
            gpt2,
            ["c_attn", "c_fc", "c_proj"],
            "target_modules names q_proj and v_proj, but GPT-2 has no such layers",
            "all-linear selects every linear layer except the output layer",
        ),
        pair(
            "one-string",
            ["q_proj,v_proj"],
            QUERIES,
            llama,
            QUERIES,
            "target_modules has two names in one string, as a command line passes them",
            "target_modules is a list of two names",
        ),
        pair(
            "pattern-in-list",
            [r".*self_attn\.(q_proj|v_proj)"],
            r".*self_attn\.(q_proj|v_proj)",
            llama,
            QUERIES,
            "PEFT takes a regular expression in a list for the end of a name",
            "PEFT matches a regular expression that is a plain string",
        ),
        pair(
            "bare-string",
            "q_proj",
            ["q_proj"],
            llama,
            ["q_proj"],
            "PEFT takes a name outside a list for a regular expression of the whole path",
            "PEFT takes the name in a list for the end of a path",
        ),
        pair(
            "empty",
            [],
            "all-linear",
            gpt2,
            ["c_attn", "c_fc", "c_proj"],
            "target_modules is an empty list, because a search found no layers",
            "all-linear makes PEFT search for the layers",
            raised(r"Target modules (\[\]|set\(\)) not found|No `target_modules` passed but also no"),
        ),
        experiment(
            "other-base",
            partial(load, same_base=False),
            partial(load, same_base=True),
            "the job loads a Llama adapter onto GPT-2, which has other layers",
            "the job loads the adapter onto the model on which it was trained",
        ),
        experiment(
            "experts",
            partial(adapt_experts, by_parameter=False),
            partial(adapt_experts, by_parameter=True),
            "target_modules names gate_proj alone, but gate_proj and up_proj are one parameter",
            "target_parameters names the two parameters of the experts",
            raised(r"Cannot convert PEFT target\(s\) gate_proj without also targeting up_proj"),
            peft=">=0.19",
            transformers=">=5",
        ),
        pair(
            "all-linear-in-list",
            ["all-linear"],
            "all-linear",
            gpt2,
            ["c_attn", "c_fc", "c_proj"],
            "PEFT takes all-linear in a list for the name of a layer",
            "PEFT takes all-linear as a plain string for every linear layer",
        ),
        pair(
            "mamba",
            "all-linear",
            ["in_proj"],
            mamba,
            ["in_proj"],
            "all-linear selects out_proj, whose weight the Mamba kernel uses without the adapter",
            "target_modules names in_proj, which the model calls as a layer",
            raised(r"Module 'out_proj' is incompatible with Mamba-based models"),
            peft=">=0.16",
        ),
        pair(
            "no-default",
            None,
            ["0", "1"],
            custom_model,
            ["0", "1"],
            "target_modules is not set, and PEFT has no default names for a custom model",
            "target_modules names the layers",
            raised(r"Please specify `target_modules`"),
        ),
        pair(
            "container",
            ["self_attn"],
            r".*self_attn\.(q_proj|v_proj)",
            llama,
            QUERIES,
            "target_modules names the attention block, which is not a layer",
            "target_modules names the layers in the block",
            raised(r"Target module [\s\S]* is not supported\. Currently, only"),
        ),
        pair(
            "partly",
            ["q_proj", "value_proj"],
            QUERIES,
            llama,
            QUERIES,
            "one of the two names is wrong",
            "both names are right",
            symptom(r"v_proj has no adapter, but PEFT reports no error"),
        ),
    ),
)
