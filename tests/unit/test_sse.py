"""Server-sent events as text."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from webapp.rendering import sse


@given(text=st.text(), number=st.integers(0, 2**53))
@example(text=sse.HOLE, number=0)
@example(text='"\\\n\u2028\x00é😀', number=1)
def test_a_filled_form_is_what_the_message_would_be(text: str, number: int) -> None:
    """Whatever the text: the same bytes, in ASCII, in two lines."""
    asked = {"type": "a", "number": number, "nested": [{"delta": text, "none": None}]}
    form = sse.Form(sse.event("a", {"type": "a", "number": sse.HOLE, "nested": [{"delta": sse.HOLE, "none": None}]}))
    filled = form.filled(number, text)
    assert filled == sse.event("a", asked)
    assert filled.isascii()
    assert filled.count("\n") == 3
