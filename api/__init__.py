"""The HTTP shell: search, entries and reports as JSON. It reads; no request runs a probe or names a file.

`kb serve` starts it. By itself: `uvicorn --factory kb.api.app:create_app`, with `KB_ROOTS` for private roots.
"""
