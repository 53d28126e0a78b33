"""How due messages get to the real-time brokers: never lost, never twice, and in order where the subject is ordered.

Outlets   (outlets.py)    all of them: takes due messages, by subject
Outlet    (outlet.py)     one subject's: finds out how it is ordered; what cannot leave waits here
Way       (spread.py)     of an unordered subject: to any of its broker groups
          (routed.py)     of an ordered subject: by the route, each key in order
Channel   (channel.py)    the batches that go to one broker group or partition, in order; decides what an answer means. Pure
Courier   (courier.py)    carries a channel out: connection, timers
Tray      (tray.py)       what waits to be planned; makes batches of it. Pure
"""

from __future__ import annotations

from qmq.delay.outlets.outlets import Outlets

__all__ = ["Outlets"]
