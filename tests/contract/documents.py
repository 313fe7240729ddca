"""What programs rely on: the JSON documents of the CLI, /openapi.json and the tools of the MCP server.

Only the shape is kept of documents that follow from the entries, the machine or the moment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from tests.support.console import GENEROUS_S
from tests.support.in_process import run_kb_here
from tests.support.warm_start import MCP, PIPE, start_warm

LOG = """\
[rank1]:[E818 17:11:30.1 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=8, OpType=_ALLGATHER_BASE, NumelIn=30154200, NumelOut=60308400, Timeout(ms)=180000) ran for 180044 ms
"""
NEWS = '{"jsonrpc": "2.0", "method": "notifications/initialized"}'
HELLO = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
EXACT = {  # errors, and answers about nothing
    "search-nothing": ["search", "zzzzqqqq"],
    "search-empty": ["search", " "],
    "search-unknown-status": ["search", "nan", "--status", "certain"],
    "show-unknown": ["show", "adress-in-use"],
    "diagnose-unknown": ["diagnose", "odd.log"],
    "diagnose-healthy": ["diagnose", "healthy.log"],
    "diagnose-absent": ["diagnose", "absent.log"],
    "verify-unknown": ["verify", "no-such-entry"],
    "verify-nothing": ["verify"],
    "capture-unknown": ["capture", "--pid", "4194304"],
    "capture-nowhere": ["capture", "--nodes", "n0,n1"],
    "usage": ["search", "nan", "--limit", "0"],
}
SHAPE = {  # what follows from the entries, this machine or this moment
    "search": ["search", "ALLGATHER timeout save"],
    "search-chinese": ["search", "保存检查点时卡住"],
    "search-why": ["search", "loss is nan", "--why", "--limit", "1"],
    "search-filter": ["search", "loss is nan", "--status", "confirmed", "--framework", "deepspeed"],
    "list": ["list"],
    "show": ["show", "address-in-use"],
    "show-section": ["show", "address-in-use", "--section", "fix"],
    "diagnose": ["diagnose", "job.log"],
    "graph": ["graph", "oom-masked-as-nccl-timeout"],
    "lint": ["lint", "--root", "team"],
    "check": ["check"],
    "doctor": ["doctor"],
    "history-empty": ["history"],
    "index": ["index"],
    "verify": ["verify", "stale-cache-lock"],
    "verify-all": ["verify", "stale-cache-lock", "batch-size-invariant"],
    "verify-plan": ["verify", "stale-cache-lock", "--plan"],
    "key": ["key", "new", "chatbot", "--scope", "read"],
    "key-list": ["key", "list"],
    "new": ["new", "shard-odd", "--root", "team"],
    "test": ["test", "--root", "team"],
}


def documents(folder: Path) -> Iterator[tuple[str, Any]]:
    """Name and document, one after the other, made in this folder."""
    _write(folder)
    for name, argv in EXACT.items():
        yield name, _run(folder, argv)
    for name, argv in SHAPE.items():
        made = _run(folder, argv)
        assert "error" not in made["document"], f"{name}: {made}"  # a busy machine must not be recorded as a shape
        yield name, shape(made)
    yield "openapi", resolve_name("kb.api.app:create_app")().openapi()
    yield "mcp-tools", _tools(folder)


def _write(folder: Path) -> None:
    (folder / "job.log").write_text(LOG)
    (folder / "odd.log").write_text("step 1\nRuntimeError: the flux of the capacitor is 1.21\n")
    (folder / "healthy.log").write_text("step 1 loss 2.3\nstep 2 loss 2.2\n")
    (folder / "team" / "entries").mkdir(parents=True)
    (folder / "team" / "probes").mkdir()
    (folder / "team" / "entries" / "broken-entry.md").write_text("---\nid: broken-entry\n---\n\n## Symptom\n")


def _run(folder: Path, argv: list[str]) -> Any:
    ended = run_kb_here(*argv, "--json", cwd=folder)
    return {"code": ended.code, "document": json.loads(ended.out.replace(str(folder), "FOLDER"))}


def shape(value: Any) -> Any:
    """Members and types: a list has the shape of its first item, a member that is null any, a machine its members."""
    if isinstance(value, dict):
        return {
            name: sorted(part) if name == "environment" and part else shape(part)
            for name, part in sorted(value.items())
        }
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "..." if value is None else type(value).__name__


def _tools(folder: Path) -> Any:
    asked = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": HELLO},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/list", "params": {}},
    ]
    server = start_warm("mcp", imports=MCP, cwd=folder, stdin=PIPE, stdout=PIPE)
    assert server.stdin
    assert server.stdout
    with server.stdin, server.stdout:
        for item in asked:
            server.stdin.write(json.dumps(item).encode() + b"\n")
        server.stdin.flush()
        answer: Any = {}
        while answer.get("id") != 2:
            answer = json.loads(server.stdout.readline())
    server.wait(GENEROUS_S)
    return answer["result"]["tools"]
