"""Hypothesis strategies for plans; they draw what `layouts` draws, and shrink."""

from hypothesis import strategies as st

from kv_core.spans import Span
from kv_testing.layouts import MAX_HEADS, MAX_LAYERS, Pair, draw_pair, draw_parallel
from kv_transfer.plan.cache_state import ParallelLayout


@st.composite
def layout_pairs(draw: st.DrawFn) -> Pair:
    """Two instances that hold one model in two shapes, and tokens to move."""
    return draw_pair(lambda low, high: draw(st.integers(low, high)))


@st.composite
def parallel_pairs(draw: st.DrawFn) -> tuple[ParallelLayout, ParallelLayout]:
    """Two cuts of one model."""
    num_layers, num_heads = draw(st.integers(1, MAX_LAYERS)), draw(st.integers(1, MAX_HEADS))
    first, second = (draw_parallel(lambda low, high: draw(st.integers(low, high)), num_layers, num_heads) for _ in "12")
    return first, second


@st.composite
def spans(draw: st.DrawFn, low: int = 0, high: int = 60) -> Span:
    """A span between two bounds, possibly empty."""
    start = draw(st.integers(low, high))
    return Span(start, draw(st.integers(start, high)))
