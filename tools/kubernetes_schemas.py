"""Write JSON schemas as kubeconform reads them: Kubernetes' own from kubernetes-validate, and those
of resources that others define.

    python tools/kubernetes_schemas.py TARGET KUBERNETES CRD...

KUBERNETES is a folder of kubernetes-validate: its schemas refer to each other at kubernetes.io, and
these here to the file beside them. A CRD is a file of a CustomResourceDefinition: the schema is in
it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

REMOTE = '"/api/_definitions.json#'


def main(target: Path, kubernetes: Path, definitions: list[Path]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in kubernetes.glob("*.json"):
        found = json.loads(path.read_text().replace(REMOTE, '"_definitions.json#'))
        found.pop("$id", None)
        (target / path.name).write_text(json.dumps(found))
    for path in definitions:
        spec = yaml.safe_load(path.read_text())["spec"]
        for version in spec["versions"]:
            kind, group = spec["names"]["kind"], spec["group"].partition(".")[0]
            name = f"{kind}-{group}-{version['name']}.json".lower()
            (target / name).write_text(json.dumps(strict(version["schema"]["openAPIV3Schema"])))


def strict(schema: Any) -> Any:
    """Refuse fields that are not named, as the API server does with strict validation."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: strict(value) for name, value in schema.items()}
    takes_any = "additionalProperties" in schema or schema.get(
        "x-kubernetes-preserve-unknown-fields"
    )
    if (
        isinstance(schema.get("properties"), dict)
        and schema.get("type") == "object"
        and not takes_any
    ):
        found["additionalProperties"] = False
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [Path(each) for each in sys.argv[3:]])
