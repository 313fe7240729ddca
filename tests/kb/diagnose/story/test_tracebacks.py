"""Tracebacks out of lines in which ranks interleave: where each rank was, in which call, and what it reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kb.diagnose.story.excerpt import Excerpt, Part
from kb.diagnose.story.lines import read_lines
from kb.diagnose.story.tracebacks import Traceback, read_tracebacks

TORCH = "/opt/venv/lib/python3.11/site-packages/torch"
GAVE_UP = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 6000ms for send operation"
LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
OPENING = "Traceback (most recent call last):"


def tracebacks(lines: Sequence[str]) -> list[Traceback]:
    data = "".join(f"{line}\n" for line in lines).encode()
    return read_tracebacks(read_lines([Excerpt("job.log", None, None, (Part(1, data),))]))


def only(lines: Sequence[str]) -> Traceback:
    (traceback,) = tracebacks(lines)
    return traceback


def frame(file: str, line: int, name: str, code: str) -> list[str]:
    return [f'  File "{file}", line {line}, in {name}', f"    {code}"]


def stack(function: str, line: int, call: str, error: str = GAVE_UP) -> list[str]:
    """Of a rank in `call`, which line `line` of `function` of the user's program calls."""
    return [
        OPENING,
        *frame("/work/train.py", 90, "<module>", "main()"),
        *frame("/work/train.py", 80, "main", f"{function}(model)"),
        *frame("/work/train.py", line, function, f"dist.{call}(total)"),
        *frame(f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper", "return func(*args, **kwargs)"),
        *frame(f"{TORCH}/distributed/distributed_c10d.py", 4287, call, "work.wait()"),
        error,
    ]


STACKS = [
    stack("evaluate", 12, "all_gather"),
    stack("evaluate", 12, "all_gather"),
    stack("fit", 30, "all_reduce"),
    stack("save", 44, "barrier", LOST),
]
PLACES = [
    "all_gather called from train.py:12 evaluate",
    "all_gather called from train.py:12 evaluate",
    "all_reduce called from train.py:30 fit",
    "barrier called from train.py:44 save",
]


def interleaved(stacks: Sequence[Sequence[str]], order: Sequence[int]) -> list[tuple[int, str]]:
    """(rank, line) in an order that names a rank for each line; ranks that have no more are passed over."""
    left = [list(lines) for lines in stacks]
    chosen = [(rank, left[rank].pop(0)) for rank in order if left[rank]]
    return [*chosen, *((rank, line) for rank, lines in enumerate(left) for line in lines)]


ORDERS = st.lists(st.integers(0, len(STACKS) - 1), max_size=sum(map(len, STACKS)))


@given(ORDERS, st.sampled_from(["[rank{}]: ", "[default{}]:", "{}: ", "[1,{}]<stderr>:", "[default{0}]:[rank{0}]: "]))
def test_with_prefixes_any_interleaving_gives_the_same_map_of_places(order: list[int], prefix: str) -> None:
    lines = [f"{prefix.format(rank)}{line}" for rank, line in interleaved(STACKS, order)]
    assert {one.rank: one.place for one in tracebacks(lines)} == dict(enumerate(PLACES))


def by_frame(stacks: Sequence[Sequence[str]], order: Sequence[int]) -> list[str]:
    """Interleaved so that no line comes between a frame and its source line, and the exception."""
    left = [[lines[:1], *(lines[at : at + 2] for at in range(1, len(lines) - 3, 2)), lines[-3:]] for lines in stacks]
    chosen = [line for rank in order if left[rank] for line in left[rank].pop(0)]
    return [*chosen, *(line for units in left for unit in units for line in unit)]


def undecorated(lines: Sequence[str]) -> list[str]:
    """Without the wrapper around each collective, whose source line calls `func`."""
    return [line for line in lines if "wrapper" not in line and "return func" not in line]


@given(ORDERS)
def test_without_prefixes_stacks_that_interleave_by_frame_give_the_same_places(order: list[int]) -> None:
    lines = by_frame([undecorated(lines) for lines in STACKS], order)
    assert Counter(one.place for one in tracebacks(lines)) == Counter(PLACES)


def test_without_prefixes_an_exception_ends_a_stack_that_is_complete() -> None:
    first, second = undecorated(STACKS[0]), undecorated(STACKS[2])
    lines = first[:-1] + second[:3] + first[-1:] + second[3:]
    assert Counter(one.place for one in tracebacks(lines)) == Counter([PLACES[0], PLACES[2]])


@given(st.permutations(range(4)))
def test_without_prefixes_stacks_one_after_the_other_give_the_same_places(order: list[int]) -> None:
    lines = [line for rank in order for line in STACKS[rank]]
    assert Counter(one.place for one in tracebacks(lines)) == Counter(PLACES)


@pytest.mark.xfail(strict=True, reason="no source line calls `wrapper`, nor the function that it wraps")
@given(ORDERS)
@settings(phases=[Phase.generate])
def test_without_prefixes_decorated_collectives_that_interleave_give_the_same_places(order: list[int]) -> None:
    lines = by_frame(STACKS, order)
    assert Counter(one.place for one in tracebacks(lines)) == Counter(PLACES)


@pytest.mark.xfail(strict=True, reason="a source line behind the frame of another stack is taken for that stack's")
@given(ORDERS)
@settings(phases=[Phase.generate])
def test_without_prefixes_stacks_that_interleave_by_line_give_the_same_places(order: list[int]) -> None:
    lines = [line for _, line in interleaved([undecorated(lines) for lines in STACKS], order)]
    assert Counter(one.place for one in tracebacks(lines)) == Counter(PLACES)


def test_without_prefixes_equal_stacks_give_equal_places_however_they_interleave() -> None:
    lines = STACKS[0][:9] + STACKS[0][:3] + STACKS[0][9:] + STACKS[0][3:]
    assert [one.place for one in tracebacks(lines)] == PLACES[:1] * 2


def test_the_place_is_the_call_and_the_line_of_the_user() -> None:
    traceback = only(stack("evaluate", 12, "all_gather"))
    assert traceback.place == "all_gather called from train.py:12 evaluate"
    assert traceback.error == GAVE_UP
    assert (traceback.has_waited, traceback.has_lost, traceback.is_launcher) == (True, False, False)


def test_under_a_trainer_the_place_names_its_function_too() -> None:
    trainer = "/opt/venv/lib/python3.11/site-packages/transformers/trainer.py"
    lines = [
        OPENING,
        *frame("/work/train.py", 44, "main", "trainer.train()"),
        *frame(trainer, 290, "_nested_gather", "dist.all_gather(tensors)"),
        *frame(f"{TORCH}/distributed/distributed_c10d.py", 4287, "all_gather", "work.wait()"),
        GAVE_UP,
    ]
    assert only(lines).place == "all_gather in trainer.py:290 _nested_gather called from train.py:44 main"


@pytest.mark.parametrize(
    ("error", "has_waited", "has_lost"),
    [
        (GAVE_UP, True, False),
        (LOST, True, True),
        ("torch.distributed.DistBackendError: NCCL error: remote process exited", True, True),
        ("torch.distributed.DistStoreError: Timed out after 11 seconds waiting for clients", True, False),
        ("BrokenPipeError: [Errno 32] Broken pipe", True, True),
        ("KeyError: 'input_ids'", False, False),
        ("torch.OutOfMemoryError: CUDA out of memory.", False, False),
        ("AssertionError", False, False),
        ("mypackage.errors.BadShardError: shard 3", False, False),
        ("StopIteration", False, False),
        ("SystemExit: 3", False, False),
    ],
)
def test_who_waited_who_lost_a_peer_and_who_failed_by_itself(error: str, has_waited: bool, has_lost: bool) -> None:
    traceback = only(stack("fit", 30, "all_reduce", error))
    assert (traceback.error, traceback.has_waited, traceback.has_lost) == (error, has_waited, has_lost)


def test_of_a_chain_the_first_exception_is_not_chained() -> None:
    second = [OPENING, *frame("/work/train.py", 95, "<module>", "raise"), "RuntimeError: training failed"]
    between = ["", "During handling of the above exception, another exception occurred:", ""]
    first, last = tracebacks([*stack("fit", 30, "all_reduce", "KeyError: 'x'"), *between, *second])
    assert (first.error, first.is_chained) == ("KeyError: 'x'", False)
    assert (last.error, last.is_chained) == ("RuntimeError: training failed", True)


def test_frames_of_record_are_part_of_the_users_own_traceback() -> None:
    record = frame(f"{TORCH}/distributed/elastic/multiprocessing/errors/__init__.py", 362, "wrapper", "return f()")
    user = only([OPENING, *record, *frame("/work/train.py", 30, "main", "batch['x']"), "KeyError: 'x'"])
    assert (user.is_launcher, user.place) == (False, "train.py:30 main")


def test_a_traceback_of_nothing_but_the_launcher_is_the_launchers() -> None:
    lines = [
        OPENING,
        *frame("<frozen runpy>", 198, "_run_module_as_main", "x"),
        *frame(f"{TORCH}/distributed/run.py", 905, "main", "run(args)"),
        *frame(f"{TORCH}/distributed/launcher/api.py", 139, "__call__", "return launch_agent()"),
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    ]
    assert only(lines).is_launcher


def test_a_handler_of_sigterm_is_cut_off_and_the_rank_was_interrupted() -> None:
    handler = "/opt/venv/lib/python3.11/site-packages/lightning/pytorch/trainer/connectors/signal_connector.py"
    lines = [
        OPENING,
        *frame("/work/train.py", 30, "fit", "load(batch)"),
        *frame(handler, 112, "_sigterm_notifier_fn", "self.trainer.strategy.barrier()"),
        *frame(f"{TORCH}/distributed/distributed_c10d.py", 4287, "barrier", "work.wait()"),
        LOST,
    ]
    traceback = only(lines)
    assert (traceback.is_interrupted, traceback.place) == (True, "train.py:30 fit")


def test_boxes_of_rich_and_a_message_that_they_break_into_lines() -> None:
    lines = [
        "╭─────────────────── Traceback (most recent call last) ───────────────────╮",
        "│ /work/train.py:80 in main                                               │",
        "│                                                                         │",
        "│   79 │   model = build()                                                │",
        "│ ❱ 80 │   evaluate(model)                                                │",
        "│                                                                         │",
        "│ /work/train.py:12 in evaluate                                           │",
        "│                                                                         │",
        "│ ❱ 12 │   dist.barrier()                                                 │",
        "╰─────────────────────────────────────────────────────────────────────────╯",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:1",
        "29] Timed out waiting 6000ms for send operation to complete",
        "next line of the log",
    ]
    traceback = only([f"[rank1]: {line}" for line in lines])
    assert [one.place for one in traceback.frames] == ["train.py:80 main", "train.py:12 evaluate"]
    assert "Timed out waiting" in traceback.error
    assert traceback.has_waited


def test_the_marked_frame_of_loguru_is_a_frame() -> None:
    lines = [
        OPENING,
        "",
        '  File "/work/train.py", line 90, in <module>',
        "    main()",
        "    └ <function main at 0x7f1e>",
        '> File "/work/train.py", line 30, in main',
        "    batch['x']",
        "KeyError: 'x'",
    ]
    assert only(lines).place == "train.py:30 main"


@pytest.mark.parametrize("lines", [[OPENING], [OPENING, "ValueError: no frames"], ["ValueError: no traceback"]])
def test_without_frames_there_is_no_traceback(lines: list[str]) -> None:
    assert tracebacks(lines) == []


def test_a_traceback_cites_its_first_and_its_last_line() -> None:
    traceback = only(["step 1", *stack("fit", 30, "all_reduce"), "step 2"])
    assert (traceback.first.number, traceback.last.number) == (2, 13)


@given(st.lists(st.sampled_from([*STACKS[0], *STACKS[3], "│", "╰─", "> File", "step 1", ""]), max_size=40))
def test_any_lines_in_any_order_are_read(lines: list[str]) -> None:
    for traceback in tracebacks(lines):
        assert traceback.frames
        assert traceback.place
