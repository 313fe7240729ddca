"""Strategies for Hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

PLAIN_DATA: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=4),
    max_leaves=20,
)
