"""RocketMQ's end-to-end suites for its clients for Java and Go."""

from __future__ import annotations

import shutil
import sys
from typing import Final

from judges.outcomes import Outcomes, of_go, of_junit
from judges.suite import FOLDER, Stage, Suite, Unusable

OURS: Final = FOLDER / "rocketmq_e2e"
LOMBOK_NEEDS: Final = (
    *("code", "comp", "file", "jvm", "main"),
    *("model", "parser", "processing", "tree", "util"),
)
"""Packages of the compiler that Lombok opens; JDK 17 closes them."""


def run(stage: Stage) -> Outcomes:
    admin = stage.source / "rocketmq-admintools" / "bin" / "mqadmin"
    admin.parent.mkdir(parents=True)
    shutil.copy(OURS / "mqadmin", admin)
    environment = {
        "QMQ_MQADMIN": str(admin),
        "QMQ_PYTHON": sys.executable,
        "QMQ_SERVER": stage.node,
        "GRPC_ENDPOINT": stage.gateway,
        "NAMESERVER": stage.gateway,
    }
    go = run_go(stage, environment)
    java = run_java(stage, environment)
    return {f"go.{name}": outcome for name, outcome in go.items()} | java


def run_go(stage: Stage, environment: dict[str, str]) -> Outcomes:
    said = stage.run(
        *("go", "-C", "golang", "test", "-json", "-p", "1", "-timeout", "10m", "./mqgotest/..."),
        **environment,
    )
    return of_go(said.splitlines())


def run_java(stage: Stage, environment: dict[str, str]) -> Outcomes:
    """Maven needs no `clean`: the suite is a copy."""
    java = stage.source / "java"
    shutil.copy(OURS / "MQAdmin.java", java / "e2e/src/main/java/org/apache/rocketmq/util")
    for pom in (java / "pom.xml", java / "e2e" / "pom.xml"):
        pom.write_text(pom.read_text().replace(" -XX:MaxPermSize=256m", ""))
    package = "--add-opens=jdk.compiler/com.sun.tools.javac"
    opens = " ".join(f"{package}.{each}=ALL-UNNAMED" for each in LOMBOK_NEEDS)
    said = stage.run(
        *("mvn", "-B", "-f", "java/pom.xml", "-pl", "e2e", "-am", "test"),
        *("-Dmaven.test.failure.ignore=true", "-Dstyle.color=never"),
        *(f"-DendPoint={stage.gateway}", f"-DnamesrvAddr={stage.gateway}"),
        **environment,
        MAVEN_OPTS=opens,
    )
    reports = sorted((java / "e2e/target/surefire-reports").glob("TEST-*.xml"))
    if not reports:
        raise Unusable(f"Maven ended without a report:\n{said[-4000:]}")
    return of_junit(*(each.read_text() for each in reports))


SUITE: Final = Suite(
    name="rocketmq-e2e",
    project="apache/rocketmq-e2e",
    run=run,
    about="`java/e2e` (client 5.0.3) and `golang`",
    changes=(
        "`MQAdmin.java` and the program `mqadmin` create topics by `qmq subject create` "
        "(`tests/judges/rocketmq_e2e`); for JDK 17, the two poms lose `-XX:MaxPermSize`"
    ),
    programs=("go", "javac", "mvn"),
    gateway={"QMQ_CREATE_TOPICS": "0", "QMQ_GATEWAY_TLS": "optional"},
)
