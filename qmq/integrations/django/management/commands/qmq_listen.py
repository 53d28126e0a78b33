"""`manage.py qmq_listen`: run the project's listeners until SIGTERM."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.utils.module_loading import autodiscover_modules

from qmq.integrations.django.sending import client, close
from qmq.integrations.django.subject_listeners import registered


class Command(BaseCommand):
    help = (
        "Runs the listeners in the modules `listeners` of the installed applications, until "
        "SIGTERM or SIGINT."
    )

    def handle(self, *arguments: Any, **options: Any) -> None:
        autodiscover_modules("listeners")
        if not registered:
            raise CommandError(
                "no listener is registered: write one with @listener in a module `listeners` "
                "of an installed application"
            )
        try:
            registered.listen_with(client())
            self.stdout.write(f"{len(registered)} listeners run")
            self.stdout.flush()
            client().run()
        finally:
            close()
