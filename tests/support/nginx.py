"""A real nginx with the configuration deploy/nginx.conf, but with ports, certificate and folders of a test."""

from __future__ import annotations

import os
import re
import signal
import ssl
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.support.console import CHECKOUT, GENEROUS_S, end, wait_for
from tests.support.postgres_server import free_port
from tests.support.programs import program

EXAMPLE = CHECKOUT / "deploy" / "nginx.conf"
AROUND = """\
daemon off;
pid nginx.pid;
{user}
worker_processes 1;
error_log stderr;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path client;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    include kb.conf;
}}
"""


@dataclass(frozen=True)
class Proxy:
    """A running nginx."""

    port: int
    certificate: Path

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.certificate)

    def client(self, key: str = "") -> httpx.Client:
        """A client that trusts the certificate and sends a key with every request."""
        return httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            verify=self.trust,
            timeout=GENEROUS_S,
            trust_env=False,
        )


@contextmanager
def nginx(folder: Path, upstreams: Sequence[int]) -> Iterator[Proxy]:
    """nginx in front of servers on these two ports."""
    port, binary = free_port(), program("nginx")
    certificate = _certify(folder)
    (folder / "kb.conf").write_text(_fitted(EXAMPLE.read_text(), folder, port, upstreams))
    (folder / "nginx.conf").write_text(AROUND.format(user="user root;" if os.geteuid() == 0 else ""))
    with (folder / "nginx.log").open("wb") as log:
        command = [binary, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        proxy = Proxy(port, certificate)
        wait_for(lambda: process.poll() is not None or _listens(proxy), "nginx to listen")
        assert process.poll() is None, (folder / "nginx.log").read_text()
        yield proxy
    finally:
        end(process, signal.SIGTERM)


def _fitted(text: str, folder: Path, port: int, upstreams: Sequence[int]) -> str:
    """The example configuration, adapted to this test. Each change must match."""
    changes = {
        r"server 127\.0\.0\.1:8001 ": f"server 127.0.0.1:{upstreams[0]} ",
        r"server 127\.0\.0\.1:8002 ": f"server 127.0.0.1:{upstreams[1]} ",
        r"listen 443 ": f"listen 127.0.0.1:{port} ",
        r"listen 80;": f"listen unix:{folder}/80;",
        r"/etc/nginx/kb\.(crt|key)": rf"{folder}/kb.\1",
    }
    for pattern, replacement in changes.items():
        text, count = re.subn(pattern, replacement, text)
        assert count, pattern
    return text


def _certify(folder: Path) -> Path:
    """Create a self-signed certificate for 127.0.0.1, in kb.crt and kb.key."""
    made = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc", "-days", "2"]
    named = ["-subj", "/CN=kb", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-out", str(folder / "kb.crt"), "-keyout", str(folder / "kb.key")]
    subprocess.run([program("openssl"), "req", *made, *named, *files], check=True, capture_output=True, timeout=60)
    return folder / "kb.crt"


def _listens(proxy: Proxy) -> bool:
    try:
        with proxy.client() as client:
            client.get("/healthz")
    except httpx.TransportError:
        return False
    return True
