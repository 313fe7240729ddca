"""The tool that verifies a fix on this machine, with the consent of the person at the client."""

from __future__ import annotations

from typing import Annotated, Any

from mcp.server.mcpserver import AcceptedElicitation, Context, Elicit, ElicitationResult, Resolve
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

from kb.errors import KbError

from .answers import Document
from .arguments import EntryId
from .tools import Tools
from .verification import verification_answer

Settings = Annotated[
    dict[str, str] | None, Field(description="Parameters of the probe, as `kb verify --set KEY=VALUE` takes them.")
]


class Consent(BaseModel):
    """The form that the client shows."""

    run: bool = Field(title="Run it", description="Run the probe on this machine now.")


async def _consent(ctx: Context[Tools, Any], id: str, settings: dict[str, str] | None) -> Elicit[Consent]:  # noqa: A002
    """The question to the person. Raises `ToolError` for a client that cannot ask, and for an unknown entry."""
    elicitation = ctx.client_capabilities and ctx.client_capabilities.elicitation
    if not elicitation or (elicitation.form is None and elicitation.url is not None):
        raise ToolError(f"this client cannot ask for consent; hint: run `kb verify {id}` in a terminal")
    tools = ctx.request_context.lifespan_context
    try:
        title = (await tools.content()).catalog.get(id).meta.title
    except KbError as error:
        raise ToolError(tools.error_text(error)) from None
    values = "".join(f", {name}={value!r}" for name, value in (settings or {}).items())
    return Elicit(
        f"Run the probe of {id} ({title}{values}) on this machine? It starts processes that fail as the incident does, "
        "ends them after a deadline, and cleans up. The model gets the report, which names versions and GPUs.",
        Consent,
    )


async def verify_fix(
    ctx: Context[Tools, Any],
    id: EntryId,  # noqa: A002
    consent: Annotated[ElicitationResult[Consent], Resolve(_consent)],
    settings: Settings = None,
) -> Document:
    """Verify an incident and its fix on this machine: the job must fail without the fix, and complete with it.

    The person is asked for consent each time. It takes seconds to minutes. `verdict` is the result and
    `fidelity` on what: a verdict of fidelity cpu says nothing about NCCL. Stacks and logs are in `whole_report`.
    """
    if not isinstance(consent, AcceptedElicitation) or not consent.data.run:
        raise ToolError("the person did not consent, so nothing was run; do not ask again unless they want it")
    tools = ctx.request_context.lifespan_context
    content, machine = await tools.content(), tools.machine
    assert machine is not None
    report = await tools.on_machine(lambda: machine.verify(content.catalog, id, settings or {}))
    return verification_answer(report)
