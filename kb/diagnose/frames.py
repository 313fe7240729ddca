"""Frames of Python stacks: the collective or other activity that a stack is in, and the user's code that called it.

Stacks come from dumps of a live process and from tracebacks in logs. Here, the innermost frame is first.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import NamedTuple

C10D = re.compile(r"(^|/)torch/distributed/(distributed_c10d|c10d_logger|_functional_collectives)\.py$")
NO_COLLECTIVE = ("wrapper", "init_process_group", "destroy_process_group", "new_group", "_store_based_barrier")
LIBRARY = re.compile(
    r"(^|/)(site-packages|dist-packages|lib/python3\.\d+)/|^<|(^|/)(torch|transformers|accelerate|deepspeed|datasets|trl)/"
    r"|(^|/)(lightning|pytorch_lightning|lightning_fabric|tokenizers|huggingface_hub|filelock|ray|tqdm)/"
    r"|(^|/)kb/(context|worker|guard|forkserver)\.py$"  # in the stacks of a probe's arms
)


class Activity(NamedTuple):
    """What a thread does, judging by a file and function in its stack. It may hide a collective in C++ or on a GPU."""

    name: str
    pattern: re.Pattern[str]  # searched in `file:function`
    may_hide_collective: bool = False


ACTIVITIES = (
    Activity("the debugger", re.compile(r"(^|/)(pdb|bdb)\.py:")),
    Activity("torch.compile", re.compile(r"(^|/)torch/(_inductor|_dynamo)/.*:(?!_?(fn|wrapper|inner|_fn)$)"), True),
    Activity("tokenization", re.compile(r"(^|/)tokenization_\w+\.py:|:\w*tokeniz(e|ing|ation)(_\w*)?$", re.IGNORECASE)),
    Activity("datasets.map", re.compile(r"(^|/)datasets/(arrow_dataset|dataset_dict)\.py:_?map")),
    Activity("the DataLoader", re.compile(r"(^|/)torch/utils/data/")),
    Activity("torch.distributed.checkpoint", re.compile(r"(^|/)torch/distributed/checkpoint/")),
    Activity("torch.save", re.compile(r"(^|/)torch/serialization\.py:_?save$")),
    Activity("torch.load", re.compile(r"(^|/)torch/serialization\.py:_?load$")),
    Activity("a download", re.compile(r"(^|/)huggingface_hub/")),
    Activity("a multiprocessing pool", re.compile(r"(^|/)multiprocess(ing)?/pool\.py:(wait|get|next)$")),
    Activity("a file lock", re.compile(r"(^|/)filelock/|(^|/)torch/utils/file_baton\.py:wait$")),
    Activity("torch.cuda.synchronize", re.compile(r"(^|/)torch/(cuda|accelerator)/.*:synchronize$"), True),
    Activity("backward", re.compile(r"(^|/)torch/autograd/"), True),
    Activity("init_process_group", re.compile(r"/distributed_c10d\.py:init_process_group$")),
    Activity("new_group", re.compile(r"/distributed_c10d\.py:new_group$")),
    Activity("destroy_process_group", re.compile(r"/distributed_c10d\.py:destroy_process_group$")),
)


class Frame(NamedTuple):
    """A frame of a stack; `name` is the function without its class, which only py-spy prints."""

    name: str
    file: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.file.split('/')[-1]}:{self.line} {self.name}"


def function(name: str) -> str:
    """The name of a function without its class, which only py-spy prints."""
    return name.rsplit(".", 1)[-1][:100]


def collective(frames: Sequence[Frame]) -> int | None:
    """The index of the torch.distributed frame that the user called: the outermost of the innermost run of them."""
    inside = [index for index, frame in enumerate(frames) if C10D.search(frame.file)]
    run = [index for index in inside if index - inside[0] == inside.index(index)]
    calls = [index for index in run if frames[index].name not in NO_COLLECTIVE]
    is_set_up = any(frames[index].name in NO_COLLECTIVE[1:] for index in run)
    return calls[-1] if calls and not is_set_up else None


class Place(NamedTuple):
    """Where a thread is: `name` is a collective, an activity, or a line of the user's code.

    `caller` is the innermost frame of the user's code around a collective or activity, empty if `name` is that frame.
    `frames` is the whole stack, innermost first.
    """

    name: str
    caller: str
    is_collective: bool
    may_hide_collective: bool
    frames: tuple[Frame, ...]

    @property
    def is_activity(self) -> bool:
        return not self.is_collective and any(activity.name == self.name for activity in ACTIVITIES)

    @property
    def innermost(self) -> str:
        """The innermost frame of the user's code, even inside an activity; empty without one."""
        return _own_place(self.frames)

    def __str__(self) -> str:
        return f"{self.name} called from {self.caller}" if self.caller else self.name


def place_of(frames: Sequence[Frame]) -> Place | None:
    """The place of a stack, whose innermost frame is first; None without frames."""
    if not frames:
        return None
    call = collective(frames)
    if call is not None:
        return Place(frames[call].name, _own_place(frames[call + 1 :]), True, False, tuple(frames))
    functions = [f"{frame.file}:{frame.name}" for frame in frames]
    for activity in ACTIVITIES:
        level = next((level for level, name in enumerate(functions) if activity.pattern.search(name)), None)
        if level is not None:
            caller = _own_place(frames[level:])
            return Place(activity.name, caller, False, activity.may_hide_collective, tuple(frames))
    return Place(_own_place(frames) or frames[0].place, "", False, False, tuple(frames))


def _own_place(frames: Sequence[Frame]) -> str:
    own = next((frame for frame in frames if not is_library(frame)), None)
    return own.place if own else ""


def is_library(frame: Frame) -> bool:
    """Whether a frame is library code. py-spy prints paths relative to sys.path, for libraries and for user code."""
    module = frame.file.split("/")[0].removesuffix(".py")
    return module in sys.stdlib_module_names or LIBRARY.search(frame.file) is not None
