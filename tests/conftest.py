"""Settings that every test shares: Hypothesis runs without deadlines, since machines differ in speed.

A common run draws the same examples each time, so that a red run is about the change it runs on. The long runs draw
new ones by their seed (`--hypothesis-profile=drawn --hypothesis-seed=N`, as tools/run_long.py asks).
"""

from hypothesis import settings

settings.register_profile("drawn", deadline=None, print_blob=True)
settings.register_profile("kvferry", settings.get_profile("drawn"), derandomize=True)
settings.load_profile("kvferry")
