"""Descriptions of subscribers and publishers for AsyncAPI. Only this module joins a subject with the prefixes of its routers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from faststream._internal.configs import PublisherSpecificationConfig, SubscriberSpecificationConfig
from faststream._internal.endpoint.publisher import PublisherSpecification
from faststream._internal.endpoint.subscriber import SubscriberSpecification
from faststream.specification.asyncapi.utils import resolve_payloads
from faststream.specification.schema import Message, Operation, PublisherSpec, SubscriberSpec


@dataclass(kw_only=True)
class SubscriberDescription(SubscriberSpecificationConfig):
    subject: str


@dataclass(kw_only=True)
class PublisherDescription(PublisherSpecificationConfig):
    subject: str


class PrefixedSubject:
    """An endpoint whose subject has the prefixes of its routers."""

    _outer_config: Any
    config: Any

    @property
    def subject(self) -> str:
        """The subject, with the prefixes of its routers."""
        return f"{self._outer_config.prefix}{self.config.subject}"


class DescribedSubscriber(PrefixedSubject, SubscriberSpecification[Any, SubscriberDescription]):
    @property
    def channel_labels(self) -> list[str]:
        return [self.subject]

    def get_schema(self) -> dict[str, SubscriberSpec]:
        operation = _operation(self.name, self.get_payloads())
        return {self.name: SubscriberSpec(address=self.subject, description=self.description, operation=operation, bindings=None)}


class DescribedPublisher(PrefixedSubject, PublisherSpecification[Any, PublisherDescription]):
    @property
    def name(self) -> str:
        return self.config.title_ or f"{self.subject}:Publisher"

    def get_schema(self) -> dict[str, PublisherSpec]:
        operation = _operation(self.name, self.get_payloads(), "Publisher")
        return {self.name: PublisherSpec(address=self.subject, description=self.config.description_, operation=operation, bindings=None)}


def _operation(name: str, payloads: Any, served: str = "") -> Operation:
    return Operation(message=Message(title=f"{name}:Message", payload=resolve_payloads(payloads, served)), bindings=None)
