"""The consumer of the alerts: prints each message that its group did not get yet."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import qmq
from qmq.errors import UnknownGroup

ALERTS: Final = "flights.alerts"
ALERT_MIN: Final = 600
"""How late a flight is that gets an alert."""
GROUP: Final = "desk"


async def print_alerts(mq: qmq.Client, tell: Callable[[str], object]) -> int:
    """Print the alerts that are stored and not done. Returns how many."""
    count = sum((await mq.queue_ends(ALERTS)).values()) - await _done(mq)
    left = count
    if left > 0:
        async for message in mq.consumer(ALERTS, group=GROUP, ack="explicit"):
            alert = json.loads(message.body)
            hours, minutes = divmod(alert["delay_min"], 60)
            tell(
                f"{alert['day']} {alert['carrier']}{alert['flight']} {alert['origin']}-"
                f"{alert['destination']} left {hours} h {minutes:02} min late"
            )
            await message.ack_sync()
            left -= 1
            if not left:
                break
    return count


async def _done(mq: qmq.Client) -> int:
    with suppress(UnknownGroup):
        groups = await mq.metadata.describe_groups(ALERTS, GROUP)
        return sum(each.settled_before for each in groups)
    return 0
