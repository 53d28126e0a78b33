"""Chooses and claims a cluster's network. A cluster that has data keeps its network: etcd's members
remember addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cluster_runner.errors import ClusterError
from cluster_runner.netns import NetworkNamespaces
from cluster_runner.network import Loopback, Network
from cluster_runner.state import State, StateFolder

NETWORKS: Final[dict[str, type[Loopback] | type[NetworkNamespaces]]] = {
    "loopback": Loopback,
    "netns": NetworkNamespaces,
}
DEFAULT: Final = "loopback"


def check_name(name: str) -> str:
    """The name, if there is such a network; empty stands for the one that a cluster has already."""
    if name and name not in NETWORKS:
        raise ClusterError(f"the networks are {' and '.join(NETWORKS)}, not {name!r}")
    return name


def network_of(state: State, folder: StateFolder) -> Network:
    """The network that a cluster was brought up with."""
    if state.slot < 0:
        raise ClusterError("the cluster was never up: addresses are given then")
    return NETWORKS[state.network](folder.path, state.order, state.slot)


def claim(wanted: str, state: State, folder: StateFolder, services: Sequence[str]) -> None:
    """Claim the wanted network, or the cluster's present one, and record it in the state."""
    name = wanted or state.network or DEFAULT
    if state.network not in ("", name):
        if state.is_claimed or folder.has_data:
            raise ClusterError(
                f"this cluster's data is of the network {state.network}: `down --volumes` "
                "forgets both"
            )
        state.slot = -1
    state.order += [each for each in services if each not in state.order]
    network = NETWORKS[name](folder.path, state.order, state.slot)
    if not state.is_claimed or not network.is_there():
        network.claim()
        state.network, state.slot, state.is_claimed = name, network.slot, True
