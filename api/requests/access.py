"""Who asks, and what they may do: a key in a header or in the cookie of the pages, or nobody.

Everything but what `OPEN` names needs the scope READ; the front sees to it before any route is looked for, so that a
route without a dependency of its own is closed as well. What needs more says so by `Reporter` or `Admin`.
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
from ..state.snapshot import Snapshot
from .headers import COOKIE, Headers, is_local, is_own_page, key_in
from .rate_limits import Limit, neighbourhood

COOKIE_S = 7 * 24 * 3600
OPEN = frozenset({"/healthz", "/readyz", "/openapi.json", "/sign-in", "/sign-out"})
OPEN_FOLDER = "/static/"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
GUESSES = "10/minute"  # wrong keys, per client
HINT = "send a key as `Authorization: Bearer kb_...`; whoever runs this service makes one with `kb key new`"
NO_HASH = keys.fingerprint("")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the id of a key, or `anonymous`."""

    id: str
    scope: Scope


ANONYMOUS = Caller("anonymous", Scope.READ)


class Gate:
    """Decides who asks, from the head of a request alone. One per application."""

    def __init__(self, settings: Settings, snapshot: Snapshot) -> None:
        self._anonymous = settings.anonymous
        self._snapshot = snapshot
        self._rate = Limit.parse(settings.rate)
        self._guesses = Limit.parse(GUESSES)

    async def admit(self, scope: Mapping[str, Any], headers: Headers) -> Caller | None:
        """The caller; None where nobody is asked who they are.

        Raises `KeyNeeded`, `NotAllowed`, `TooManyRequests`, and `StoreUnavailable` when no key can be checked.
        """
        text, is_cookie = key_in(headers)
        if scope["method"] not in SAFE and (is_cookie or not text):
            _demand_own_page(headers, is_cookie=is_cookie)
        path = scope["path"]
        if path in OPEN or path.startswith(OPEN_FOLDER):
            return None
        client = scope["client"][0] if scope.get("client") else ""
        if text:
            caller = await self.holder(text, client)
            self._count(caller.id)
            return caller
        return self._nobody(client, headers, scope.get("http_version", ""))

    async def holder(self, text: str, client: str) -> Caller:
        """Whose key it is. Raises `KeyNeeded` for one that is not accepted, `TooManyRequests` for one guess too many.

        A right key passes however many wrong ones came from the same address, so that nobody can lock others out.
        """
        found = self._find(text)
        if found is None:
            self._guess(client)
            await self._snapshot.look_again()
            found = self._find(text)
        if found is None:
            raise KeyNeeded("this key is not accepted", HINT)
        self._snapshot.use(found.id)
        return found

    def _find(self, text: str) -> Caller | None:
        """In a time that says nothing about how much of the key is right."""
        stored = self._snapshot.key(keys.parse(text) or "")
        is_right = hmac.compare_digest(stored.secret_hash if stored else NO_HASH, keys.fingerprint(text))
        if stored is None or not is_right or stored.key.revoked_at:
            return None
        return Caller(stored.key.id, stored.key.scope)

    def _guess(self, client: str) -> None:
        if self._guesses:
            self._guesses.take(neighbourhood(client))

    def _count(self, name: str) -> None:
        if self._rate:
            self._rate.take(name)

    def _nobody(self, client: str, headers: Headers, version: str) -> Caller:
        if self._anonymous is Anonymous.EVERYBODY:
            self._count(neighbourhood(client))
            return ANONYMOUS
        if self._anonymous is Anonymous.LOOPBACK and is_local(client, headers, version):
            return ANONYMOUS
        raise KeyNeeded("this service answers to keys only", HINT)


def _demand_own_page(headers: Headers, *, is_cookie: bool) -> None:
    """A page of another site may not send forms here in the name of who reads it.

    Every browser says where a form comes from; who says nothing is a program, and has no cookie.
    """
    if is_own_page(headers, otherwise=not is_cookie):
        return
    hint = "send it from a page of this service, or with a key as `Authorization: Bearer kb_...`"
    raise NotAllowed("this was sent by a page of another site", hint)


async def sign_in(response: Response, request: Request, text: str) -> Caller:
    """Let the browser that gets this response carry a key. Raises what `Gate.holder` does."""
    caller = await gate(request).holder(text.strip(), request.client.host if request.client else "")
    is_secure = request.url.scheme == "https"
    response.set_cookie(COOKIE, text.strip(), COOKIE_S, httponly=True, samesite="lax", secure=is_secure)
    return caller


def sign_out(response: Response) -> None:
    response.delete_cookie(COOKIE, httponly=True, samesite="lax")


def gate(request: Request) -> Gate:
    found: Gate = request.app.state.gate
    return found


async def reader(request: Request) -> Caller:
    """Who asks. The front has let them in."""
    caller: Caller | None = request.state.caller
    if caller is None:  # a route under an open path that still wants to know
        raise KeyNeeded("this service answers to keys only", HINT)
    return caller


async def reporter(request: Request) -> Caller:
    return _with(Scope.REPORT, await reader(request))


async def admin(request: Request) -> Caller:
    return _with(Scope.ADMIN, await reader(request))


def _with(scope: Scope, caller: Caller) -> Caller:
    if caller.scope.covers(scope):
        return caller
    if caller is ANONYMOUS:
        raise KeyNeeded(f"this needs a key with the scope {scope}", HINT)
    hint = f"whoever runs this service makes another by `kb key new NAME --scope {scope}`"
    raise NotAllowed(f"this needs the scope {scope}, and the key has {caller.scope}", hint)


Reader = Annotated[Caller, Depends(reader)]
Reporter = Annotated[Caller, Depends(reporter)]
Admin = Annotated[Caller, Depends(admin)]
