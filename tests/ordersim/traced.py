"""Simulations for traces: a run ends with its trace. In a run with a planted bug the simulator's own checks are off, so that it continues,
and only the specification judges its trace.
"""

from __future__ import annotations

from typing import Any, Final

from qmq_ordering.routes import Route

from ordersim.checks import Checks
from ordersim.ledger import Ledger
from ordersim.routes import Routes
from ordersim.run import ROUND_MS, Simulation
from qmq.log.envelopes import Entry

STEP_MS: Final = 500
CALM_MS: Final = 30_000


class TracedSimulation(Simulation):
    """One round of faults, and a calm time."""

    def _rounds(self) -> None:
        self._begin_round()
        self._run(ROUND_MS)
        self._heal()
        self._run(CALM_MS)

    def _run(self, ms: int) -> None:
        until = self.world.now + ms
        while not self.tracer.end and self.world.now < until:
            self.world.run(self.world.now + STEP_MS)


class _NoLedger(Ledger):
    def _apply(self, _: Any, entry: Entry) -> None:
        self._simulation.tracer.entry(entry)


class _NoRoutes(Routes):
    """It knows the routes, from which the nemesis chooses."""

    def _put(self, key: str, value: bytes, _: Any) -> None:
        what = key.partition("/")[0]
        if what == "v":
            route = Route.decode(value)
            self.routes[route.version] = route
        elif what == "latest":
            self.latest = int(value)

    def _fenced(self, *_: Any) -> None:
        pass


class _NoChecks(Checks):
    def acknowledged(self, *_: Any) -> None:
        pass

    def handed(self, *_: Any) -> None:
        pass


class UncheckedSimulation(TracedSimulation):
    """See the module."""

    checks_class = _NoChecks
    ledger_class = _NoLedger
    routes_class = _NoRoutes
