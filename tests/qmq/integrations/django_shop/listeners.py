"""A listener that writes to the project's database."""

import os

from django.contrib.auth.models import Group

from qmq.integrations.django import listener


@listener(os.environ.get("QMQ_TEST_SUBJECT", "orders"), group="shop")
def order(name: str) -> None:
    Group.objects.create(name=name)
