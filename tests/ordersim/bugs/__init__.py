"""Planted bugs: each brings one mistake into the product's own classes for the time of a run, and the simulator must find it.

The product itself has no switches. A bug that the simulator does not find is a hole in the simulator. `BUGS` has them by name.
"""

from ordersim.bugs import changing, fencing, reading, settling, writing
from ordersim.bugs.planting import BUGS

__all__ = ["BUGS", "changing", "fencing", "reading", "settling", "writing"]
