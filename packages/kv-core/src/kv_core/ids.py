"""The vocabulary of integers and names that every other module speaks.

A block id cannot be passed where an ordinal is meant: each is a type of its own.
"""

from typing import NewType

LayerId = NewType("LayerId", int)
"""Global attention layer number, counted over the whole model from 0."""

HeadId = NewType("HeadId", int)
"""Global KV head number, counted over the whole model from 0."""

BlockId = NewType("BlockId", int)
"""Which block of a pool."""

BlockOrdinal = NewType("BlockOrdinal", int)
"""Position of a block in its request, counted from 0."""

Rank = NewType("Rank", int)
"""Number of a process inside its instance: `stage * tp + tensor_rank`."""

RequestId = NewType("RequestId", str)
"""The engine's own name for a request; never shared between engines."""

InstanceId = NewType("InstanceId", str)
"""Configured name of one model replica; survives a restart."""

Incarnation = NewType("Incarnation", str)
"""Random name of one run of an instance; a restart makes a new one."""

TransferId = NewType("TransferId", str)
"""Random 128-bit name of an offer, as 32 lower-case hex digits; issued by the owner of the blocks."""

SessionId = NewType("SessionId", str)
"""Random 128-bit name of one (receiver rank, sender rank) exchange, as 32 lower-case hex digits."""
