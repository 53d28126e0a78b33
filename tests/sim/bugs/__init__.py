"""Planted bugs: each one puts a mistake into the product's classes, and the simulator must find it.

They are subclasses that replace one method of the replication core, of the coordinator, or of the code that carries out a Ready. The
product itself has no switches for this. A bug that the simulator does not find shows a gap in the simulator. `BUGS` has them by name.
"""

from sim.bugs import replicas, storing
from sim.bugs.planting import BUGS

__all__ = ["BUGS", "replicas", "storing"]
