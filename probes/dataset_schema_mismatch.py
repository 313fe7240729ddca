"""A dataset has one type per column, which its first rows decide; later rows or files have another type."""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

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
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

ALIKE = [{"text": "a", "meta": "m"}], [{"text": "b", "meta": "n"}]
NULL_FIRST = [{"text": "a", "meta": None}], [{"text": "b", "meta": "late"}]
NEW_COLUMN = [{"text": "a"}], [{"text": "b", "source": "web"}]
NEW_KEY = [{"text": "a", "meta": {"k": 1}}], [{"text": "b", "meta": {"k": 2, "tool_calls": [{"name": "f"}]}}]
CALLS: Tuple[List[Any], ...] = (
    [{"messages": [{"role": "assistant", "tool_calls": [{"name": "weather", "arguments": {"city": "Oslo"}}]}]}],
    [{"messages": [{"role": "assistant", "tool_calls": [{"name": "search", "arguments": {"query": "kb"}}]}]}],
)
STRUCT_FIRST = [{"text": "a", "meta": {"k": 1}}], [{"text": "b", "meta": "m"}]
DATE_FIRST = [{"text": "a", "meta": "2024-01-31"}], [{"text": "b", "meta": "unknown"}]
IDS: Tuple[List[Any], ...] = ([{"meta": "x91"}, {"meta": 7}, {"meta": "007"}],)
MIXED = ([{"text": "a", "meta": 1}, {"text": "b", "meta": "m"}],)


@contextmanager
def cause_raised() -> Iterator[None]:
    """Raises the cause of an error instead of the error that datasets wraps around every cause."""
    try:
        yield
    except Exception as error:
        raise error.__cause__ or error  # noqa: B904


def write(ctx: Context, files: Iterable[List[Dict[str, Any]]], end: str = "") -> List[str]:
    paths = []
    for number, rows in enumerate(files):
        paths.append(ctx.path("train-%d.jsonl" % number))
        Path(paths[-1]).write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    return paths


@cause_raised()
def load(ctx: Context, *, files: Any, declared: bool) -> None:
    """Loads the files with the types that datasets infers from the first, or (`declared`) with those of all rows."""
    import pyarrow as pa  # type: ignore[import-not-found]
    from datasets import Dataset, load_dataset  # type: ignore[import-not-found]

    paths = write(ctx, files, end="\n" if declared else "")  # 4.7.0 to 4.8.3 fail over a blank line otherwise
    fixed = ctx.path("fixed.parquet")
    ctx.reached()
    if declared:
        rows = [json.loads(line) for path in paths for line in open(path) if line.strip()]
        types = pa.schema(list(pa.array(rows).type))
        assert "struct<" not in str(types), "objects: fix 1 or 2"
        Dataset(pa.Table.from_pylist(rows, schema=types)).to_parquet(fixed)
        table = load_dataset("parquet", data_files=fixed, split="train")
    else:
        table = load_dataset("json", data_files=paths, split="train")
    originals = [row for rows in files for row in rows]
    assert len(table) == len(originals)
    for number, original in enumerate(originals):
        for name, value in original.items():
            assert table[number][name] == value, (table[number], original)


@cause_raised()
def load_text(ctx: Context, *, files: Any, rewritten: bool, **options: Any) -> None:
    """Loads a column of mixed types as it is, or (`rewritten`) stored as JSON strings."""
    from datasets import load_dataset

    paths = write(ctx, files, end="\n" if rewritten else "")
    ctx.reached()
    if rewritten:
        folder = ctx.path("fixed")
        os.makedirs(folder)
        for number, path in enumerate(paths):
            with open(path) as file, open("%s/%05d.jsonl" % (folder, number), "w") as fixed:
                for line in filter(str.strip, file):
                    row = json.loads(line)
                    row["meta"] = json.dumps(row.get("meta"), ensure_ascii=False)
                    fixed.write(json.dumps(row) + "\n")
        paths = sorted(str(file) for file in Path(folder).iterdir())
    table = load_dataset("json", data_files=paths, split="train", **options)
    assert [json.loads(row["meta"]) for row in table] == [row["meta"] for rows in files for row in rows]


@cause_raised()
def load_calls(ctx: Context, *, free: bool) -> None:
    """Loads calls of two tools with the types of all rows, or (`free`) declared as Json, which allows any shape."""
    import pyarrow as pa
    from datasets import Features, Json, List, load_dataset

    paths = write(ctx, CALLS)
    ctx.reached()
    if free:
        features = Features({"messages": List(Json())})
    else:
        rows = [json.loads(line) for path in paths for line in open(path) if line.strip()]
        features = Features.from_arrow_schema(pa.schema(list(pa.array(rows).type)))
    table = load_dataset("json", data_files=paths, split="train", features=features)
    compare_calls(table)


@cause_raised()
def load_blank(ctx: Context, *, blank: bool) -> None:
    """Loads the same calls from one file. datasets makes their column Json unless the file has a blank line."""
    from datasets import load_dataset

    paths = write(ctx, [[call for (call,) in CALLS]], end="\n" if blank else "")
    ctx.reached()
    compare_calls(load_dataset("json", data_files=paths, split="train"))


@cause_raised()
def load_dates(ctx: Context, *, free: bool) -> None:
    """Loads a column that holds only dates, declared as strings or (`free`) as Json."""
    from datasets import Features, Json, Value, load_dataset

    paths = write(ctx, DATE_FIRST[:1])
    ctx.reached()
    features = Features({"text": Value("string"), "meta": Json() if free else Value("string")})
    table = load_dataset("json", data_files=paths, split="train", features=features)
    if table[0]["meta"] != "2024-01-31":
        raise Symptom("2024-01-31 loads as %s" % table[0]["meta"])


@cause_raised()
def load_ids(ctx: Context, *, rewritten: bool) -> None:
    """Loads ids, some numbers and some strings, declared as Json or (`rewritten`) stored as JSON strings."""
    from datasets import Features, Json, load_dataset

    if rewritten:
        load_text(ctx, files=IDS, rewritten=True)
        return
    paths = write(ctx, IDS)
    ctx.reached()
    table = load_dataset("json", data_files=paths, split="train", features=Features({"meta": Json()}))
    for before, loaded in zip(IDS[0], table):
        if before["meta"] != loaded["meta"]:
            raise Symptom("%r loads as %r" % (before["meta"], loaded["meta"]))


def compare_calls(table: Any) -> None:
    """Raises `Symptom` if a call does not load as it was written."""
    assert len(table) == len(CALLS)
    for loaded, (original,) in zip(table, CALLS):
        call, before = (row["messages"][0]["tool_calls"][0] for row in (loaded, original))
        assert call["name"] == before["name"]
        if call["arguments"] != before["arguments"]:
            raise Symptom(
                "%s was called with %s, and loads as %s" % (call["name"], before["arguments"], call["arguments"])
            )


@cause_raised()
def load_late(ctx: Context, *, first: bool) -> None:
    """Loads one file with mixed types in a column. The string is in the first chunk of 16 KiB, or only in the last."""
    from datasets import load_dataset

    rows: List[Dict[str, Any]] = [{"text": "a" * 100, "meta": 1} for _ in range(600)]
    odd = {"text": "b", "meta": "m"}
    paths = write(ctx, [[rows[0], odd, *rows[1:]] if first else [*rows, odd]])
    ctx.reached()
    table = load_dataset("json", data_files=paths, split="train", chunksize=16 << 10)
    assert table[1 if first else -1]["meta"] == "m"


def load_with_features(ctx: Context, *, files: Any, rewritten: bool) -> None:
    """Passes features=, which people try if one file has mixed types in a column."""
    from datasets import Features, Value

    load_text(
        ctx, files=files, rewritten=rewritten, features=Features({"text": Value("string"), "meta": Value("string")})
    )


@cause_raised()
def read_chunks(ctx: Context, *, chunksize: int) -> None:
    """Loads one file with nulls in a column and one string at the end. The default chunk size is 10 MB."""
    from datasets import load_dataset

    rows: List[Dict[str, Any]] = [{"text": "a" * 100, "meta": None} for _ in range(600)]
    paths = write(ctx, [[*rows, {"text": "b", "meta": "late"}]])
    ctx.reached()
    table = load_dataset("json", data_files=paths, split="train", chunksize=chunksize)
    assert table[-1]["meta"] == "late"


@cause_raised()
def write_objects(ctx: Context, *, as_text: bool) -> None:
    """Writes rows to a Parquet file; the objects in one column are all empty."""
    from datasets import Dataset

    rows = [{"text": "a", "meta": {}}, {"text": "b", "meta": {}}]
    table = Dataset.from_list([{**row, "meta": json.dumps(row["meta"])} if as_text else row for row in rows])
    ctx.reached()
    table.to_parquet(ctx.path("fixed.parquet"))


@cause_raised()
def read_newer(ctx: Context, *, plain: bool) -> None:
    """Reads a Parquet file that a newer release of datasets wrote, with a type that the installed one lacks."""
    import pyarrow as pa
    import pyarrow.parquet as pq  # type: ignore[import-not-found]
    from datasets import load_dataset

    path, fixed = ctx.path("newer.parquet"), ctx.path("fixed.parquet")
    types = {"info": {"features": {"input_ids": {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "Newer"}}}}
    rows = pa.table({"input_ids": [[1, 2], [3]]})
    pq.write_table(rows.replace_schema_metadata({"huggingface": json.dumps(types)}), path)
    ctx.reached()
    if plain:
        pq.write_table(pq.read_table(path).replace_schema_metadata(None), fixed)
    table = load_dataset("parquet", data_files=fixed if plain else path, split="train")
    assert table["input_ids"][:] == [[1, 2], [3]]


def join(ctx: Context, *, casts: bool) -> None:
    """Joins two datasets with the same column names that were tokenised by different code."""
    from datasets import Dataset, Features, Sequence, Value, concatenate_datasets

    first = Dataset.from_list([{"input_ids": [1, 2]}])  # int32, because of the name
    second = Dataset.from_list([{"input_ids": [3]}], features=Features({"input_ids": Sequence(Value("int64"))}))
    ctx.reached()
    if casts:
        second = second.cast(first.features)
    assert concatenate_datasets([first, second])["input_ids"][:] == [[1, 2], [3]]


def join_classes(ctx: Context, *, by_name: bool) -> None:
    """Joins two datasets with the same classes, which each numbers in a different order."""
    from datasets import ClassLabel, Dataset, Features, concatenate_datasets

    first, second = (
        Dataset.from_dict({"label": [0]}, features=Features({"label": ClassLabel(names=names)}))
        for names in (["neg", "pos"], ["pos", "neg"])
    )
    ctx.reached()
    if by_name:
        numbers = {name: number for number, name in enumerate(first.features["label"].names)}
        second = second.align_labels_with_mapping(numbers, "label")
    second = second.cast(first.features)
    table = concatenate_datasets([first, second])
    names = [table.features["label"].int2str(number) for number in table["label"]]
    if names != ["neg", "pos"]:
        raise Symptom("a sample of class pos has class %s after the cast" % names[1])


def add_column(ctx: Context, *, declared: bool) -> None:
    """Adds a column with `map`, which writes 1000 rows at a time and takes the types from the first of them."""
    from datasets import Dataset, Value

    rows = Dataset.from_list([{"n": number} for number in range(1200)])

    def annotate(row: Any) -> Any:
        return {"label": None if row["n"] < 1100 else "late"}

    ctx.reached()
    if declared:
        features = rows.features.copy()
        features["label"] = Value("string")
        labelled = rows.map(annotate, features=features)
    else:
        labelled = rows.map(annotate)
    assert labelled[-1]["label"] == "late"


def compare_files(ctx: Context, *, files: Any) -> None:
    """Applies the rule without datasets, by the survey that the check makes."""
    paths = [Path(path) for path in write(ctx, files)]
    ctx.reached()
    found = disagreements({path: survey(path, time.monotonic() + 10)[0] for path in paths})
    if found:
        raise Symptom("Couldn't cast array of type string to null: %s" % found[0])


LONGEST = 4 << 20  # characters of a line; a JSON array may be one line of gigabytes
Kinds = Dict[str, Dict[str, int]]  # column -> kind of value -> the first line that has it
KINDS = {
    str: "string",
    bool: "bool",
    int: "number",
    float: "fraction",
    list: "list",
    dict: "object",
    type(None): "null",
}
DATE = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d[\d:.+Z-]{0,20})?")  # strings that pyarrow parses as times


def survey(path: Path, until: float) -> Tuple[Kinds, str]:
    """Returns the kinds of value in each column of a JSON Lines file, and why reading ended early, if it did."""
    kinds: Kinds = {}
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            for line in iter(partial(file.readline, LONGEST), ""):
                if time.monotonic() > until:
                    return kinds, "kb read only the first %d lines of %s in the time it has" % (number, path.name)
                number += 1
                if len(line) == LONGEST:
                    return kinds, "line %d of %s is longer than kb reads; the file may not be JSON Lines" % (
                        number,
                        path.name,
                    )
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    return kinds, "line %d of %s is not a JSON object" % (number, path.name)
                for name, value in row.items():
                    kind = "date" if isinstance(value, str) and DATE.fullmatch(value) else KINDS[type(value)]
                    kinds.setdefault(name, {}).setdefault(kind, number)
    except (OSError, ValueError, RecursionError) as error:  # json and utf-8 raise ValueError
        return kinds, "%s cannot be read as JSON Lines after line %d: %s" % (path.name, number, error)
    return kinds, ""


def files_in(path: Path, until: float) -> List[Path]:
    found: List[Path] = []
    for file in path.glob("**/*.json*"):
        found.append(file)
        if len(found) == 200 or time.monotonic() > until:
            break
    return sorted(found)


WIDER = {"number": "fraction", "date": "string"}


def values_in(seen: Mapping[str, int]) -> List[str]:
    """Returns the kinds that need a type each. Nulls need none, and WIDER says which types cover others."""
    return [kind for kind in seen if kind != "null" and WIDER.get(kind) not in seen]


def disagreements(files: Mapping[Path, Kinds]) -> List[str]:
    """Describes columns and kinds that the first file lacks, and columns with more than one kind in one file."""
    found: List[str] = []
    first: Optional[Kinds] = None
    for path, kinds in files.items():
        for name, seen in kinds.items():
            values = values_in(seen)
            if len(values) > 1:
                places = ", ".join("%s in line %d" % (kind, seen[kind]) for kind in values)
                found.append("column %s of %s has %s, which fails with datasets before 4.7" % (name, path.name, places))
            if first is None:
                continue
            if name not in first:
                found.append("column %s is in %s but not in the first file" % (name, path.name))
                continue
            before = values_in(first[name])
            if set(values) - set(before) - {kind for kind, wider in WIDER.items() if wider in before}:
                found.append(
                    "column %s has %s in the first file, %s in %s"
                    % (name, ", ".join(before) or "null", ", ".join(values), path.name)
                )
        first = first or kinds
    return found


def check(params: Mapping[str, Any]) -> Finding:
    """Does each column of these JSON Lines files have one type, within each file and across all files?"""
    path: Optional[Path] = params["data"]
    if path is None:
        return unknown("no data file was named", advice="--set data=/path/to/train.jsonl, or a folder of such files")
    try:
        until = time.monotonic() + 0.6
        paths = files_in(path, until) if path.is_dir() else [path]
        read = {name: survey(name, until) for name in paths if name.is_file()}
    except (OSError, ValueError) as error:
        return unknown("%s cannot be read: %s" % (path, error))
    found = disagreements({name: kinds for name, (kinds, reason) in read.items() if not reason})
    for name, (kinds, reason) in read.items():
        if reason:  # the file was not read to its end: what it contains counts, what it lacks does not
            found += disagreements({name: kinds})
    unread = [reason for _, reason in read.values() if reason]
    if found:
        return exposed(
            *found[:8],
            *unread[:2],
            advice="declare the column as Json(), or store it as JSON strings: see `Fix`",
        )
    if not any(kinds for kinds, _ in read.values()):
        return unknown(*(unread[:3] or ["kb found no JSON Lines in %s" % path]))
    return unknown(
        "kb found no disagreement between the columns of %d files" % len(read),
        *unread[:3],
        "kb did not compare the contents of objects and lists",
    )


def pair(
    name: str,
    fails: Callable[[Context], None],
    works: Callable[[Context], None],
    pattern: str,
    because: str,
    fix: str,
    version: str = ">=2.20",
    expect: Optional[Expect] = None,
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(fails, expect or raised(pattern), because, "cpu"),
        treatment=Arm(works, completed(), fix, "cpu"),
        world_size=1,
        needs=Needs(packages=MappingProxyType({"datasets": version})),
        deadline_s=60,
        expected_s=(2.0, 2.0),
    )


NULL = "Couldn't cast array of type string to null"
NAMES = "because column names don't match|All the data files must have the same columns"
CAST = r"Couldn't cast array of type\n"
CHANGED = r"JSON parse error: Column\(/meta\) changed from number to string in row 1"
ALL_ROWS = "the types are inferred from all rows instead of the first file"
TEXT = "the column is stored as JSON strings, which have one type"
RULE = "type inference in pyarrow and the writer of datasets, for top-level columns"

probe = Probe(
    check=check,
    params={"data": Param("path", "a JSON Lines file, or a folder of them")},
    experiments=(
        pair(
            "null-first",
            partial(load, files=NULL_FIRST, declared=False),
            partial(load, files=NULL_FIRST, declared=True),
            NULL,
            "a column holds only nulls in the first file and strings in the second",
            ALL_ROWS,
        ),
        Experiment(
            name="model",
            control=Arm(
                partial(compare_files, files=NULL_FIRST),
                symptom(r"meta has null in the first file, string in train-1\.jsonl"),
                "a column holds only nulls in the first file and strings in the second",
                "model",
                RULE,
            ),
            treatment=Arm(
                partial(compare_files, files=ALIKE),
                completed(),
                "the column holds strings in both files",
                "model",
                RULE,
            ),
            world_size=1,
            needs=Needs(packages={}, memory_mib=128),
            expected_s=(0.1, 0.1),
        ),
    ),
    variants=(
        pair(
            "new-column",
            partial(load, files=NEW_COLUMN, declared=False),
            partial(load, files=NEW_COLUMN, declared=True),
            NAMES,
            "the second file has an additional column",
            ALL_ROWS,
        ),
        pair(
            "new-key",
            partial(load_text, files=NEW_KEY, rewritten=False),
            partial(load_text, files=NEW_KEY, rewritten=True),
            CAST,
            "the objects in the second file have an additional key",
            TEXT,
            ">=3.0.1",
        ),
        pair(
            "struct-first",
            partial(load_text, files=STRUCT_FIRST, rewritten=False),
            partial(load_text, files=STRUCT_FIRST, rewritten=True),
            CAST,
            "a column holds objects in the first file and strings in the second",
            TEXT,
        ),
        pair(
            "date-first",
            partial(load_text, files=DATE_FIRST, rewritten=False),
            partial(load_text, files=DATE_FIRST, rewritten=True),
            r"Failed to parse string: 'unknown' as a scalar of type timestamp",
            "a column holds only dates in the first file and another string in the second",
            TEXT,
        ),
        pair(
            "empty-object",
            partial(write_objects, as_text=False),
            partial(write_objects, as_text=True),
            "Cannot write struct type 'meta' with no child field",
            "the column holds an empty object in every row, which Parquet cannot store",
            TEXT,
        ),
        pair(
            "newer-types",
            partial(read_newer, plain=False),
            partial(read_newer, plain=True),
            r"Feature type 'Newer' not found\. Available feature types",
            "the file names a type that this release of datasets does not have",
            "the file is rewritten without the types that datasets recorded in it",
        ),
        pair(
            "mixed",
            partial(load_text, files=MIXED, rewritten=False),
            partial(load_text, files=MIXED, rewritten=True),
            CHANGED,
            "a column holds numbers and strings in one file",
            TEXT,
            ">=2.20,<4.7",
        ),
        pair(
            "mixed-features",
            partial(load_with_features, files=MIXED, rewritten=False),
            partial(load_with_features, files=MIXED, rewritten=True),
            CHANGED,
            "a column holds numbers and strings in one file, and features= declares it as string, which does not help",
            TEXT,
            ">=2.20,<4.7",
        ),
        pair(
            "chunk",
            partial(read_chunks, chunksize=16 << 10),
            partial(read_chunks, chunksize=1 << 20),
            NULL,
            "a column holds only nulls in the first chunk of the file and a string in a later one",
            "the first chunk is larger and includes the string",
        ),
        pair(
            "tool-arguments",
            partial(load_calls, free=False),
            partial(load_calls, free=True),
            "",
            "features= has the types of all rows, so every call gets the arguments of all tools, filled with nulls",
            "features= declares the messages as Json, which keeps objects of any shape",
            ">=4.7",
            symptom(r"weather was called with \{'city': 'Oslo'\}, and loads as \{'city': 'Oslo', 'query': None\}"),
        ),
        pair(
            "blank-line",
            partial(load_blank, blank=True),
            partial(load_blank, blank=False),
            "",
            "a file of objects with different keys ends with a blank line, so datasets does not make the column Json",
            "the file has no blank line, so datasets makes the column Json",
            ">=4.8.4",
            symptom(r"weather was called with \{'city': 'Oslo'\}, and loads as \{'city': 'Oslo', 'query': None\}"),
        ),
        pair(
            "dates",
            partial(load_dates, free=False),
            partial(load_dates, free=True),
            "",
            "features= declares a column of dates as string, but the JSON parser has already turned them into times",
            "features= declares the column as Json, which keeps the strings",
            ">=4.7",
            symptom(r"2024-01-31 loads as 2024-01-31 00:00:00"),
        ),
        pair(
            "json-ids",
            partial(load_ids, rewritten=False),
            partial(load_ids, rewritten=True),
            "",
            "features= declares the ids as Json, which reads the string 007 as the number 7",
            TEXT,
            ">=4.7",
            symptom("'007' loads as 7"),
        ),
        pair(
            "late-mixed",
            partial(load_late, first=False),
            partial(load_late, first=True),
            r"Failed to parse string: .* as a scalar of type int64|" + CHANGED[:-2],
            "a column holds numbers in the first chunk and a string in a later one",
            "the first chunk holds both types, so datasets makes the column Json",
            ">=4.7",
        ),
        pair(
            "concatenate",
            partial(join, casts=False),
            partial(join, casts=True),
            r"The features can't be aligned because the key input_ids",
            "input_ids are int32 in one dataset and int64 in the other",
            "the second dataset is cast to the features of the first",
        ),
        pair(
            "class-labels",
            partial(join_classes, by_name=False),
            partial(join_classes, by_name=True),
            "",
            "the second dataset numbers its classes in a different order, and the cast keeps the numbers",
            "the second dataset is renumbered by class name before the cast",
            expect=symptom("a sample of class pos has class neg after the cast"),
        ),
        pair(
            "map",
            partial(add_column, declared=False),
            partial(add_column, declared=True),
            r"Couldn't (cast array of type string to null|write column 'label': its type in this file is null)",
            "map returns None for the first 1100 rows, so the column gets the type null",
            "features= declares the column as string",
        ),
    ),
)
