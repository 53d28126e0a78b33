"""Planted bugs: each one puts a mistake into the product's classes during a run, and the simulator must find it.

The product itself has no switches for this. A bug that the simulator does not find shows a gap in the simulator. `BUGS` has them by name.
"""

from ordersim.bugs import metadata, traffic
from ordersim.bugs.planting import BUGS

__all__ = ["BUGS", "metadata", "traffic"]
