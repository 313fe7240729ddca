"""`/sign-in` and `/sign-out`: a key in the cookie of a browser."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Form, Request
from fastapi.responses import RedirectResponse, Response

from kb.errors import KeyNeeded

from ..requests.access import sign_in, sign_out
from .page import address, chosen_language, page

router = APIRouter()


@router.get("/sign-in")
async def sign_in_form(request: Request, to: str = "/") -> Response:
    return page(request, "sign_in.html", to=_local(to), problem=None)


@router.post("/sign-in")
async def sign_in_page(
    request: Request, key: Annotated[str, Form()] = "", to: Annotated[str, Form()] = "/"
) -> Response:
    response = RedirectResponse(_local(to), 303)
    try:
        await sign_in(response, request, key)
    except KeyNeeded as problem:
        return page(request, "sign_in.html", 401, to=_local(to), problem=problem)
    return response


@router.post("/sign-out")
async def sign_out_page(request: Request) -> Response:
    response = RedirectResponse(address("/sign-in", lang=chosen_language(request)), 303)
    sign_out(response)
    return response


def _local(to: str) -> str:
    """`to` if it is a path of this service, otherwise `/`, so that it cannot redirect to another site."""
    is_local = to.startswith("/") and not to.startswith(("//", "/\\")) and to.isprintable()
    return to if is_local else "/"
