"""What must not leave a machine: patterns of secrets, people and machines in logs, each with where its form is told.

A named group of a pattern is what is hidden, and the group's name (without digits) its kind; the rest of the match is
context that stays. Every pattern is linear on any text: repeats are bounded, or are the last thing of the pattern and
cannot fail. The rules run in the order in which they stand: an address before the host that it could be.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple


class Rule(NamedTuple):
    """A line is searched if it has, in lower case, one of the `hints`, or the character of `least` as often as that."""

    source: str
    hints: tuple[str, ...]
    least: str
    pattern: re.Pattern[str]
    find: Callable[[str], re.Match[str] | None]


def _rule(source: str, hints: str, pattern: str, least: str = "") -> Rule:
    compiled = re.compile(pattern)
    return Rule(source, tuple(hints.split()), least, compiled, compiled.match if pattern[0] == "^" else compiled.search)


# The value of `key=`, `"key": "`, `key: '`, also inside JSON that was quoted once more.
_VALUE = r"""(?:\\"(?P<{0}1>[^"\\\n]+)|"(?P<{0}2>(?:[^"\\\n]|\\.)+)|'(?P<{0}3>[^'\n]+)|(?P<{0}4>[^\s"'\\]+))"""
_IS = r"""\\?["']?\s{0,8}(?:=>|:=|[:=])\s{0,8}"""
_SECRETIVE = (
    r"(?i:passw(?:or)?d|passwd|passphrase|[_-]pwd|secret|credential"
    r"|(?:api|access|secret|private|account|shared|signing|encryption)[_-]?key)"
)
_TOKENS = (
    r"(?i:(?:access|api|auth|bearer|bot|github|gh|gitlab|hf|hub|hugging_?face|id|ngc|oauth|refresh|security|session"
    r"|slack|wandb)[_-]?token)"
)
_NAME = r"[A-Za-z0-9][\w-]{0,62}"
_HOST = r"[A-Za-z0-9][\w.-]{0,252}"
_MACHINE = r"(?:gpu|node|nid|cn|compute|dgx|hgx|host|srv|server|[ahbv]\d00)"  # what machines of clusters are called
_ALONE = r"(?<![\w.@<-])"  # where a name begins

SECRETS = (
    _rule(
        "docs.aws.amazon.com: IAM identifiers",
        "akia asia abia acca",
        r"(?<![A-Za-z0-9])(?P<token>(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16})(?![A-Za-z0-9])",
    ),
    _rule(
        "github.blog: behind GitHub's new authentication token formats",
        "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_",
        r"(?<![A-Za-z0-9])(?P<token>(?:gh[pousr]|github_pat)_\w{20,})",
    ),
    _rule(
        "docs.gitlab.com: token prefixes",
        "gl",
        r"(?<![A-Za-z0-9])(?P<token>gl(?:pat|oas|dt|rt|cbt|ptt|ft|imt|agent|soat)-[\w-]{20,})",
    ),
    _rule(
        "docs.slack.dev: token types",
        "xox xapp-",
        r"(?<![A-Za-z0-9])(?P<token>(?:xox[a-z](?:\.xox[a-z])?|xapp)-[\w-]{8,})",
    ),
    _rule(
        "docs.slack.dev and docs.discord.com: incoming webhooks",
        "/services/ /webhooks/",
        r"(?:hooks\.slack\.com/services|discord(?:app)?\.com/api/webhooks)/(?P<token>[\w/-]+)",
    ),
    _rule(
        "huggingface.co/docs/hub: security tokens",
        "hf_ api_org_",
        r"(?<![A-Za-z0-9])(?P<token>(?:hf|api_org)_[A-Za-z0-9]{20,})",
    ),
    _rule("platform.openai.com, docs.anthropic.com: API keys", "sk-", r"(?<![\w-])(?P<token>sk-[\w-]{20,})"),
    _rule(
        "docs.wandb.ai: wandb login",
        "wandb",
        r"(?<![A-Za-z0-9])(?:wandb login (?:--relogin )?(?P<token1>[\w-]{40,})|(?P<token2>wandb_v\d_\w{20,}))",
    ),
    _rule(
        "cloud.google.com: API keys, OAuth access tokens",
        "aiza ya29.",
        r"(?<![\w-])(?P<token>AIza[\w-]{35}|ya29\.[\w.-]{20,})",
    ),
    _rule("docs.nvidia.com/ngc: API keys", "nvapi-", r"(?<![\w-])(?P<token>nvapi-[\w-]{20,})"),
    _rule(
        "docs.databricks.com, docs.npmjs.com, pypi.org/help, docs.docker.com: access tokens",
        "dapi npm_ pypi- dckr_",
        r"(?<![\w-])(?P<token>dapi[0-9a-f]{32}(?:-\d)?|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,}|dckr_[a-z]{3}_[\w-]{20,})",
    ),
    _rule(
        "help.aliyun.com, cloud.tencent.com: access keys",
        "ltai akid",
        r"(?<![\w-])(?P<token>LTAI[A-Za-z0-9]{12,30}|AKID[A-Za-z0-9]{13,64})(?![A-Za-z0-9])",
    ),
    _rule(
        "RFC 7519 (a JSON object in base64url, with or without signature)",
        "eyj",
        r"(?<![\w-])(?P<token>eyJ[\w-]{16,}(?:\.[\w-]+){0,4}={0,2})",
    ),
    _rule(
        "RFC 3986: userinfo",
        "://",
        r"://(?:(?P<user>[^\s/:@\"'<>]{1,256})(?::(?P<secret>[^\s/\"'<>]{1,2048}))?|:"
        r"(?P<secret1>[^\s/\"'<>]{1,2048}))@",
    ),
    _rule(
        "docs.aws.amazon.com: SigV4 query; learn.microsoft.com: SAS",
        "sig signature credential token= key=",
        r"[?&](?i:sig|x-(?:amz|goog)-(?:signature|credential|security-token)|[\w-]{0,20}token|key"
        r"|api_?key)=(?P<token>[^&\s\"']+)",
    ),
    _rule(
        "RFC 9110: Authorization",
        "authorization",
        r"(?i:authorization)"
        + _IS
        + r"(?i:\\?[\"']?(?:bearer|basic|token|digest|negotiate|apikey)\s{1,4})?"
        + _VALUE.format("token"),
    ),
    _rule("RFC 6750: Bearer", "bearer", r"(?i:\bbearer) (?!(?i:token|auth))(?P<token>[\w.~+/=-]{8,})"),
    _rule("RFC 6265: Cookie", "cookie", r"(?i:cookie)\\?[\"']?\s{0,4}:\s{0,4}\\?[\"']?(?P<token>[^\"'\r\n]+)"),
    _rule(
        "KEY=value, JSON, YAML, INI",
        "passw phrase pwd secret credential key",
        _SECRETIVE + r"(?i:s|[_-]?id)?" + _IS + _VALUE.format("secret"),
    ),
    _rule("KEY=value, JSON, YAML, INI", "token", _TOKENS + _IS + _VALUE.format("token")),
    # Tokens of a vocabulary (`pad_token=...`, `loss_per_token: 0.1`) are none: a secret has letters and digits.
    _rule(
        "KEY=value, JSON, YAML, INI",
        "token",
        r"(?i:token)" + _IS + r"""\\?["']?(?![\d.+-]+(?i:e[+-]?\d+|[a-z/]{0,6})?(?![\w.]))"""
        r"(?=[\w.~+/=-]{0,256}\d)(?=[\w.~+/=-]{0,256}[A-Za-z])(?P<token>[\w.~+/=-]{8,})",
    ),
    _rule(
        "--flag value, also as a printed list",
        "--",
        r"(?<![\w-])--(?=[A-Za-z])[\w-]{0,40}?(?:"
        + _SECRETIVE
        + "|"
        + _TOKENS
        + r"|(?<=--)(?i:token|pass))[\"']?(?:,? {1,4}|=)"
        + _VALUE.format("secret"),
    ),
    _rule(
        "The .netrc file of ftp(1)",
        "password",
        r"(?:^\s{0,40}|\blogin\s{1,8}(?P<user>\S{1,256})\s{1,8})password\s{1,8}(?P<secret>\S+)\s*$",
    ),
)

PEOPLE = (
    _rule(
        "RFC 5322: address",
        "@",
        r"(?<![\w.+<-])(?!git@)(?P<email>[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){0,8}\.[A-Za-z]{2,24})(?![\w@])",
    ),
    _rule(
        "Prompts; ssh(1), scp(1)",
        "@",
        r"(?<![\w.+<-])(?P<user>[A-Za-z_][\w.+-]{0,63})@(?P<host>[A-Za-z][\w.-]{1,252})(?=:[~/]| [^\]\s]{1,256}\][$#])",
    ),
    _rule(
        "ssh(1), scp(1)",
        "@",
        r"\b(?:ssh|scp|rsync|sftp) (?:-\S{1,40} ){0,9}(?P<user>[A-Za-z_][\w.+-]{0,63})@(?P<host>" + _HOST + ")",
    ),
    _rule(
        "Filesystem Hierarchy Standard: /home; macOS /Users",
        "/home /users/",
        r"/(?:home\d{0,2}|[Uu]sers)/(?P<user>[^/\\\s:\"'<>,;()\[\]{}|*?$`]{1,128})",
    ),
    _rule(
        "Windows: user profiles",
        "\\users\\",
        r"(?i:\\users)\\{1,2}(?P<user>[^\\/:\"'<>|*?\s]{1,64}(?: [^\\/:\"'<>|*?\s]{1,64}){0,3}(?=\\)"
        r"|[^\\/:\"'<>|*?\s]{1,64})",
    ),
    _rule(
        "environ(7), PAM, Slurm: scontrol(1)",
        "user logname login",
        r"(?<![\w.])(?i:[\w-]{0,20}user(?:_?name|id)?|logname|login)\\?[\"']?\s?=\s?[\"']?"
        r"(?P<user>[A-Za-z_][\w.-]{0,63})",
    ),
    _rule(
        "YAML, JSON",
        "user",
        r"(?i:user_?name\\?[\"']?|[\"']user[\"'])\s{0,4}:\s{0,4}\\?[\"']?(?P<user>[A-Za-z_][\w.-]{0,63})",
    ),
    _rule("--user value", "--user", r"--user(?:name)?[ =](?P<user>[A-Za-z_][\w.-]{0,63})"),
    _rule(
        "id(1), PAM, wandb",
        "uid session logged",
        r"(?:\buid=\d{1,10}\(|\bsession (?:opened|closed) for user |logged in as:? )"
        r"(?P<user>[A-Za-z_][\w.-]{0,63})(?: \((?P<user1>[\w.-]{1,64})\))?",
    ),
    _rule("docs.wandb.ai: the address of a run", "wandb.ai/", r"wandb\.ai/(?P<user>[\w.-]{1,64})/"),
)

MACHINES = (
    _rule(
        "IEEE 802, IPoIB: addresses",
        "",
        r"(?P<mac>[0-9A-Fa-f](?<![\w:][0-9A-Fa-f])[0-9A-Fa-f](?::[0-9A-Fa-f]{2}){5}(?:"
        r"(?::[0-9A-Fa-f]{2}){14})?)(?![\w:])",
        least=":::::",
    ),
    _rule(
        "IEEE 802, on Windows", "", r"(?<![\w-])(?P<mac>[0-9A-Fa-f]{2}(?:-[0-9A-Fa-f]{2}){5})(?![\w-])", least="-----"
    ),
    _rule(
        "RFC 4291: compressed",
        "::",
        r"(?<![\w:.<])(?=[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{1,4}){0,6}::)(?P<ip>[0-9A-Fa-f:]{2,39}(?:\d{0,3}(?:\.\d{1,3}){3})?)(?![\w:])",
    ),
    _rule(
        "RFC 4291: in full",
        "",
        r"(?<![\w:.<])(?P<ip>(?:[0-9A-Fa-f]{1,4}:){7}[0-9A-Fa-f]{1,4})(?![\w:])",
        least=":::::::",
    ),
    _rule(
        "RFC 791; a version (==12.1.3.1, cu12-12.1.3.1-py3) is none",
        "",
        r"(?P<ip>\d(?<![A-Za-z0-9.]\d)(?<![=<>~!]=\d)(?<!\+\d)(?<!ersion[ =]\d)(?<!ersion: \d)"
        r"(?<!cu\d\d \d)\d{0,2}(?:\.\d{1,3}){3})(?![A-Za-z0-9]|\.\d|-(?:py|cp)\d|\.(?:dist|whl|tar))",
        least="...",
    ),
    _rule(
        "docs.aws.amazon.com: host names from addresses",
        "ip-",
        _ALONE + r"(?P<host>ip-\d{1,3}(?:-\d{1,3}){3}(?:\.[\w-]{1,63}){0,8})",
    ),
    _rule(
        "Object stores: boto3, fsspec, hdfs",
        "s3 gs:// gcs:// az:// abfs hdfs:// oss:// cos:// tos:// obs://",
        r"(?<![\w<])(?:s3[an]?|gs|gcs|az|abfss?|hdfs|oss|cosn?|tos|obs)://(?P<bucket>[A-Za-z0-9][\w.-]{0,252})",
    ),
    _rule(
        "RFC 3986: host",
        "://",
        r"(?<![\w<])(?!(?:s3|gs|gcs|az|abfs|oss|cos|tos|obs|hf)://)[A-Za-z][\w+.-]{0,20}://"
        r"(?:<[\w-]{1,20}>[:@]){0,2}(?P<host>" + _HOST + ")",
    ),
    _rule(
        "RFC 1034: names under domains that no module is called like",
        ".com .org .edu .gov .ac. .local .internal",
        _ALONE
        + r"(?<!/)(?P<host>(?:"
        + _NAME
        + r"\.){1,8}(?:(?:com|org|edu|gov)(?:\.[a-z]{2})?|ac\.[a-z]{2}|svc\.cluster\.local|localdomain"
        r"|(?:ec2|compute|google)\.internal))(?![\w-]|\.\w|\()",
    ),
    _rule(
        "RFC 1034: names of machines (threading.local, sklearn.cluster and self.net are none)",
        ".local .internal .lan .corp .intra .cluster .hpc .net .io .ai .cn .de .fr .uk .jp .kr .eu .ch .ca",
        _ALONE + r"(?<!/)(?P<host>[A-Za-z][A-Za-z-]{0,40}[\d-][\w-]{0,40}(?:\." + _NAME + r"){0,7}"
        r"\.(?:local|internal|lan|corp|intra|cluster|hpc|net|io|ai|cn|de|fr|uk|jp|kr|eu|ch|ca))(?![\w-]|\.\w|\()",
    ),
    _rule(
        "github.com/NVIDIA/nccl src/debug.cc: host:pid:tid [dev]",
        "nccl",
        _ALONE + r"(?P<host>" + _HOST + r"):\d{1,8}:\d{1,8} (?=\[[\d-]|NCCL)",
    ),
    _rule(
        "github.com/NVIDIA/nccl src/misc/socket.cc: name<port>",
        "0> 1> 2> 3> 4> 5> 6> 7> 8> 9>",
        r"(?<![\w.@<:-])(?P<host>[A-Za-z][\w-]{0,62}(?:\.[\w-]{1,63}){0,8})<\d{4,5}>",
    ),
    _rule("pytorch c10d socket.cpp: [name]:port", "]:", r"\[(?P<host>[A-Za-z][\w.-]{0,252})\]:(?=\d{2,5}(?!\d))"),
    _rule(
        "pytorch c10d socket.cpp, TCPStore.cpp: (name, port), host name - retrying",
        "onnect",
        r"onnect(?:ed|ing)?(?:/validate)? (?:to|with|from)(?: host)? [\[(]?(?P<host>[A-Za-z][\w.-]{0,252})"
        r"(?=:\d|, \d{2,5}\)| - )",
    ),
    _rule(
        "pytorch elastic: errors, dynamic_rendezvous (node name_pid_rank)",
        "host node",
        r"(?:\bhost {1,20}: |\b[Tt]he node ')(?P<host>[A-Za-z0-9][\w.-]{0,252}?)(?=_\d{1,10}_\d{1,10}'|[\s\x1b]|$)",
    ),
    _rule(
        "hostname(1), torchrun, accelerate, Slurm: scontrol(1)",
        "host node master rdzv process_ip batchhost",
        r"(?<![A-Za-z])(?i:host|host_?name|node_?name|(?:main_)?(?:master|process)_(?:addr(?:ess)?|ip)"
        r"|rdzv[_-]endpoint|batchhost|\w{0,20}nodelist)"
        r"\\?[\"']?(?:\s?=\s?|:\s{1,4}(?=[\w.-]{0,252}\d)|[\"']:\s?| (?=[\w.-]{0,60}[:\d]))\\?[\"']?"
        r"(?P<host>[A-Za-z0-9][\w.-]{0,252}(?:\[[\d,-]{1,400}\])?)",
    ),
    _rule(
        "Slurm: srun(1), slurmstepd",
        "srun slurm cancelled",
        r"(?:\b(?:srun|slurmstepd): error: (?P<host1>"
        + _HOST
        + r"): tasks? |\bON (?P<host2>"
        + _HOST
        + r") CANCELLED|\bslurmstepd-(?P<host3>[\w-]{1,63}))",
    ),
    _rule(
        "Slurm: hostlist",
        "-[ gpu[ node[ nid[ cn[ compute[ dgx[ hgx[ host[ srv[ server[ 00[",
        _ALONE + r"(?P<host>(?:" + _MACHINE + r"[A-Za-z0-9-]{0,40}|[A-Za-z][A-Za-z0-9]{0,20}-[A-Za-z0-9-]{0,20})"
        r"\[\d{1,6}(?:[,-]\d{1,6}){1,400}\](?:\.[\w-]{1,63}){0,4})",
    ),
    _rule(
        "RFC 3164, RFC 5424, journalctl(1)",
        "]: kernel:",
        r"^[^\n]{0,40}?(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT[\d:.,]{8,15}(?:Z"
        r"|[+-]\d\d:?\d\d)?) (?P<host>" + _HOST + r") (?=[\w./()-]{1,64}(?:\[\d{1,10}\])?: )",
    ),
    _rule(
        "pdsh(1), mpirun, deepspeed: a line begins with its machine",
        ": : slots=",
        r"^(?:\d{1,5}: )?\[?(?P<host>"
        + _MACHINE
        + r"-?[A-Za-z]{0,3}-?[\w-]{0,40}\d{2}|"
        + _MACHINE
        + r"-[\w-]{0,40}\d)(?=: |:\d{1,3}\]|\s{1,4}slots=)",
    ),
    _rule(
        "Names by number",
        "gpu node nid dgx hgx",
        _ALONE + r"(?<!/)(?P<host>(?:gpu|node|nid|dgx|hgx)-?[A-Za-z]?-?\d{2,6})(?![\w-])",
    ),
    _rule(
        "mpirun(1), uname(1), Kubernetes --prefix",
        "node host linux [pod/",
        r"(?:\bon (?:host|node)s? |\bLinux (?=\S{1,253} \d)|\[pod/)(?P<host>[A-Za-z][\w.-]{0,200}\d[\w.-]{0,50})",
    ),
)

RULES = (*SECRETS, *PEOPLE, *MACHINES)
