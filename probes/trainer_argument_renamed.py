"""A script passes an argument that the installed transformers or trl has renamed, moved to a config, or removed."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Set, Tuple

from kb.cpu_arms import without_launcher
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
ATTRIBUTES = {
    "evaluation_strategy",
    "overwrite_output_dir",
    "warmup_ratio",
    "no_cuda",
    "logging_dir",
    "group_by_length",
}
OVERRIDDEN = ("compute_loss", "training_step", "log", "_get_train_sampler")  # newer Trainers pass more arguments
LENGTH = 2048  # tokens


def import_library(name: str) -> Any:
    """Imports a package without a launcher's variables, for which TrainingArguments would start a process group."""
    without_launcher()
    return importlib.import_module(name)


def make_arguments(ctx: Context, *, renamed: bool = False, asks: bool = False) -> None:
    """The real TrainingArguments; with `asks`, the script works before and after the renaming."""
    TrainingArguments: Any = import_library("transformers").TrainingArguments  # noqa: N806
    ctx.reached()
    when = "eval_strategy" if renamed else "evaluation_strategy"
    if asks:
        known = inspect.signature(TrainingArguments).parameters
        when = "eval_strategy" if "eval_strategy" in known else "evaluation_strategy"
    args = TrainingArguments(output_dir=ctx.path("out"), use_cpu=True, eval_steps=5, **{when: "steps"})
    assert args.eval_strategy == "steps"


def parse(ctx: Context, *, renamed: bool) -> None:
    """The parser gets the dict of a YAML or JSON recipe."""
    hf = import_library("transformers")
    ctx.reached()
    recipe = {"output_dir": ctx.path("out"), "use_cpu": True, "eval_steps": 5}
    recipe["eval_strategy" if renamed else "evaluation_strategy"] = "steps"
    assert hf.HfArgumentParser(hf.TrainingArguments).parse_dict(recipe)[0].eval_strategy == "steps"


def fine_tune(ctx: Context, *, adapted: bool, argument: str) -> None:
    """The real SFTTrainer, with a tiny model."""
    hf = import_library("transformers")
    trl = import_library("trl")
    tk = import_library("tokenizers")
    rows = import_library("datasets").Dataset.from_list([{"answer": "a b </s>"}] * 2)
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
    """The real SFTConfig with a length that is not its default; the script drops arguments that the class lacks."""
    SFTConfig: Any = import_library("trl").SFTConfig  # noqa: N806
    options: Dict[str, Any] = {"max_length" if renamed else "max_seq_length": LENGTH}
    known = inspect.signature(SFTConfig).parameters
    options = {name: value for name, value in options.items() if name in known}
    ctx.reached()
    args = SFTConfig(output_dir=ctx.path("out"), use_cpu=True, bf16=False, **options)
    if args.max_length != LENGTH:
        raise Symptom(f"SFTConfig raises no error and cuts samples at {args.max_length} tokens instead of {LENGTH}")


def build_model() -> Any:
    """One weight; its gradient is 1 in each micro-batch."""
    import torch

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: Any, labels: Any = None, **kwargs: Any) -> Any:  # noqa: ARG002
            return {"logits": self.weight * x}

    return Model()


def own_loss(outputs: Any, inputs: Any) -> Any:
    return (outputs["logits"] * inputs["labels"]).mean()


def trainer_classes(Base: Any) -> Dict[str, Any]:  # noqa: N803
    """Trainers with a method of the script, in the form that transformers calls now, or that it called before 4.46."""

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

    return {"loss": Loss, "old loss": OldLoss, "mean": Undivided, "step": StepTrainer, "old step": OldStepTrainer}


def train(
    ctx: Context, *, fits: bool = True, overrides: str = "loss", says_mean: bool = True, accumulation: int = 1
) -> None:
    """The real Trainer with a compute_loss or training_step of the script."""
    import torch

    hf = import_library("transformers")
    plain = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "max_steps": 1, "max_grad_norm": 0.0}
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": accumulation}
    args = hf.TrainingArguments(output_dir=ctx.path("out"), optim="sgd", learning_rate=1.0, **plain, **sizes)
    rows = [{"x": torch.ones(1), "labels": torch.ones(1)}] * accumulation
    model = build_model()
    name = overrides if fits else "old " + overrides
    trainer_class = trainer_classes(hf.Trainer)[name if says_mean else "mean"]
    trainer = trainer_class(model=model, args=args, train_dataset=rows)
    ctx.reached()
    trainer.train()
    step = -model.weight.item()
    if abs(step - 1.0) > 1e-4:
        raise Symptom(f"the gradient is {step:.1f} with {accumulation} micro-batches, and 1.0 with one")


def call_dataclass(ctx: Context, *, renamed: bool) -> None:
    """A dataclass with the renamed field, without transformers."""

    @dataclass
    class TrainingArguments:
        output_dir: str
        eval_strategy: str = "no"

    ctx.reached()
    options = {"eval_strategy" if renamed else "evaluation_strategy": "steps"}
    assert TrainingArguments("out", **options).eval_strategy == "steps"


def check(params: Mapping[str, Any]) -> Finding:
    """Do the installed releases accept the arguments that a script passes? Neither imports them nor runs the script."""
    script = params["script"]
    if script is None:
        return unknown("no script was named", advice="--set script=train.py")
    try:
        if not script.is_file() or script.stat().st_size > LARGEST_SCRIPT:
            return unknown("%s is not a file, or too large to be a script" % script)
        return judge(script, ast.parse(script.read_text(encoding="utf-8")))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return unknown("kb cannot read %s, or the source of a package: %r" % (script, error))


def judge(script: Path, tree: ast.Module) -> Finding:
    names, source = imported(tree), ast.unparse(tree)
    if re.search(r"^\s*(import|from) unsloth\b", source, re.MULTILINE):
        return unknown("%s imports unsloth, which replaces the classes of trl" % script)
    reading = Reading()
    if re.search(r"\b(HfArgumentParser|TrlParser)\b", source):
        reading.unseen.append("a parser fills the arguments from a recipe or command line, which kb cannot see")
    fields = read_classes(tree, names, reading)
    read_calls(tree, names, fields, reading)
    reading.unseen += handed_on(tree, names)
    reading.unseen += attributes_read(tree)
    refused, compared, unseen = reading.refused, reading.compared, reading.unseen
    if refused and re.search(r"__version__|\bsignature\(|\bversion\(|\bTypeError\b", source):
        return unknown("the script looks at releases, so these lines may not run:", *refused, *compared)
    if refused:
        advice = "rename or move the arguments as in Fix 1 of the entry, do not delete them; see Fix 4 for a method"
        return exposed(*refused, *compared, advice=advice)
    if unseen or not compared:
        return unknown(*(unseen or ["kb found no call of a class imported from transformers or trl"]), *compared)
    return clear(*compared, "these classes accept all keywords; kb did not read other files of the program")


@dataclass
class Reading:
    """Findings about a script: refused arguments, the calls that kb compared, and what kb cannot see."""

    refused: List[str] = field(default_factory=list)
    compared: List[str] = field(default_factory=list)
    unseen: List[str] = field(default_factory=list)


def read_classes(tree: ast.Module, names: Dict[str, Tuple[str, str]], reading: Reading) -> Dict[str, Set[str]]:
    """Adds the subclasses of the script to `names`; returns the fields that they add as dataclasses."""
    fields: Dict[str, Set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) in names for base in node.bases):
            bases = [ast.unparse(base) for base in node.bases]
            base = next(names[name] for name in bases if name in names)
            methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
            if {"__init__", "__new__"} & set(methods) or not all(name in names for name in bases):
                reading.unseen.append("line %d: kb cannot see which arguments %s takes" % (node.lineno, node.name))
                names.pop(node.name, None)
            else:
                fields[node.name] = annotated(node).union(*(fields.get(name, set()) for name in bases))
                names[node.name] = base
            if base[1].endswith("Trainer"):
                read_overrides(methods, reading)
    return fields


def read_overrides(methods: Mapping[str, ast.FunctionDef], reading: Reading) -> None:
    """Compares the methods of a trainer of the script with the installed Trainer, which calls them."""
    for name in [name for name in OVERRIDDEN if name in methods]:
        theirs = method(("transformers", "Trainer"), name)
        if theirs is None:
            reading.unseen.append("line %d: kb did not find how %s is called" % (methods[name].lineno, name))
        elif takes_less(methods[name], theirs):
            where = (methods[name].lineno, name, "transformers %s" % version("transformers"))
            reading.refused.append("line %d: %s takes fewer arguments than %s passes" % where)


def read_calls(
    tree: ast.Module, names: Mapping[str, Tuple[str, str]], fields: Mapping[str, Set[str]], reading: Reading
) -> None:
    """Compares the keywords of each call with those that the installed class takes."""
    for node in ast.walk(tree):
        target = names.get(ast.unparse(node.func)) if isinstance(node, ast.Call) else None
        if not isinstance(node, ast.Call) or target is None:
            continue
        package, name = target
        known = arguments(package, name)
        if known is None:
            reading.unseen.append("line %d: kb did not find the arguments of %s in %s" % (node.lineno, name, package))
            continue
        known = known | fields.get(ast.unparse(node.func), set())
        reading.compared.append("line %d: %s of %s" % (node.lineno, name, f"{package} {version(package)}".strip()))
        for keyword in node.keywords:
            if keyword.arg is None:
                reading.unseen.append("line %d: kb cannot see what ** passes to %s" % (node.lineno, name))
            elif keyword.arg not in known:
                hint = HINTS.get(keyword.arg, "renamed, moved or removed")
                reading.refused.append("line %d: %s takes no %s (%s)" % (node.lineno, name, keyword.arg, hint))


def handed_on(tree: ast.Module, names: Mapping[str, Tuple[str, str]]) -> Iterator[str]:
    """Uses of the classes other than calls, bases and annotations, and imports that kb does not follow."""
    followed: Set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            followed.add(node.func)
        elif isinstance(node, ast.ClassDef):
            followed.update(node.bases)
        for part in ("annotation", "returns"):
            if isinstance(getattr(node, part, None), ast.AST):
                followed.update(ast.walk(getattr(node, part)))
    for node in ast.walk(tree):
        if node not in followed and dotted(node) in names:
            yield "line %d: the script passes a class on, so other code may call it" % getattr(node, "lineno", 0)
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names if alias.name.partition(".")[0] in FILES]
            yield from ("line %d: kb does not follow %s" % (node.lineno, name) for name in modules if "." in name)
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            yield "line %d: kb does not follow import *" % node.lineno


def attributes_read(tree: ast.Module) -> Iterator[str]:
    """Reads of an attribute that the installed TrainingArguments may lack, from whatever object."""
    known = arguments("transformers", "TrainingArguments") or set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES - known:
            yield "line %d: the script uses .%s, which TrainingArguments lacks here" % (node.lineno, node.attr)


def dotted(node: ast.AST) -> str:
    """Returns `name` or `module.name`, or an empty string for any other expression."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return "%s.%s" % (node.value.id, node.attr)
    return node.id if isinstance(node, ast.Name) else ""


def annotated(node: ast.ClassDef) -> Set[str]:
    """The fields of a dataclass."""
    items = [item.target for item in node.body if isinstance(item, ast.AnnAssign)]
    return {target.id for target in items if isinstance(target, ast.Name)}


def takes_less(own: ast.FunctionDef, theirs: ast.FunctionDef) -> bool:
    """Whether a method of a script lacks a parameter that the method of the installed Trainer has."""
    if own.args.kwarg if own.name == "compute_loss" else own.args.vararg:
        return False
    return len(own.args.args) + len(own.args.kwonlyargs) < len(theirs.args.args)


def method(target: Tuple[str, str], name: str) -> Optional[ast.FunctionDef]:
    found = definition(*target)
    body = found.body if found else []
    return next((item for item in body if isinstance(item, ast.FunctionDef) and item.name == name), None)


def imported(tree: ast.Module) -> Dict[str, Tuple[str, str]]:
    """The classes of transformers and trl that a script uses: from their name there to the package and class."""
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
    """The class in the source of the installed package, or else of transformers, on which trl builds."""
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
    """The keywords that a class takes, including those of its bases and deprecated ones; None if kb cannot tell."""
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
CUT = symptom(r"SFTConfig raises no error and cuts samples at 1024 tokens instead of 2048")
LACKS_COUNT = raised(r"compute_loss\(\) got an unexpected keyword argument 'num_items_in_batch'")
LACKS_ARGUMENT = raised(r"training_step\(\) takes 3 positional arguments but 4 were given")
GROWN = symptom(r"the gradient is 4\.0 with 4 micro-batches, and 1\.0 with one")
DATACLASS = "transformers; a dataclass of the same name with two fields refuses the same argument"
# `because` of each control arm and of its treatment arm.
OLD_NAME = (
    "the script passes evaluation_strategy, which transformers 4.51 removed",
    "the script passes eval_strategy, the new name",
)
ASKS = (OLD_NAME[0], "the script asks the class which of the two names it has")
RECIPE = (
    "the recipe has the old name evaluation_strategy, which the parser rejects",
    "the recipe has the new name eval_strategy",
)
TOKENIZER = (
    "the script passes tokenizer, which SFTTrainer does not take since trl 0.16",
    "the script passes processing_class, the new name",
)
MOVED = (
    "the script passes dataset_text_field to SFTTrainer, which does not take it since trl 0.13",
    "the script passes dataset_text_field to SFTConfig",
)
FILTERED = (
    "the script drops arguments that SFTConfig lacks, and so loses max_seq_length",
    "SFTConfig has the new name max_length, so the script keeps it",
)
OLD_LOSS = (
    "the compute_loss of the script lacks num_items_in_batch, which the Trainer passes since 4.46",
    "the compute_loss of the script takes **kwargs",
)
OLD_STEP = (
    "the training_step of the script lacks the argument that the Trainer passes since 4.46",
    "the training_step of the script takes all arguments and passes them on",
)
MEAN = (
    "compute_loss returns a mean and forward takes **kwargs, so nothing divides by the accumulation steps",
    "model_accepts_loss_kwargs is False, so the Trainer divides by the accumulation steps",
)
NAMED, FIELD = partial(fine_tune, argument="tokenizer"), partial(fine_tune, argument="dataset_text_field")

probe = Probe(
    check=check,
    params={"script": Param("path", "your training script; the check reads it and does not run it")},
    experiments=(
        arms("transformers", make_arguments, "renamed", REFUSED, OLD_NAME, HF),
        arms(
            "call",
            call_dataclass,
            "renamed",
            refuses("evaluation_strategy", r"\S*TrainingArguments"),
            OLD_NAME,
            {},
            DATACLASS,
        ),
    ),
    variants=(
        arms("either-release", make_arguments, "asks", REFUSED, ASKS, HF),
        arms("recipe", parse, "renamed", REFUSED_BY_PARSER, RECIPE, HF),
        arms("tokenizer", NAMED, "adapted", refuses("tokenizer", "SFTTrainer"), TOKENIZER, TRL),
        arms("moved", FIELD, "adapted", refuses("dataset_text_field", "SFTTrainer"), MOVED, TRL),
        arms("filtered", set_length, "renamed", CUT, FILTERED, TRL),
        arms("compute-loss", train, "fits", LACKS_COUNT, OLD_LOSS, LOSS),
        arms("training-step", partial(train, overrides="step"), "fits", LACKS_ARGUMENT, OLD_STEP, LOSS),
        arms("accumulated", partial(train, accumulation=4), "says_mean", GROWN, MEAN, LOSS),
    ),
)
