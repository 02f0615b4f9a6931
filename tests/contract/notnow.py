"""The answer "not now", where the cases speak of an error."""


class NotNow(Exception):
    """There is no room: what the cases call an error and we return as an answer."""
