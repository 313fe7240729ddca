"""The HTTP shell: REST, MCP and pages over one search index and database. No request can run a probe or name a file.

`kb serve` starts it. For another ASGI server: `uvicorn --factory kb.api.app:create_app`, with private content roots in
`KB_ROOTS`.

    app, settings   put the parts together
    requests/       for every request: middleware (request id, limits, log), access, upload, problems; and shared by
    routes: questions, accept, representation, paging
    state/          shared by requests: application (all of it, typed), content, scanning, rollout, snapshot,
                    response_cache, gap_queue, metrics
    routes/         REST, one module for each address; /mcp
    schemas/        documents and /openapi.json
    mcp/            the MCP server and its tools, over stdio and HTTP
    pages/          for browsers
"""
