"""What two arms measured in turns A B B A, told: a table, and the line that is kept.

In:  of each pair of turns, what either arm measured, by name.
Out: medians, and of the pairs' ratios the median and the spread (half of the range between their quartiles); the last
     line is one JSON object, appended to a file of results. A ratio above 1 is better for ours.
"""

import json
import random
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles

Figures = dict[str, float]
"""What one turn measured, by what."""


def prompt(dice: random.Random, num_tokens: int) -> list[int]:
    """Tokens that the tiny model has, special ones left out."""
    return [dice.randrange(16, 500) for _ in range(num_tokens)]


def tell(
    claim: str,
    pairs: Sequence[Mapping[str, Figures]],
    arms: tuple[str, str],
    better: Callable[[str, float, float], float],
    results: Path,
    **more: object,
) -> None:
    """`arms`: ours, and theirs. `better`: of what, ours and theirs, how much better ours is."""
    ours, theirs = ({what: median(pair[name][what] for pair in pairs) for what in pairs[0][name]} for name in arms)
    ratios, spreads = Figures(), Figures()
    for what in ours:
        of_pairs = [better(what, *(pair[name][what] for name in arms)) for pair in pairs]
        low, _, high = quantiles(of_pairs, n=4)
        ratios[what], spreads[what] = round(median(of_pairs), 3), round((high - low) / 2, 3)
        print(f"{what:24} ours {ours[what]:8.4f}  theirs {theirs[what]:8.4f}  ratio {ratios[what]} +- {spreads[what]}")
    worst = min(ratios, key=ratios.__getitem__)
    words = ["git", "rev-parse", "--short", "HEAD"]
    line = {
        "claim": claim,
        "ours": ours,
        "theirs": theirs,
        "ratio": ratios[worst],
        "spread": spreads[worst],
        "ratios": ratios,
        "spreads": spreads,
        "pairs": len(pairs),
        **more,
        "commit": subprocess.run(words, capture_output=True, text=True).stdout.strip(),
    }
    with results.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line))
