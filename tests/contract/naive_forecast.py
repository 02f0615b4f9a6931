"""Forecasts as formulas of the specification, for the models (core spec 10.2, 10.3).

In:  lengths, a window, blocks that are listed or live.
Out: blocks that the seed says are needed, and that we say are.
Law: one formula a function, as the specification writes it; nothing of kv_core is used but the rounding.
"""

from kv_core.spans import ceil_div


def seed_remaining(
    prompt: int, new: int, window: int, temporary: int, length: int, listed: int, beams: int, size: int
) -> int:
    """What the seed says: capped at the window, detached blocks counted as there (D26)."""
    total_tokens = prompt + new
    context = min(prompt, window + temporary) // size
    total = ceil_div(min(total_tokens, window + temporary), size)
    slides = total_tokens > window and ceil_div(total_tokens, size) > ceil_div(length, size)
    extra = int(slides and ceil_div(total_tokens, size) > total)
    if listed < context:
        return context - listed + (total - context + extra) * beams
    return (total - listed + extra) * beams


def our_remaining(
    prompt: int, new: int, window: int, temporary: int, length: int, live: int, beams: int, size: int
) -> int:
    """What is really allocated: the whole prompt at once, then as many live blocks as the window holds."""
    total_tokens = prompt + new
    total = ceil_div(min(total_tokens, window + temporary), size)
    slides = total_tokens > window and ceil_div(total_tokens, size) > ceil_div(length, size)
    width = total + int(slides and ceil_div(total_tokens, size) > total)
    if live:
        return max(0, width - live) * beams
    shared = prompt // size
    return shared + (max(width, ceil_div(prompt, size)) - shared) * beams
