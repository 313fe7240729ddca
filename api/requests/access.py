"""Authentication and authorization: a key in a header or in the cookie of the pages, or an anonymous reader.

Everything outside `OPEN` needs the scope READ. The middleware checks that before routing, which protects routes that
declare no dependency. A route that needs more takes a `Reporter` or `Admin`.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request, Response

from kb.errors import KeyNeeded, NotAllowed
from kb.store import keys
from kb.store.keys import Scope

from ..settings import Anonymous, Settings
from ..state.application import application
from ..state.snapshot import Snapshot
from .headers import COOKIE, Headers, find_key, is_local, is_same_site
from .rate_limits import RateLimit, client_network

COOKIE_S = 7 * 24 * 3600
OPEN = frozenset({"/healthz", "/readyz", "/openapi.json", "/docs", "/sign-in", "/sign-out"})
OPEN_FOLDER = "/static/"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
WRONG_KEYS = "10/minute"  # per client
HINT = "send a key as `Authorization: Bearer kb_...`; the operator of this service makes one with `kb key new`"
WRONG_KEY_HINT = (
    "the key is incomplete, revoked, or belongs to another service; its operator can list valid keys with `kb key list`"
)
NO_HASH = keys.fingerprint("")


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: the id of a key, or `anonymous`."""

    id: str
    scope: Scope


ANONYMOUS = Caller("anonymous", Scope.READ)


class AccessControl:
    """Admits requests by their headers, and counts them against the rate limits."""

    def __init__(self, settings: Settings, snapshot: Snapshot) -> None:
        self._anonymous = settings.anonymous
        self._snapshot = snapshot
        self._rate = RateLimit.parse(settings.rate)
        self._wrong_keys = RateLimit.parse(WRONG_KEYS)

    async def admit(self, scope: Mapping[str, Any], headers: Headers) -> Caller | None:
        """The caller, or None for an open path.

        Raises `KeyNeeded`, `NotAllowed`, `TooManyRequests`, and `StoreUnavailable` if keys cannot be checked.
        """
        text, is_cookie = find_key(headers)
        if scope["method"] not in SAFE and (is_cookie or not text):
            _refuse_other_sites(headers, is_cookie=is_cookie)
        path = scope["path"]
        if path in OPEN or path.startswith(OPEN_FOLDER):
            return None
        client = scope["client"][0] if scope.get("client") else ""
        if text:
            caller = await self.authenticate(text, client)
            self._count(scope, caller.id)
            return caller
        return self._admit_anonymous(scope, client, headers)

    async def authenticate(self, text: str, client: str) -> Caller:
        """The holder of a key. Raises `KeyNeeded` for a wrong key, `TooManyRequests` after too many wrong keys.

        A valid key is accepted after any number of wrong keys from its address, so that nobody can lock out others.
        """
        holder = self._find(text)
        if holder is None:
            if self._wrong_keys:
                self._wrong_keys.take(client_network(client))
            await self._snapshot.refresh_soon()
            holder = self._find(text)
        if holder is None:
            raise KeyNeeded("this key is not accepted", WRONG_KEY_HINT)
        self._snapshot.use(holder.id)
        return holder

    def _find(self, text: str) -> Caller | None:
        """The caller with this key. Compares in constant time, so as not to reveal how much of a wrong key is right."""
        stored = self._snapshot.key(keys.parse(text) or "")
        is_right = hmac.compare_digest(stored.secret_hash if stored else NO_HASH, keys.fingerprint(text))
        if stored is None or not is_right or stored.key.revoked_at:
            return None
        return Caller(stored.key.id, stored.key.scope)

    def _count(self, scope: Mapping[str, Any], name: str) -> None:
        """Count a request against the rate limit; the response says what is left."""
        if self._rate:
            try:
                self._rate.take(name)
            finally:
                scope["state"]["quota"] = self._rate.quota(name)

    def _admit_anonymous(self, scope: Mapping[str, Any], client: str, headers: Headers) -> Caller:
        if self._anonymous is Anonymous.EVERYBODY:
            self._count(scope, client_network(client))
            return ANONYMOUS
        if self._anonymous is Anonymous.LOOPBACK and is_local(client, headers, scope.get("http_version", "")):
            return ANONYMOUS
        raise KeyNeeded("this service requires a key", HINT)


def _refuse_other_sites(headers: Headers, *, is_cookie: bool) -> None:
    """Refuse forms that a page of another site sends on behalf of its reader.

    Every browser sends the origin of a form. A program may not, but it has no cookie.
    """
    if is_same_site(headers, default=not is_cookie):
        return
    hint = "send it from a page of this service, or with a key as `Authorization: Bearer kb_...`"
    raise NotAllowed("this was sent by a page of another site", hint)


async def sign_in(response: Response, request: Request, text: str) -> Caller:
    """Store a key in the browser that gets this response. Raises like `AccessControl.authenticate`."""
    caller = await application(request).access.authenticate(text.strip(), request.client.host if request.client else "")
    is_secure = request.url.scheme == "https"
    response.set_cookie(COOKIE, text.strip(), COOKIE_S, httponly=True, samesite="lax", secure=is_secure)
    return caller


def sign_out(response: Response) -> None:
    response.delete_cookie(COOKIE, httponly=True, samesite="lax")


async def reader(request: Request) -> Caller:
    """The caller that the middleware admitted."""
    caller: Caller | None = request.state.caller
    if caller is None:  # an open path whose route needs a caller
        raise KeyNeeded("this service requires a key", HINT)
    return caller


async def reporter(request: Request) -> Caller:
    return _require(Scope.REPORT, await reader(request))


async def admin(request: Request) -> Caller:
    return _require(Scope.ADMIN, await reader(request))


def _require(scope: Scope, caller: Caller) -> Caller:
    if caller.scope.covers(scope):
        return caller
    if caller is ANONYMOUS:
        raise KeyNeeded(f"this requires a key with the scope {scope}", HINT)
    hint = f"the operator of this service makes one with `kb key new NAME --scope {scope}`"
    raise NotAllowed(f"this requires the scope {scope}, but the key has {caller.scope}", hint)


Reader = Annotated[Caller, Depends(reader)]
Reporter = Annotated[Caller, Depends(reporter)]
Admin = Annotated[Caller, Depends(admin)]
