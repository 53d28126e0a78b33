"""Every call is in the access tables; test_rights.py has the frames."""

from __future__ import annotations

from qmq.proto.v1 import access_pb2, control_pb2, delay_pb2, meta_pb2
from qmq.rpc.guard import RPC_RULES


def test_every_rpc_has_its_operations() -> None:
    files = (access_pb2, control_pb2, delay_pb2, meta_pb2)
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    methods = {
        f"/{service.full_name}/{method.name}" for service in services for method in service.methods
    }
    assert methods <= set(RPC_RULES)
    by_service = {
        service.full_name: {method.name for method in service.methods} for service in services
    }
    controls = by_service["qmq.v1.BrokerControl"] | by_service["qmq.v1.DelayControl"]
    known = {each.rpartition("/")[2] for each in RPC_RULES if "Control/" in each}
    assert known == controls, "the table has methods that are gone"
    assert {each for each in RPC_RULES if "Control/" not in each} <= methods, (
        "the table has methods that are gone"
    )
