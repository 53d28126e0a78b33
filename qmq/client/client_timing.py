"""How long the client waits for metaservers, where that depends on others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class MetadataTiming:
    """Handed in, so that a test need not wait as long as an operator may."""

    slow_call_s: float = 60.0
    """Handing over a mastership, letting a replica catch up before it counts, or waiting for a lost broker group's lease to end."""
    publish_look_s: float = 0.2
    """How often it is asked whether a change that goes on by itself is published."""


TIMING: Final = MetadataTiming()
