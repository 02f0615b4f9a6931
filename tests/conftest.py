"""Settings that every test shares: Hypothesis runs without deadlines, since machines differ in speed."""

from hypothesis import settings

settings.register_profile("kvferry", deadline=None, print_blob=True)
settings.load_profile("kvferry")
