"""The API of Apache RocketMQ 5, generated from *.proto: what the gateway serves. The proto package
is RocketMQ's own, so a process that imports it cannot import RocketMQ's Python client as well."""
