"""The HTTP shell: REST, MCP and pages over one search index and one database. No request runs a probe or names a file.

`kb serve` starts it. Under another ASGI server: `uvicorn --factory kb.api.app:create_app`, with `KB_ROOTS` for private
content roots.

    app, settings   put the parts together
    requests/       what every request passes: middleware (request id, limits, log), access, upload, problems; and what
                    routes share: questions, accept, representation, paging
    state/          what requests share: application (all of it, typed), content, scanning, rollout, snapshot,
                    response_cache, gap_queue, metrics
    routes/         REST, one module for each address; /mcp
    schemas/        documents and /openapi.json
    mcp/            the MCP server and its tools, over stdio and HTTP
    pages/          for browsers
"""
