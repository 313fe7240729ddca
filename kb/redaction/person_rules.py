"""Rules for people: mail addresses, user names, home directories."""

from __future__ import annotations

from kb.redaction.rule import HOST, make_rule

PEOPLE = (
    make_rule(
        "RFC 5322: address",
        "@",
        r"(?<![\w.+<-])(?!git@)(?P<email>[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){0,8}\.[A-Za-z]{2,24})(?![\w@])",
    ),
    make_rule(
        "Prompts; ssh(1), scp(1)",
        "@",
        r"(?<![\w.+<-])(?P<user>[A-Za-z_][\w.+-]{0,63})@(?P<host>[A-Za-z][\w.-]{1,252})(?=:[~/]| [^\]\s]{1,256}\][$#])",
    ),
    make_rule(
        "ssh(1), scp(1)",
        "@",
        r"\b(?:ssh|scp|rsync|sftp) (?:-\S{1,40} ){0,9}(?P<user>[A-Za-z_][\w.+-]{0,63})@(?P<host>" + HOST + ")",
    ),
    make_rule(
        "Filesystem Hierarchy Standard: /home; macOS /Users",
        "/home /users/",
        r"/(?:home\d{0,2}|[Uu]sers)/(?P<user>[^/\\\s:\"'<>,;()\[\]{}|*?$`]{1,128})",
    ),
    make_rule(
        "Windows: user profiles",
        "\\users\\",
        r"(?i:\\users)\\{1,2}(?P<user>[^\\/:\"'<>|*?\s]{1,64}(?: [^\\/:\"'<>|*?\s]{1,64}){0,3}(?=\\)"
        r"|[^\\/:\"'<>|*?\s]{1,64})",
    ),
    make_rule(
        "environ(7), PAM, Slurm: scontrol(1)",
        "user logname login",
        r"(?<![\w.])(?i:[\w-]{0,20}user(?:_?name|id)?|logname|login)\\?[\"']?\s?=\s?[\"']?"
        r"(?P<user>[A-Za-z_][\w.-]{0,63})",
    ),
    make_rule(
        "YAML, JSON",
        "user",
        r"(?i:user_?name\\?[\"']?|[\"']user[\"'])\s{0,4}:\s{0,4}\\?[\"']?(?P<user>[A-Za-z_][\w.-]{0,63})",
    ),
    make_rule("--user value", "--user", r"--user(?:name)?[ =](?P<user>[A-Za-z_][\w.-]{0,63})"),
    make_rule(
        "id(1), PAM, wandb",
        "uid session logged",
        r"(?:\buid=\d{1,10}\(|\bsession (?:opened|closed) for user |logged in as:? )"
        r"(?P<user>[A-Za-z_][\w.-]{0,63})(?: \((?P<user1>[\w.-]{1,64})\))?",
    ),
    make_rule("docs.wandb.ai: the address of a run", "wandb.ai/", r"wandb\.ai/(?P<user>[\w.-]{1,64})/"),
)
