"""The HTTP shell: REST, MCP and pages over one search index and one database. No request runs a probe or names a file.

`kb serve` starts it. By itself: `uvicorn --factory kb.api.app:create_app`, with `KB_ROOTS` for private roots.

    every request   connection, front, head, access, limits, problems, metrics; app puts all together
    between them    settings, content, scanning (threads for logs), rollout (new content), snapshot (of the database),
                    answers (the last ones), unanswered (on their way to the gaps), background
    REST            search and questions, context, diagnose, entries, reports and intake, feedback, gaps, admin, health;
                    they share accept, representation, paging; schemas, *_schemas and description are their OpenAPI
    MCP             mcp and consent (the SDK), mcp_route (HTTP), tools, arguments, environment, triage, machine, plain
    pages/          for people
"""
