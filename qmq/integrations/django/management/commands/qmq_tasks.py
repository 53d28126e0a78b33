"""`manage.py qmq_tasks`: run Django's tasks until SIGTERM."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from qmq.integrations.django.sending import client, close
from qmq.integrations.django.subject_listeners import with_connections
from qmq.integrations.django.task_api import task_backends
from qmq.integrations.django.task_backend import TaskBackend
from qmq.integrations.django.task_worker import handle
from qmq.integrations.pending_listeners import PendingListeners


class Command(BaseCommand):
    help = "Runs tasks of a backend of settings.TASKS, until SIGTERM or SIGINT."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--backend", default="default", help="the name in settings.TASKS (default: default)"
        )
        parser.add_argument(
            "--queue",
            action="append",
            help="run tasks of this queue only; may be given again (default: the backend's QUEUES)",
        )
        parser.add_argument(
            "--concurrency",
            type=int,
            default=1,
            help="how many tasks of a queue run at once (default: 1)",
        )

    def handle(self, *arguments: Any, **options: Any) -> None:
        backend = task_backends[options["backend"]]
        if not isinstance(backend, TaskBackend):
            raise CommandError(
                f"settings.TASKS[{options['backend']!r}] is {type(backend).__name__}, and "
                "not QMQ's TaskBackend"
            )
        queues = sorted(options["queue"] or backend.queues)
        if not queues:
            raise CommandError("the backend takes any queue: name those to run with --queue")
        workers = PendingListeners(with_connections)
        for queue in queues:
            workers.listener(
                backend.subject(queue), backend.group, concurrency=options["concurrency"]
            )(handle)
        try:
            workers.listen_with(client())
            self.stdout.write(f"tasks of {', '.join(queues)} run")
            self.stdout.flush()
            client().run()
        finally:
            close()
