"""Starts pods as local processes: from the words of a container to those of this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from cluster_runner.translate import NOT_INHERITED, program

from kubelet.manifests import PodTemplate
from kubelet.process_pod import ProcessPod


class LocalPods:
    """`hosts` are the names that pods know, such as etcd's, each with its address. The volume of a pod is a folder of its name, a Secret is
    the folder `secrets/NAME`.
    """

    def __init__(self, folder: Path, hosts: Mapping[str, str]) -> None:
        self._folder, self._hosts = folder, dict(hosts)

    def start(self, name: str, node: str, address: str, template: PodTemplate) -> ProcessPod:
        volume = self._folder / "volumes" / name
        volume.mkdir(parents=True, exist_ok=True)
        environment = {key: value for key, value in os.environ.items() if not NOT_INHERITED.search(key)}
        for variable, value in template.variables(name).items():
            environment[variable] = self._here(self._in_secret(value, template), address, volume)
        command, *words = template.command
        argv = [program(command), *[self._here(each, address, volume) for each in words]]
        before = [program(template.pre_stop[0]), *template.pre_stop[1:]] if template.pre_stop else []
        return ProcessPod(name, node, address, template, argv, before, environment, self._folder / f"{name}.log")

    def _in_secret(self, text: str, template: PodTemplate) -> str:
        for path, secret in template.secrets.items():
            if text.startswith(f"{path}/"):
                return str(self._folder / "secrets" / secret / text.removeprefix(f"{path}/"))
        return text

    def _here(self, text: str, address: str, volume: Path) -> str:
        if text in ("0.0.0.0", "/data"):
            return address if text == "0.0.0.0" else str(volume)
        for name, place in self._hosts.items():
            text = text.replace(name, place)
        return text
