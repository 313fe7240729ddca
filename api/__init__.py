"""The HTTP shell: REST, MCP and pages over one search index and one database. No request runs a probe or names a file.

`kb serve` starts it. By itself: `uvicorn --factory kb.api.app:create_app`, with `KB_ROOTS` for private roots.
"""
