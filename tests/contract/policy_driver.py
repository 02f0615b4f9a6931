"""Operations of the cases on an eviction order alone."""

from typing import Any

from contract.case import UnknownKind


class PolicyDriver:
    """Blocks of two levels, all free at first."""

    goes_on = True

    def __init__(self, config: dict[str, Any]) -> None:
        raise UnknownKind("target 'eviction_policy': not yet")
