"""Planted bugs: each brings one mistake into the product's own classes, and the simulator must find it.

They are subclasses that replace one method of the replication core, of the coordinator, or of what carries a Ready out; the product itself
has no switches. A bug that the simulator does not find is a hole in the simulator. `BUGS` has them by name.
"""

from sim.bugs import committing, epochs, matching, store, storing, strangers
from sim.bugs.planting import BUGS

__all__ = ["BUGS", "committing", "epochs", "matching", "store", "storing", "strangers"]
