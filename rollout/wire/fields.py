"""What the fields of messages are made of: exact types, finite numbers, bounded text and bytes.

The modules of messages and `weight_handles` build their bodies from these. Invariant: a body holds no field that it does not name.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Unsigned64 = Annotated[int, Field(ge=0, lt=2**64)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Name = Annotated[str, Field(max_length=256)]
Text = Annotated[str, Field(max_length=4096)]
Token16 = Annotated[bytes, Field(min_length=16, max_length=16)]
Scalar = bool | int | float | str | None
MAX_LIST = 100_000


class Message(BaseModel):
    """Base of all bodies: exact types, finite numbers, no unknown field."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
