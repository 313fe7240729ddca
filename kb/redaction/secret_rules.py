"""Rules for secrets: tokens of a known form, credentials in URLs and headers, values of fields with secret names."""

from __future__ import annotations

from kb.redaction.rule import make_rule

# The value of `key=`, `"key": "`, `key: '`, even inside JSON that was quoted again.
_VALUE = r"""(?:\\"(?P<{0}1>[^"\\\n]+)|"(?P<{0}2>(?:[^"\\\n]|\\.)+)|'(?P<{0}3>[^'\n]+)|(?P<{0}4>[^\s"'\\]+))"""
_IS = r"""\\?["']?\s{0,8}(?:=>|:=|[:=])\s{0,8}"""
_CREDENTIAL_FIELD = (
    r"(?i:passw(?:or)?d|passwd|passphrase|[_-]pwd|secret|credential"
    r"|(?:api|access|secret|private|account|shared|signing|encryption)[_-]?key)"
)
_BEARER_FIELD = (
    r"(?i:(?:access|api|auth|bearer|bot|github|gh|gitlab|hf|hub|hugging_?face|id|ngc|oauth|refresh|security|session"
    r"|slack|wandb)[_-]?token)"
)

SECRETS = (
    make_rule(
        "docs.aws.amazon.com: IAM identifiers",
        "akia asia abia acca",
        r"(?<![A-Za-z0-9])(?P<token>(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16})(?![A-Za-z0-9])",
    ),
    make_rule(
        "github.blog: behind GitHub's new authentication token formats",
        "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_",
        r"(?<![A-Za-z0-9])(?P<token>(?:gh[pousr]|github_pat)_\w{20,})",
    ),
    make_rule(
        "docs.gitlab.com: token prefixes",
        "gl",
        r"(?<![A-Za-z0-9])(?P<token>gl(?:pat|oas|dt|rt|cbt|ptt|ft|imt|agent|soat)-[\w-]{20,})",
    ),
    make_rule(
        "docs.slack.dev: token types",
        "xox xapp-",
        r"(?<![A-Za-z0-9])(?P<token>(?:xox[a-z](?:\.xox[a-z])?|xapp)-[\w-]{8,})",
    ),
    make_rule(
        "docs.slack.dev and docs.discord.com: incoming webhooks",
        "/services/ /webhooks/",
        r"(?:hooks\.slack\.com/services|discord(?:app)?\.com/api/webhooks)/(?P<token>[\w/-]+)",
    ),
    make_rule(
        "huggingface.co/docs/hub: security tokens",
        "hf_ api_org_",
        r"(?<![A-Za-z0-9])(?P<token>(?:hf|api_org)_[A-Za-z0-9]{20,})",
    ),
    make_rule("platform.openai.com, docs.anthropic.com: API keys", "sk-", r"(?<![\w-])(?P<token>sk-[\w-]{20,})"),
    make_rule(
        "docs.wandb.ai: wandb login",
        "wandb",
        r"(?<![A-Za-z0-9])(?:wandb login (?:--relogin )?(?P<token1>[\w-]{40,})|(?P<token2>wandb_v\d_\w{20,}))",
    ),
    make_rule(
        "cloud.google.com: API keys, OAuth access tokens",
        "aiza ya29.",
        r"(?<![\w-])(?P<token>AIza[\w-]{35}|ya29\.[\w.-]{20,})",
    ),
    make_rule("docs.nvidia.com/ngc: API keys", "nvapi-", r"(?<![\w-])(?P<token>nvapi-[\w-]{20,})"),
    make_rule(
        "docs.databricks.com, docs.npmjs.com, pypi.org/help, docs.docker.com: access tokens",
        "dapi npm_ pypi- dckr_",
        r"(?<![\w-])(?P<token>dapi[0-9a-f]{32}(?:-\d)?|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,}|dckr_[a-z]{3}_[\w-]{20,})",
    ),
    make_rule(
        "help.aliyun.com, cloud.tencent.com: access keys",
        "ltai akid",
        r"(?<![\w-])(?P<token>LTAI[A-Za-z0-9]{12,30}|AKID[A-Za-z0-9]{13,64})(?![A-Za-z0-9])",
    ),
    make_rule(
        "RFC 7519 (a JSON object in base64url, with or without signature)",
        "eyj",
        r"(?<![\w-])(?P<token>eyJ[\w-]{16,}(?:\.[\w-]+){0,4}={0,2})",
    ),
    make_rule(
        "RFC 3986: userinfo",
        "://",
        r"://(?:(?P<user>[^\s/:@\"'<>]{1,256})(?::(?P<secret>[^\s/\"'<>]{1,2048}))?|:"
        r"(?P<secret1>[^\s/\"'<>]{1,2048}))@",
    ),
    make_rule(
        "docs.aws.amazon.com: SigV4 query; learn.microsoft.com: SAS",
        "sig signature credential token= key=",
        r"[?&](?i:sig|x-(?:amz|goog)-(?:signature|credential|security-token)|[\w-]{0,20}token|key"
        r"|api_?key)=(?P<token>[^&\s\"']+)",
    ),
    make_rule(
        "RFC 9110: Authorization",
        "authorization",
        r"(?i:authorization)"
        + _IS
        + r"(?i:\\?[\"']?(?:bearer|basic|token|digest|negotiate|apikey)\s{1,4})?"
        + _VALUE.format("token"),
    ),
    make_rule("RFC 6750: Bearer", "bearer", r"(?i:\bbearer) (?!(?i:token|auth))(?P<token>[\w.~+/=-]{8,})"),
    make_rule("RFC 6265: Cookie", "cookie", r"(?i:cookie)\\?[\"']?\s{0,4}:\s{0,4}\\?[\"']?(?P<token>[^\"'\r\n]+)"),
    make_rule(
        "KEY=value, JSON, YAML, INI",
        "passw phrase pwd secret credential key",
        _CREDENTIAL_FIELD + r"(?i:s|[_-]?id)?" + _IS + _VALUE.format("secret"),
    ),
    make_rule("KEY=value, JSON, YAML, INI", "token", _BEARER_FIELD + _IS + _VALUE.format("token")),
    # Tokens of a vocabulary (`pad_token=...`, `loss_per_token: 0.1`) are not secrets, which have letters and digits.
    make_rule(
        "KEY=value, JSON, YAML, INI",
        "token",
        r"(?i:token)" + _IS + r"""\\?["']?(?![\d.+-]+(?i:e[+-]?\d+|[a-z/]{0,6})?(?![\w.]))"""
        r"(?=[\w.~+/=-]{0,256}\d)(?=[\w.~+/=-]{0,256}[A-Za-z])(?P<token>[\w.~+/=-]{8,})",
    ),
    make_rule(
        "--flag value, also as a printed list",
        "--",
        r"(?<![\w-])--(?=[A-Za-z])[\w-]{0,40}?(?:"
        + _CREDENTIAL_FIELD
        + "|"
        + _BEARER_FIELD
        + r"|(?<=--)(?i:token|pass))[\"']?(?:,? {1,4}|=)"
        + _VALUE.format("secret"),
    ),
    make_rule(
        "The .netrc file of ftp(1)",
        "password",
        r"(?:^\s{0,40}|\blogin\s{1,8}(?P<user>\S{1,256})\s{1,8})password\s{1,8}(?P<secret>\S+)\s*$",
    ),
)
