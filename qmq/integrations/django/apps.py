"""The application for INSTALLED_APPS."""

from django.apps import AppConfig
from django.core import checks

from qmq.errors import InvalidArgument
from qmq.integrations.django.sending import SiteSettings


class QmqConfig(AppConfig):
    name = "qmq.integrations.django"
    label = "qmq"
    verbose_name = "QMQ"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        checks.register(check_settings)


def check_settings(app_configs: object, **kwargs: object) -> list[checks.CheckMessage]:
    """Whether `settings.QMQ` can be used."""
    try:
        SiteSettings.read()
    except InvalidArgument as error:
        return [checks.Error(error.message, id="qmq.E001")]
    return []
