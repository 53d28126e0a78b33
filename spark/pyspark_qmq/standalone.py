"""Runs a master or a worker of a Spark standalone cluster in the foreground. PySpark's package has
their classes, but no start-master.sh.

    python -m pyspark_qmq.standalone master --host HOST --port 7077 --webui-port 8080 python -m
    pyspark_qmq.standalone worker --host HOST --webui-port 8081 --cores 2 --memory 2g
    spark://HOST:7077 python -m pyspark_qmq.standalone health HOST:WEBUI-PORT

Options are Spark's own. The process listens only on its `--host`, finds Java like a session
(session.py), and runs Python tasks with this interpreter. The master accepts programs from drivers
only; its REST port, which has no authentication, is off. `health` exits with 0 if a master leads,
or if a worker is registered with its master.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Final

from pyspark_qmq.java import cache_folder, java_home
from pyspark_qmq.session import home_without_archive
from qmq.errors import QmqError

CLASSES: Final = {
    "master": "org.apache.spark.deploy.master.Master",
    "worker": "org.apache.spark.deploy.worker.Worker",
}
OPTIONS: Final = {"SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false"}
"""Default settings of the JVMs, unless the environment has others."""
HEALTH_S: Final = 3.0
FAILED: Final = 2


def command(
    role: str, options: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The command and environment of a `master` or a `worker`. Raises InvalidArgument if there is
    no Java or no cache folder.
    """
    cache = cache_folder(environment)
    found = {
        **OPTIONS,
        **environment,
        "JAVA_HOME": str(java_home(environment, cache)),
        "SPARK_HOME": environment.get("SPARK_HOME") or str(home_without_archive(cache)),
        "PYSPARK_PYTHON": environment.get("PYSPARK_PYTHON") or sys.executable,
    }
    host = _value(options, "--host")
    if host and not environment.get("SPARK_LOCAL_IP"):
        found["SPARK_LOCAL_IP"] = host
    return [f"{found['SPARK_HOME']}/bin/spark-class", CLASSES[role], *options], found


def unhealthy(told: Mapping[str, object]) -> str:
    """Why a master or a worker is unhealthy, from its answer at /json/; empty if it is healthy."""
    if "status" in told:
        return "" if told["status"] == "ALIVE" else f"the master is {told['status']}"
    return "" if told.get("masterwebuiurl") else "no master knows the worker yet"


def main(argv: Sequence[str]) -> int:
    """Replace this process by the master or worker.
    Returns only for `health` and after an error.
    """
    role, options = (argv[0], argv[1:]) if argv else ("", ())
    if role == "health" and len(options) == 1:
        return _health(options[0])
    if role not in CLASSES:
        sys.stderr.write(f"{__doc__}\n")
        return FAILED
    try:
        words, environment = command(role, options, os.environ)
    except QmqError as failure:
        sys.stderr.write(f"error: {failure}\n")
        return FAILED
    os.execve(words[0], words, environment)  # noqa: S606 - no shell is wanted


def _health(address: str) -> int:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"http://{address}/json/", timeout=HEALTH_S) as answer:
            failure = unhealthy(json.load(answer))
    except (OSError, ValueError) as cause:
        failure = str(cause)
    if failure:
        sys.stderr.write(f"error: {failure}\n")
    return 1 if failure else 0


def _value(options: Sequence[str], name: str) -> str:
    return options[options.index(name) + 1] if name in options[:-1] else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
