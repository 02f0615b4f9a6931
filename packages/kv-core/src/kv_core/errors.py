"""Errors, and whose fault each one is.

    FerryError
    +-- CallerError      the caller broke a promise (also a ValueError)
    +-- CapacityError    the request can never fit, however long one waits
    +-- PeerError        the other side broke a promise or is gone

Law: an error carries values and names both sides (`ours=..., theirs=...`); it is raised once, where it is known.
     An ordinary "not now" is no error: it is a return value.
"""


class FerryError(Exception):
    """Root of all errors that kvferry raises on purpose."""


class CallerError(FerryError, ValueError):
    """The caller broke a promise; the object is as it was before the call."""


class CapacityError(FerryError):
    """What is asked for exceeds the whole capacity."""


class PeerError(FerryError):
    """The other side broke a promise or is gone."""
