"""A script passes an argument that the installed transformers or trl has renamed, moved to a config, or removed."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Optional, Set, Tuple

from kb.packages import version
from kb.probe import (
    Arm,
    Context,
    Expect,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    clear,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

LARGEST_SCRIPT = 1 << 20  # bytes
FILES = {
    "transformers": ("training_args*.py", "trainer.py", "trainer_seq2seq.py"),
    "trl": ("trainer/*.py", "experimental/*/*.py"),
}
HINTS = {
    "evaluation_strategy": "eval_strategy",
    "eval_strategy": "evaluation_strategy before transformers 4.41",
    "tokenizer": "processing_class",
    "processing_class": "tokenizer before transformers 4.46 and trl 0.12",
    "max_seq_length": "max_length, in SFTConfig",
    "dataset_text_field": "the same, in SFTConfig",
    "packing": "the same, in SFTConfig",
    "beta": "the same, in the trainer's config",
    "warmup_ratio": "warmup_steps, which takes a fraction",
    "no_cuda": "use_cpu",
    "group_by_length": 'train_sampling_strategy="group_by_length"',
}
OVERRIDDEN = ("compute_loss", "training_step", "log", "_get_train_sampler")  # the Trainer passes more than it did
ASKED = 2048  # tokens


def load(name: str) -> Any:
    """The package, in a process that no launcher started: else TrainingArguments looks for a process group."""
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(variable, None)
    return importlib.import_module(name)


def make_arguments(ctx: Context, *, renamed: bool = False, asks: bool = False) -> None:
    """The real TrainingArguments; `asks` is one script for releases before and after the renaming."""
    TrainingArguments: Any = load("transformers").TrainingArguments  # noqa: N806
    ctx.reached()
    when = "eval_strategy" if renamed else "evaluation_strategy"
    if asks:
        known = inspect.signature(TrainingArguments).parameters
        when = "eval_strategy" if "eval_strategy" in known else "evaluation_strategy"
    args = TrainingArguments(output_dir=ctx.path("out"), use_cpu=True, eval_steps=5, **{when: "steps"})
    assert args.eval_strategy == "steps"


def parse(ctx: Context, *, renamed: bool) -> None:
    """A recipe in YAML or JSON, which comes as a dict."""
    hf = load("transformers")
    ctx.reached()
    recipe = {"output_dir": ctx.path("out"), "use_cpu": True, "eval_steps": 5}
    recipe["eval_strategy" if renamed else "evaluation_strategy"] = "steps"
    assert hf.HfArgumentParser(hf.TrainingArguments).parse_dict(recipe)[0].eval_strategy == "steps"


def fine_tune(ctx: Context, *, adapted: bool, argument: str) -> None:
    """The real SFTTrainer, with a tiny model."""
    hf = load("transformers")
    trl = load("trl")
    tk = load("tokenizers")
    rows = load("datasets").Dataset.from_list([{"answer": "a b </s>"}] * 2)
    plain = tk.Tokenizer(tk.models.WordLevel({"</s>": 0, "a": 1, "b": 2}, unk_token="a"))
    plain.pre_tokenizer = tk.pre_tokenizers.WhitespaceSplit()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>", pad_token="</s>")
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=3, bos_token_id=None, eos_token_id=0, **sizes))
    options: Dict[str, Any] = {"processing_class": tokenizer}
    settings: Dict[str, Any] = {"dataset_text_field": "answer"}
    if not adapted:
        moved = {"tokenizer": options.pop("processing_class")} if argument == "tokenizer" else settings
        options, settings = {**options, **moved}, {} if moved is settings else settings
    ctx.reached()
    args = trl.SFTConfig(output_dir=ctx.path("out"), use_cpu=True, bf16=False, report_to="none", **settings)
    trainer = trl.SFTTrainer(model, args=args, train_dataset=rows, **options)
    assert list(trainer.train_dataset[0]["input_ids"])[:2] == [1, 2]


def set_length(ctx: Context, *, renamed: bool) -> None:
    """The real SFTConfig, with a length of its own; the script leaves out what the class does not know."""
    SFTConfig: Any = load("trl").SFTConfig  # noqa: N806
    asked: Dict[str, Any] = {"max_length" if renamed else "max_seq_length": ASKED}
    known = inspect.signature(SFTConfig).parameters
    asked = {name: value for name, value in asked.items() if name in known}
    ctx.reached()
    args = SFTConfig(output_dir=ctx.path("out"), use_cpu=True, bf16=False, **asked)
    if args.max_length != ASKED:
        raise Symptom(f"no error, and samples are cut at {args.max_length} tokens; {ASKED} were asked for")


def train(ctx: Context, *, fits: bool = True, own: str = "loss", says_mean: bool = True, accumulation: int = 1) -> None:
    """The real Trainer, with a loss or step of one's own; the gradient of the only weight is 1 per micro-batch."""
    import torch

    hf = load("transformers")
    Base: Any = hf.Trainer  # noqa: N806

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: Any, labels: Any = None, **kwargs: Any) -> Any:  # noqa: ARG002
            return {"logits": self.weight * x}

    def own_loss(outputs: Any, inputs: Any) -> Any:
        return (outputs["logits"] * inputs["labels"]).mean()

    class Loss(Base):  # type: ignore[misc]
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN003, ANN202, ARG002
            self.model_accepts_loss_kwargs = False
            outputs = model(**inputs)
            loss = own_loss(outputs, inputs)
            return (loss, outputs) if return_outputs else loss

    class Undivided(Base):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:  # noqa: ARG002
            return own_loss(model(**inputs), inputs)

    class OldLoss(Loss):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
            return Loss.compute_loss(self, model, inputs, return_outputs)  # type: ignore[no-untyped-call]

    class StepTrainer(Loss):
        def training_step(self, model, inputs, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN003, ANN202
            return super().training_step(model, inputs, *args, **kwargs)

    class OldStepTrainer(Loss):
        def training_step(self, model: Any, inputs: Any) -> Any:
            return super().training_step(model, inputs)

    plain = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "max_steps": 1, "max_grad_norm": 0.0}
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": accumulation}
    args = hf.TrainingArguments(output_dir=ctx.path("out"), optim="sgd", learning_rate=1.0, **plain, **sizes)
    rows = [{"x": torch.ones(1), "labels": torch.ones(1)}] * accumulation
    model = Model()
    classes = {"loss": (OldLoss, Loss), "step": (OldStepTrainer, StepTrainer)}
    chosen = classes[own][fits] if says_mean or accumulation == 1 else Undivided
    trainer = chosen(model=model, args=args, train_dataset=rows)
    ctx.reached()
    trainer.train()
    step = -model.weight.item()
    if abs(step - 1.0) > 1e-4:
        raise Symptom(f"the gradient is {step:.1f} with {accumulation} micro-batches, and 1.0 with one")


def call(ctx: Context, *, renamed: bool) -> None:
    """The same renaming, without transformers."""

    @dataclass
    class TrainingArguments:
        output_dir: str
        eval_strategy: str = "no"

    ctx.reached()
    asked = {"eval_strategy" if renamed else "evaluation_strategy": "steps"}
    assert TrainingArguments("out", **asked).eval_strategy == "steps"


def check(params: Mapping[str, Any]) -> Finding:
    """Does the installed release take the arguments that a script passes? Imports and runs nothing of either."""
    script = params["script"]
    if script is None:
        return unknown("no script was named", advice="--set script=train.py")
    try:
        if not script.is_file() or script.stat().st_size > LARGEST_SCRIPT:
            return unknown("%s is no file, or too large to be a script" % script)
        return judge(script, ast.parse(script.read_text(encoding="utf-8")))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return unknown("%s, or the source of a package, cannot be read: %r" % (script, error))


def judge(script: Path, tree: ast.Module) -> Finding:
    names, source = imported(tree), ast.unparse(tree)
    fields: Dict[str, Set[str]] = {}  # of the script's own dataclasses
    refused, judged, unseen = [], [], []
    if re.search(r"^\s*(import|from) unsloth\b", source, re.MULTILINE):
        return unknown("%s imports unsloth, which replaces the classes of trl" % script)
    if re.search(r"\b(HfArgumentParser|TrlParser)\b", source):
        unseen.append("a parser fills the arguments, from a recipe or command line that cannot be seen here")
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) in names for base in node.bases):
            bases = [ast.unparse(base) for base in node.bases]
            base = next(names[name] for name in bases if name in names)
            own = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
            if {"__init__", "__new__"} & set(own) or not all(name in names for name in bases):
                unseen.append("line %d: what %s takes is decided elsewhere" % (node.lineno, node.name))
                names.pop(node.name, None)
            else:
                fields[node.name] = annotated(node).union(*(fields.get(name, set()) for name in bases))
                names[node.name] = base
            for name in [name for name in OVERRIDDEN if name in own and base[1].endswith("Trainer")]:
                theirs = method(("transformers", "Trainer"), name)
                if theirs is None:
                    unseen.append("line %d: how %s is called was not found" % (own[name].lineno, name))
                elif takes_less(own[name], theirs):
                    where = (own[name].lineno, name, "transformers %s" % version("transformers"))
                    refused.append("line %d: %s takes fewer arguments than %s passes" % where)
    for node in ast.walk(tree):
        target = names.get(ast.unparse(node.func)) if isinstance(node, ast.Call) else None
        if not isinstance(node, ast.Call) or target is None:
            continue
        package, name = target
        known = arguments(package, name)
        if known is None:
            unseen.append("line %d: what %s of %s takes was not found" % (node.lineno, name, package))
            continue
        known = known | fields.get(ast.unparse(node.func), set())
        judged.append("line %d: %s of %s" % (node.lineno, name, f"{package} {version(package)}".strip()))
        for keyword in node.keywords:
            if keyword.arg is None:
                unseen.append("line %d: %s gets ** that cannot be seen here" % (node.lineno, name))
            elif keyword.arg not in known:
                hint = HINTS.get(keyword.arg, "renamed, moved or removed")
                refused.append("line %d: %s takes no %s (%s)" % (node.lineno, name, keyword.arg, hint))
    unseen += handed_on(tree, names)
    if refused and re.search(r"__version__|\bsignature\(|\bversion\(|\bTypeError\b", source):
        return unknown("the script looks at releases, so these lines may not run:", *refused, *judged)
    if refused:
        return exposed(
            *refused,
            *judged,
            advice="Fix 1 of the entry: rename or move them, do not delete them; for a method of yours Fix 4",
        )
    if unseen or not judged:
        return unknown(*(unseen or ["no call of a class imported from transformers or trl was found"]), *judged)
    return clear(*judged, "all their keywords are taken; other files of the program were not read")


def handed_on(tree: ast.Module, names: Mapping[str, Tuple[str, str]]) -> Iterator[str]:
    """Uses of the classes that are no call, base or annotation, and imports under names that are not followed."""
    followed: Set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            followed.add(node.func)
        elif isinstance(node, ast.ClassDef):
            followed.update(node.bases)
        for field in ("annotation", "returns"):
            if isinstance(getattr(node, field, None), ast.AST):
                followed.update(ast.walk(getattr(node, field)))
    for node in ast.walk(tree):
        if node not in followed and dotted(node) in names:
            yield "line %d: a class is handed on, and may be called elsewhere" % getattr(node, "lineno", 0)
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names if alias.name.partition(".")[0] in FILES]
            yield from ("line %d: %s is not followed" % (node.lineno, name) for name in modules if "." in name)
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            yield "line %d: what * brings is not followed" % node.lineno


def dotted(node: ast.AST) -> str:
    """`name` or `module.name`, empty for anything else."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return "%s.%s" % (node.value.id, node.attr)
    return node.id if isinstance(node, ast.Name) else ""


def annotated(node: ast.ClassDef) -> Set[str]:
    """The fields of a dataclass."""
    items = [item.target for item in node.body if isinstance(item, ast.AnnAssign)]
    return {target.id for target in items if isinstance(target, ast.Name)}


def takes_less(own: ast.FunctionDef, theirs: ast.FunctionDef) -> bool:
    """Whether a method that a script overrides lacks a parameter of the installed Trainer, which passes them all."""
    if own.args.kwarg if own.name == "compute_loss" else own.args.vararg:
        return False
    return len(own.args.args) + len(own.args.kwonlyargs) < len(theirs.args.args)


def method(target: Tuple[str, str], name: str) -> Optional[ast.FunctionDef]:
    found = definition(*target)
    body = found.body if found else []
    return next((item for item in body if isinstance(item, ast.FunctionDef) and item.name == name), None)


def imported(tree: ast.Module) -> Dict[str, Tuple[str, str]]:
    """What a script calls the trainers, arguments and configs of transformers and trl: to package and class."""
    relevant = re.compile(r"(Trainer|TrainingArguments|Config)$")
    names: Dict[str, Tuple[str, str]] = {}
    plain = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    modules = {alias.asname or alias.name: alias.name for alias in plain if alias.name in FILES}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FILES:
            package = (node.module or "").split(".")[0]
            found = {alias.asname or alias.name: (package, alias.name) for alias in node.names}
            names.update({name: target for name, target in found.items() if has_class(*target, relevant)})
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            package = modules.get(node.value.id, "")
            if package and has_class(package, node.attr, relevant):
                names[ast.unparse(node)] = (package, node.attr)
    return names


def has_class(package: str, name: str, relevant: Any) -> bool:
    return bool(relevant.search(name)) and (package == "trl" or not name.endswith("Config"))


def definition(package: str, name: str) -> Optional[ast.ClassDef]:
    """The class in the source of the installed package, or of transformers, on which trl builds."""
    for place in dict.fromkeys((package, "transformers")):
        spec = find_spec(place)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for file in (path for pattern in FILES[place] for path in sorted(Path(folder).glob(pattern))):
                text = file.read_text(encoding="utf-8")
                if re.search(r"^class %s\b" % re.escape(name), text, re.MULTILINE):
                    nodes = ast.parse(text).body
                    return next((node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name), None)
    return None


def arguments(package: str, name: str) -> Optional[Set[str]]:
    """The keywords that a class takes, those of its bases and deprecated ones too; None where that cannot be said."""
    found = definition(package, name)
    if found is None:
        return None
    for item in found.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            if item.args.kwarg:
                return None
            old = [text for part in item.decorator_list for text in re.findall(r"'(\w+)'", ast.unparse(part))]
            return {argument.arg for argument in [*item.args.args, *item.args.kwonlyargs]} | set(old)
    known = annotated(found)
    for base in found.bases:
        inherited = arguments(package, ast.unparse(base).split(".")[-1])
        if inherited is None:
            return None
        known |= inherited
    return known


def arms(
    name: str,
    job: Any,
    fix: str,
    expect: Expect,
    because: Tuple[str, str],
    packages: Dict[str, str],
    stands_for: str = "",
) -> Experiment:
    """Two arms that differ by the keyword `fix`; `because` says what the control and what the treatment does."""
    fidelity = "stand-in" if stands_for else "cpu"
    return Experiment(
        name,
        Arm(partial(job, **{fix: False}), expect, because[0], fidelity, stands_for),
        Arm(partial(job, **{fix: True}), completed(), because[1], fidelity, stands_for),
        world_size=1,
        needs=Needs(packages=packages),
        deadline_s=90.0,
        expected_s=(6.0, 6.0) if packages else (0.2, 0.2),
    )


def refuses(argument: str, class_name: str = "") -> Expect:
    owner = class_name and r"(%s\.)?" % class_name  # Python 3.9 names no class
    return raised(r"%s__init__\(\) got an unexpected keyword argument '%s'" % (owner, argument))


HF: Dict[str, str] = {"torch": ">=2.1", "transformers": ">=4.51", "accelerate": ""}
LOSS: Dict[str, str] = {"torch": ">=2.1", "transformers": ">=4.57", "accelerate": ""}
TRL: Dict[str, str] = {"torch": ">=2.1", "trl": ">=0.20", "datasets": "", "tokenizers": ""}
REFUSED = refuses("evaluation_strategy", "TrainingArguments")
REFUSED_BY_PARSER = raised(r"Some keys are not used by the HfArgumentParser: \['evaluation_strategy'\]")
CUT = symptom(r"no error, and samples are cut at 1024 tokens; 2048 were asked for")
LACKS_COUNT = raised(r"compute_loss\(\) got an unexpected keyword argument 'num_items_in_batch'")
LACKS_ARGUMENT = raised(r"training_step\(\) takes 3 positional arguments but 4 were given")
GROWN = symptom(r"the gradient is 4\.0 with 4 micro-batches, and 1\.0 with one")
DATACLASS = "transformers: a dataclass of two fields with the same name refuses the same argument"
# What each control does, and what its treatment does instead.
OLD_NAME = ("evaluation_strategy, which transformers 4.51 removed", "eval_strategy")
ASKS = (OLD_NAME[0], "the script asks the class which of the two names it has")
RECIPE = ("a recipe with the old name", "a recipe with the new name")
TOKENIZER = ("tokenizer, which SFTTrainer of trl 0.16 and newer does not take", "processing_class")
MOVED = ("dataset_text_field goes to SFTTrainer, which does not take it since trl 0.13", "it goes to SFTConfig")
FILTERED = ("the script leaves out what the class does not know", "max_length is known, and stays")
OWN_LOSS = ("a compute_loss of one's own, in the form that it had before 4.46", "it takes what the Trainer gives it")
OWN_STEP = (
    "a training_step of one's own, in the form that it had before 4.46",
    "it hands on what it is given",
)
MEAN = (
    "compute_loss returns a mean and the forward takes **kwargs: nothing divides by the accumulation",
    "model_accepts_loss_kwargs is False: the Trainer divides",
)
NAMED, FIELD = partial(fine_tune, argument="tokenizer"), partial(fine_tune, argument="dataset_text_field")

probe = Probe(
    check=check,
    params={"script": Param("path", "a training script, which is read and not run")},
    experiments=(
        arms("transformers", make_arguments, "renamed", REFUSED, OLD_NAME, HF),
        arms("call", call, "renamed", refuses("evaluation_strategy", r"\S*TrainingArguments"), OLD_NAME, {}, DATACLASS),
    ),
    variants=(
        arms("either-release", make_arguments, "asks", REFUSED, ASKS, HF),
        arms("recipe", parse, "renamed", REFUSED_BY_PARSER, RECIPE, HF),
        arms("tokenizer", NAMED, "adapted", refuses("tokenizer", "SFTTrainer"), TOKENIZER, TRL),
        arms("moved", FIELD, "adapted", refuses("dataset_text_field", "SFTTrainer"), MOVED, TRL),
        arms("filtered", set_length, "renamed", CUT, FILTERED, TRL),
        arms("compute-loss", train, "fits", LACKS_COUNT, OWN_LOSS, LOSS),
        arms("training-step", partial(train, own="step"), "fits", LACKS_ARGUMENT, OWN_STEP, LOSS),
        arms("accumulated", partial(train, accumulation=4), "says_mean", GROWN, MEAN, LOSS),
    ),
)
