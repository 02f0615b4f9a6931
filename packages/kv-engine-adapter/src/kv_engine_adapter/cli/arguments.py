"""Values of command lines that are checked as they are read: a wrong one is an error of usage, exit status 2."""

import argparse


def count(text: str) -> int:
    """A whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {number}")
    return number


def even_count(text: str) -> int:
    """A whole multiple of 2 from 2 on."""
    number = count(text)
    if number % 2:
        raise argparse.ArgumentTypeError(f"expected a multiple of 2, got {number}")
    return number


def two_names(text: str) -> tuple[str, str]:
    """Two words with a comma between them."""
    first, comma, second = (word.strip() for word in text.partition(","))
    if not (first and comma and second) or "," in second:
        raise argparse.ArgumentTypeError(f"expected two, separated by a comma, got {text!r}")
    return first, second
