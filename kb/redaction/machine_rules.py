"""Rules for machines: addresses, host names and bucket names.

Their order matters: rules for addresses come first, since an address could also be a host name.
"""

from __future__ import annotations

from kb.redaction.rule import HOST, make_rule

_NAME = r"[A-Za-z0-9][\w-]{0,62}"
_MACHINE = r"(?:gpu|node|nid|cn|compute|dgx|hgx|host|srv|server|[ahbv]\d00)"  # usual names of machines in clusters
_NAME_START = r"(?<![\w.@<-])"  # where a name begins

MACHINES = (
    make_rule(
        "IEEE 802, IPoIB: addresses",
        "",
        r"(?P<mac>[0-9A-Fa-f](?<![\w:][0-9A-Fa-f])[0-9A-Fa-f](?::[0-9A-Fa-f]{2}){5}(?:"
        r"(?::[0-9A-Fa-f]{2}){14})?)(?![\w:])",
        repeated=":::::",
    ),
    make_rule(
        "IEEE 802, on Windows",
        "",
        r"(?<![\w-])(?P<mac>[0-9A-Fa-f]{2}(?:-[0-9A-Fa-f]{2}){5})(?![\w-])",
        repeated="-----",
    ),
    make_rule(
        "RFC 4291: compressed",
        "::",
        r"(?<![\w:.<])(?=[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{1,4}){0,6}::)(?P<ip>[0-9A-Fa-f:]{2,39}(?:\d{0,3}(?:\.\d{1,3}){3})?)(?![\w:])",
    ),
    make_rule(
        "RFC 4291: in full",
        "",
        r"(?<![\w:.<])(?P<ip>(?:[0-9A-Fa-f]{1,4}:){7}[0-9A-Fa-f]{1,4})(?![\w:])",
        repeated=":::::::",
    ),
    make_rule(
        "RFC 791; a version (==12.1.3.1, cu12-12.1.3.1-py3) is none",
        "",
        r"(?P<ip>\d(?<![A-Za-z0-9.]\d)(?<![=<>~!]=\d)(?<!\+\d)(?<!ersion[ =]\d)(?<!ersion: \d)"
        r"(?<!cu\d\d \d)\d{0,2}(?:\.\d{1,3}){3})(?![A-Za-z0-9]|\.\d|-(?:py|cp)\d|\.(?:dist|whl|tar))",
        repeated="...",
    ),
    make_rule(
        "docs.aws.amazon.com: host names from addresses",
        "ip-",
        _NAME_START + r"(?P<host>ip-\d{1,3}(?:-\d{1,3}){3}(?:\.[\w-]{1,63}){0,8})",
    ),
    make_rule(
        "Object stores: boto3, fsspec, hdfs",
        "s3 gs:// gcs:// az:// abfs hdfs:// oss:// cos:// tos:// obs://",
        r"(?<![\w<])(?:s3[an]?|gs|gcs|az|abfss?|hdfs|oss|cosn?|tos|obs)://(?P<bucket>[A-Za-z0-9][\w.-]{0,252})",
    ),
    make_rule(
        "RFC 3986: host",
        "://",
        r"(?<![\w<])(?!(?:s3|gs|gcs|az|abfs|oss|cos|tos|obs|hf)://)[A-Za-z][\w+.-]{0,20}://"
        r"(?:<[\w-]{1,20}>[:@]){0,2}(?P<host>" + HOST + ")",
    ),
    make_rule(
        "RFC 1034: names under domains that no module is called like",
        ".com .org .edu .gov .ac. .local .internal",
        _NAME_START
        + r"(?<!/)(?P<host>(?:"
        + _NAME
        + r"\.){1,8}(?:(?:com|org|edu|gov)(?:\.[a-z]{2})?|ac\.[a-z]{2}|svc\.cluster\.local|localdomain"
        r"|(?:ec2|compute|google)\.internal))(?![\w-]|\.\w|\()",
    ),
    make_rule(
        "RFC 1034: names of machines (threading.local, sklearn.cluster and self.net are none)",
        ".local .internal .lan .corp .intra .cluster .hpc .net .io .ai .cn .de .fr .uk .jp .kr .eu .ch .ca",
        _NAME_START + r"(?<!/)(?P<host>[A-Za-z][A-Za-z-]{0,40}[\d-][\w-]{0,40}(?:\." + _NAME + r"){0,7}"
        r"\.(?:local|internal|lan|corp|intra|cluster|hpc|net|io|ai|cn|de|fr|uk|jp|kr|eu|ch|ca))(?![\w-]|\.\w|\()",
    ),
    make_rule(
        "github.com/NVIDIA/nccl src/debug.cc: host:pid:tid [dev]",
        "nccl",
        _NAME_START + r"(?P<host>" + HOST + r"):\d{1,8}:\d{1,8} (?=\[[\d-]|NCCL)",
    ),
    make_rule(
        "github.com/NVIDIA/nccl src/misc/socket.cc: name<port>",
        "0> 1> 2> 3> 4> 5> 6> 7> 8> 9>",
        r"(?<![\w.@<:-])(?P<host>[A-Za-z][\w-]{0,62}(?:\.[\w-]{1,63}){0,8})<\d{4,5}>",
    ),
    make_rule("pytorch c10d socket.cpp: [name]:port", "]:", r"\[(?P<host>[A-Za-z][\w.-]{0,252})\]:(?=\d{2,5}(?!\d))"),
    make_rule(
        "pytorch c10d socket.cpp, TCPStore.cpp: (name, port), host name - retrying",
        "onnect",
        r"onnect(?:ed|ing)?(?:/validate)? (?:to|with|from)(?: host)? [\[(]?(?P<host>[A-Za-z][\w.-]{0,252})"
        r"(?=:\d|, \d{2,5}\)| - )",
    ),
    make_rule(
        "pytorch elastic: errors, dynamic_rendezvous (node name_pid_rank)",
        "host node",
        r"(?:\bhost {1,20}: |\b[Tt]he node ')(?P<host>[A-Za-z0-9][\w.-]{0,252}?)(?=_\d{1,10}_\d{1,10}'|[\s\x1b]|$)",
    ),
    make_rule(
        "hostname(1), torchrun, accelerate, Slurm: scontrol(1)",
        "host node master rdzv process_ip batchhost",
        r"(?<![A-Za-z])(?i:host|host_?name|node_?name|(?:main_)?(?:master|process)_(?:addr(?:ess)?|ip)"
        r"|rdzv[_-]endpoint|batchhost|\w{0,20}nodelist)"
        r"\\?[\"']?(?:\s?=\s?|:\s{1,4}(?=[\w.-]{0,252}\d)|[\"']:\s?| (?=[\w.-]{0,60}[:\d]))\\?[\"']?"
        r"(?P<host>[A-Za-z0-9][\w.-]{0,252}(?:\[[\d,-]{1,400}\])?)",
    ),
    make_rule(
        "Slurm: srun(1), slurmstepd",
        "srun slurm cancelled",
        r"(?:\b(?:srun|slurmstepd): error: (?P<host1>"
        + HOST
        + r"): tasks? |\bON (?P<host2>"
        + HOST
        + r") CANCELLED|\bslurmstepd-(?P<host3>[\w-]{1,63}))",
    ),
    make_rule(
        "Slurm: hostlist",
        "-[ gpu[ node[ nid[ cn[ compute[ dgx[ hgx[ host[ srv[ server[ 00[",
        _NAME_START + r"(?P<host>(?:" + _MACHINE + r"[A-Za-z0-9-]{0,40}|[A-Za-z][A-Za-z0-9]{0,20}-[A-Za-z0-9-]{0,20})"
        r"\[\d{1,6}(?:[,-]\d{1,6}){1,400}\](?:\.[\w-]{1,63}){0,4})",
    ),
    make_rule(
        "RFC 3164, RFC 5424, journalctl(1)",
        "]: kernel:",
        r"^[^\n]{0,40}?(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT[\d:.,]{8,15}(?:Z"
        r"|[+-]\d\d:?\d\d)?) (?P<host>" + HOST + r") (?=[\w./()-]{1,64}(?:\[\d{1,10}\])?: )",
    ),
    make_rule(
        "pdsh(1), mpirun, deepspeed: a line begins with its machine",
        ": : slots=",
        r"^(?:\d{1,5}: )?\[?(?P<host>"
        + _MACHINE
        + r"-?[A-Za-z]{0,3}-?[\w-]{0,40}\d{2}|"
        + _MACHINE
        + r"-[\w-]{0,40}\d)(?=: |:\d{1,3}\]|\s{1,4}slots=)",
    ),
    make_rule(
        "Names by number",
        "gpu node nid dgx hgx",
        _NAME_START + r"(?<!/)(?P<host>(?:gpu|node|nid|dgx|hgx)-?[A-Za-z]?-?\d{2,6})(?![\w-])",
    ),
    make_rule(
        "mpirun(1), uname(1), Kubernetes --prefix",
        "node host linux [pod/",
        r"(?:\bon (?:host|node)s? |\bLinux (?=\S{1,253} \d)|\[pod/)(?P<host>[A-Za-z][\w.-]{0,200}\d[\w.-]{0,50})",
    ),
)
