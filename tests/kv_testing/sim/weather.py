"""What may go wrong in a schedule, and how often.

In:  dice.
Out: Weather: chances, and how bad it is.
"""

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Weather:
    """How often (0 to 1) and how badly (seconds) things go wrong; all of it ends at `calm_at`."""

    calm_at: float
    drop: float = 0.0
    double: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.0
    corrupt: float = 0.0
    write_late: float = 0.0
    write_late_s: float = 0.0
    write_fail: float = 0.0
    write_corrupt: float = 0.0
    hold: float = 0.0
    copy_s: float = 0.002


def draw_weather(dice: Random) -> Weather:
    """A few things that go wrong, not all at once: what hides one fault is often another."""

    def perhaps(chance: float) -> float:
        return chance * dice.random() if dice.random() < 0.35 else 0.0

    return Weather(
        calm_at=6.0,
        drop=perhaps(0.4),
        double=perhaps(0.5),
        delay=perhaps(0.5),
        delay_s=dice.choice((0.05, 0.5, 3.0)),
        corrupt=perhaps(0.2),
        write_late=perhaps(0.6),
        write_late_s=dice.choice((0.5, 3.0, 6.0)),
        write_fail=perhaps(0.2),
        write_corrupt=perhaps(0.2),
        hold=0.97 if dice.random() < 0.1 else 0.0,
        copy_s=dice.choice((0.002, 0.002, 0.2)),
    )
