"""What is hidden, what stays, and that neither depends on how a log is fed in."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kb.content.catalog import load_catalog
from kb.content.roots import builtin_root, configured_roots
from kb.patterns import redos_timing
from kb.patterns.redos import backtracking_risk
from kb.redaction import redactor
from kb.redaction.redactor import MARGIN, PLACEHOLDER, Redactor, redact
from kb.redaction.rule import Rule
from kb.redaction.rules import RULES, candidate_rules

LONG = "Zq7abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"

# A line with {} where the secret stands, and the secret. All are made up.
HIDDEN = [
    ("loading with {} from the hub", f"hf_{LONG[:34]}"),
    ("export HUGGING_FACE_HUB_TOKEN={}", "plainvalue"),
    ("env: AWS_ACCESS_KEY_ID={}", "AKIAIOSFODNN7EXAMPLE"),
    ("aws_secret_access_key = {}", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
    ("AWS_SESSION_TOKEN={}", "FwoGZXIvYXdzEJr//////////wEaD"),
    ("WANDB_API_KEY={}", "0123456789abcdef0123456789abcdef01234567"),
    ("$ wandb login {}", "0123456789abcdef0123456789abcdef01234567"),
    ("openai key {}", f"sk-proj-{LONG}"),
    ("x {}", f"sk-ant-api03-{LONG}"),
    ("remote: {}@github.com", f"ghp_{LONG[:36]}"),
    ("{}", f"github_pat_11AB_{LONG}"),
    ("{}", f"glpat-{LONG[:20]}"),
    ("{}", f"nvapi-{LONG}"),
    ("{}", f"AIza{LONG[:35]}"),
    ("slack {}", "xoxb-123456789012-123456789012-abcdefghijklmnopqrstuvwx"),
    ("https://hooks.slack.com/services/{}", "T000/B000/XXXXabcd"),
    ("id_token {}", JWT),
    ("Authorization: Bearer {}", "abc.def-ghi_jkl"),
    ("authorization: Basic {}", "dXNlcjpwYXNz"),
    ('headers={{"Authorization": "Bearer {}"}}', "abc.def.ghi"),
    ("curl -H 'X-Api-Key: {}'", "k123456"),
    ("Cookie: {}", "session=abc; b=c"),
    ("postgres://bob:{}@10.0.0.5:5432/db", "s3cret"),
    ("https://mei:{}@git.corp.example.org/x", "p@ss"),
    ("redis://:{}@h:1", "hunter2"),
    ("train.py --password {} --lr 1e-4", "hunter2"),
    ("train.py --token {} --lr 1e-4", "mytokenvalue"),
    ("['train.py', '--api-key', '{}']", "abc123xyz"),
    ('{{"password": "{}", "x": 1}}', "hun ter2"),
    ("{{'password': '{}'}}", "hun ter2"),
    ('{{\\"password\\": \\"{}\\"}}', "hunter2"),
    ("  db_password : '{}'", "hunter2"),
    ("MYSQL_PWD={}", "hunter2"),
    ("https://x.example.org/?token={}&n=1", "abcdefgh1"),
    ("https://x.example.org/o?X-Amz-Signature={}&n=1", "abcdef012345"),
    ("AccountKey={};EndpointSuffix=x", "abc/def+ghi=="),
    ("machine api.wandb.ai login user password {}", "0123abc"),
    ("\x1b[32mpassword\x1b[0m=\x1b[31m{}\x1b[0m", "hunter2"),
    ('"key": "-----BEGIN PRIVATE KEY-----\\n{}\\n-----END PRIVATE KEY-----\\n"', "MIIEabcdefghijklmno\\nxyz"),
    ("mail {} now", "mei.chen+x@lab.example.org"),
    ('  File "/home/{}/train.py", line 3', "meichen"),
    ("/Users/{}/x", "meichen"),
    ("C:\\Users\\{}\\x", "Mei Chen"),
    ("USER={}", "meichen"),
    ("JobId=1 UserId={}(1001)", "meichen"),
    ("wandb: Currently logged in as: {} (lab).", "meichen"),
    ("https://wandb.ai/{}/proj/runs/abc", "meichen"),
    ("(base) {}@gpu-01:~/x$ torchrun", "meichen"),
    ("root@{}:/workspace# torchrun", "trainbox"),
    ("cannot reach {}", "node-12.cluster.local"),
    ("ssh to {}", "n12.hpc.uni.edu"),
    ("{}:118:390 [0] NCCL INFO x", "trainbox"),
    ("addr=[{}]:40112", "trainbox"),
    ("has failed to connect to ({}, 29511).", "trainbox"),
    ("Connection closed by remote peer {}<42830>", "node-0.cluster"),
    ("  host      : {}", "trainbox"),
    ('"hostname": "{}"', "trainbox"),
    ("MASTER_ADDR={}", "trainbox"),
    ("--rdzv_endpoint={}:29500", "trainbox"),
    ("SLURM_NODELIST={}", "gpu-a-[01-04]"),
    ("srun: error: {}: task 6: Exited with exit code 1", "trainbox"),
    ("*** STEP 1.0 ON {} CANCELLED AT 2026-03-02T04:10:55 ***", "trainbox"),
    ("Nov 18 05:58:41 {} systemd[1]: Failed", "trainbox"),
    ("The node '{}_71120_0' has failed", "gpu11.cluster"),
    ("{}: Loading extension module", "node-07"),
    ("http://{}:8080/x", "trainbox"),
    ("10 of {}:29500 answered", "10.1.2.3"),
    ("[::ffff:{}]:29500", "10.1.2.3"),
    ("gid {} on mlx5_0", "fe80::1ff:fe23:4567:890a"),
    ("gid {}", "2001:db8:0:0:0:0:2:1"),
    ("ether {} txqueuelen", "00:1a:2b:3c:4d:5e"),
    ("s3://{}/ckpt", "ourbucket"),
]  # fmt: skip

STAYS = [
    "127.0.0.1:29500 [::1]:29500 localhost:29500 0.0.0.0:8000 [::]:29500 [::ffff:127.0.0.1]:54742",
    "torch 2.1.0.dev20240101+cu121, NCCL version 2.18.5+cuda12.1, driver 570.195.03, cuDNN version 9.1.0.70",
    "nvidia-cublas-cu12==12.1.3.1 libnccl.so.2.18.5",
    "pad_token_id=50256 eos_token='</s>' num_tokens: 2048 loss_per_token: 1.234e-05 max_tokens=4096, hub_token=None",
    "torch.distributed.elastic sklearn.cluster.KMeans self.net(x) threading.local layers.0.mlp.net",
    "frame #4: c10d::TCPStore::check(std::vector<std::__cxx11::basic_string<char>> const&) + 0x298 (0x7f501a9fd298)",
    "[rank3]:[E1108 17:20:03.55 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0(default_pg) Rank 2] Process group",
    "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
    "store by key '0', but store->get('0') got error: wait timeout after 1800000ms, keys: /default_pg/0//cuda/",
    "/root/.cache/x file:///tmp/x env:// sha 0123456789abcdef0123456789abcdef01234567",
    "A[0-3] x[10-20] pass@1: 0.4 recall@10 user: What is it? host: 12 GB nodes=4 gpu:1",
    "NVRM: Xid (PCI:0000:9c:00): 79, pid=8841, name=python3, GPU has fallen off the bus.",
    "\x1b[32mINFO\x1b[0m step 3",
]
NOISE = st.text(st.sampled_from("abz019 .,:;=-_/[]<>(){}'\"@#%|\t\x1b中é\\"), max_size=40)
SOME_HIDDEN = [case for case in HIDDEN if "{{" not in case[0] and case[0][0] not in "{ "]


@pytest.mark.parametrize(("line", "secret"), HIDDEN)
def test_a_secret_is_hidden_and_its_line_stays_readable(line: str, secret: str) -> None:
    redacted = redact(line.format(secret) + "\n")
    assert secret not in redacted
    assert PLACEHOLDER.search(redacted)
    assert redacted.endswith("\n")
    assert redact(redacted) == redacted


@pytest.mark.parametrize("line", STAYS)
def test_what_only_looks_like_a_secret_stays(line: str) -> None:
    assert redact(line) == line


def test_equal_secrets_get_equal_placeholders_and_others_other_ones() -> None:
    text = "gpu-01:118:390 [0] NCCL WARN from 10.0.0.7\n[gpu-02]:29500 10.0.0.8 [::ffff:10.0.0.7]:1\nsrun: error: gpu-01: task 6\n"
    assert Redactor().text(text) == (
        "<host-1>:118:390 [0] NCCL WARN from <ip-1>\n[<host-2>]:29500 <ip-2> [<ip-1>]:1\nsrun: error: <host-1>: task 6\n"
    )


def test_a_name_that_one_line_gives_away_is_hidden_in_all_of_a_text() -> None:
    text = "saved to /scratch/meichen/out\nlog of trainbox7.log\n/home/meichen/x\nhostname=trainbox7.lab.example.org\n"
    assert Redactor().text(text) == (
        "saved to /scratch/<user-1>/out\nlog of <host-1>.log\n/home/<user-1>/x\nhostname=<host-1>\n"
    )


def test_a_user_called_like_a_common_word_takes_no_words_away() -> None:
    text = '  File "/home/train/env/x.py", line 1\nsaved by train, in train.py\n'
    assert Redactor().text(text) == text.replace("/home/train/", "/home/<user-1>/")


def test_names_known_beforehand_are_numbered_only_when_met() -> None:
    redactor = Redactor(users=["meichen", "root"], hosts=["trainbox7", "localhost"])
    assert redactor.text("root on gpu-01:1:2 [0] NCCL; by meichen on trainbox7 and localhost") == (
        "root on <host-1>:1:2 [0] NCCL; by <user-1> on <host-2> and localhost"
    )


def test_a_private_key_over_many_lines_is_hidden_and_what_follows_is_not() -> None:
    key = (
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA7\nabcdefghijklmnop+/=\nq==\n-----END RSA PRIVATE KEY-----\n"
    )
    redacted = redact(key + "step 3\n")
    assert not re.search("MIIE|abcdef|q==", redacted)
    assert redacted.count("\n") == 6
    assert redacted.endswith("-----END RSA PRIVATE KEY-----\nstep 3\n")


def test_a_private_key_that_was_cut_off_does_not_swallow_the_log() -> None:
    redacted = redact("-----BEGIN PRIVATE KEY-----\nMIIEabcdefghijklmnopq\n[rank0]: RuntimeError: no, really\nstep 3\n")
    assert "MIIE" not in redacted
    assert redacted.endswith("[rank0]: RuntimeError: no, really\nstep 3\n")


@settings(max_examples=150)
@given(
    st.lists(st.tuples(NOISE, st.sampled_from(SOME_HIDDEN)), min_size=1, max_size=4), st.sampled_from(["\n", "\r\n"])
)
def test_noise_before_and_between_neither_shows_a_secret_nor_unsettles(
    parts: list[tuple[str, tuple[str, str]]], end: str
) -> None:
    text = "".join(f"{noise}{end}{line.format(secret)}{end}" for noise, (line, secret) in parts)
    redacted = redact(text)
    for _, (_, secret) in parts:
        assert secret not in redacted
    assert redact(redacted) == redacted
    assert redacted.count(end) == text.count(end)


@settings(max_examples=150)
@given(st.binary(max_size=400))
def test_bytes_without_secrets_come_out_as_they_are_whatever_they_are(data: bytes) -> None:
    redactor = Redactor()
    redacted = b"".join(redactor.lines(io.BytesIO(data)))
    assert redacted == data or re.search(rb"<[a-z]+-\d+>", redacted)
    assert b"".join(Redactor().lines(io.BytesIO(redacted))) == redacted


def test_line_ends_and_invalid_bytes_of_a_stream_are_kept() -> None:
    data = b"a\r\nb \xff\xfe 10.1.2.3\n\r 40%\r 50%\nend"
    assert b"".join(Redactor().lines(io.BytesIO(data))) == b"a\r\nb \xff\xfe <ip-1>\n\r 40%\r 50%\nend"


@pytest.mark.parametrize("behind", range(0, 90, 7))
def test_a_secret_at_the_edge_of_a_chunk_of_an_endless_line_is_hidden(
    monkeypatch: pytest.MonkeyPatch, behind: int
) -> None:
    """The cut may fall before, in and behind it; a line has no end for two chunks here."""
    chunk = 1 << 16
    monkeypatch.setattr(redactor, "CHUNK", chunk)
    secret = b"password: hunter2hunter2 at 10.1.2.3:29500 "
    line = (b"step 1 " * chunk)[: chunk - behind - MARGIN // 2] + b" " + (secret * 120) + b"word " * (chunk // 5)
    redacted = b"".join(Redactor().lines(io.BytesIO(line)))
    assert b"hunter2" not in redacted
    assert b"10.1.2.3" not in redacted
    assert redacted.count(b"<ip-1>:29500") == 120


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.source)
def test_every_rule_says_its_source_and_is_linear_by_structure(rule: Rule) -> None:
    assert rule.source
    assert bool(rule.hints) != bool(rule.repeated)
    assert all(hint == hint.lower() for hint in rule.hints)
    assert backtracking_risk(rule.pattern.pattern) == ""
    kinds = {name.rstrip("0123456789") for name in rule.pattern.groupindex}
    assert kinds <= {"token", "secret", "user", "host", "ip", "mac", "email", "bucket"}


def test_no_hint_keeps_a_rule_from_a_line_that_it_matches() -> None:
    lines = [line.format(secret) for line, secret in HIDDEN] + STAYS
    lines += [
        line
        for entry in load_catalog(configured_roots()).current()
        for log in entry.logs
        for line in log.text.splitlines()
    ]
    missed = {
        (rule.source, line) for rule in RULES for line in lines if rule.find(line) and rule not in candidate_rules(line)
    }
    assert missed == set()


def test_no_rule_takes_square_time_for_a_long_text_of_bait() -> None:
    """Searching begins anew at every character: what is linear from one may be square from all."""
    units = [
        "a", "1.", "ab:", "a@", "a://", "gpu-1 ", "-", "--t", "/home/", "eyJ", "::", "a.com.", "gpu-[01-", "[a", "a<1234", "ON a ",
        "password=", 'token="', '\\"', "user=", "host      : ", "connect to a", "\\Users\\a b ", "1", " ", "<", "the node 'a_1_1",
        "xoxb.xoxb-", "sk-", "A", "Aa0+/=", "\\", "ssh -a ", "secret: ", "0:", "node'", "slurmstepd-",
    ]  # fmt: skip
    texts = [unit * (30_000 // len(unit)) for unit in units]
    assert redos_timing.slow({rule.pattern.pattern: texts for rule in RULES}, limit_s=3.0) == frozenset()


def test_the_logs_of_the_entries_mean_the_same_when_they_are_redacted() -> None:
    """Every signature of every entry matches a log before if and only if it does after."""
    entries = load_catalog(configured_roots()).current()
    signatures = {signature.pattern for entry in entries for signature in entry.meta.signatures}
    patterns = [re.compile(signature, re.MULTILINE) for signature in sorted(signatures)]
    logs = [log.text for entry in entries for log in (*entry.logs, *entry.look_alikes)]
    logs += [signature.sample for entry in entries for signature in entry.meta.signatures]
    logs += [path.read_text(errors="replace") for path in builtin_root().healthy_logs()]
    changed = [(log, redacted) for log in logs if (redacted := redact(log)) != log]
    assert len(changed) > 50
    for log, redacted in changed:
        assert [bool(pattern.search(log)) for pattern in patterns] == [
            bool(pattern.search(redacted)) for pattern in patterns
        ], redacted
        assert redact(redacted) == redacted
