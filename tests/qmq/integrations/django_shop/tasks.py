"""The same tasks as in Django's own tests of its backends."""

from typing import Any

import django

if django.VERSION >= (6, 0):
    from django.tasks import TaskContext, task
else:
    from django_tasks import TaskContext, task


@task()
def nothing(*args: Any, **kwargs: Any) -> None: ...


@task()
async def nothing_async(*args: Any, **kwargs: Any) -> None: ...


@task()
def meaning_of_life() -> int:
    return 42


@task()
def value_error() -> None:
    raise ValueError(ValueError("this task failed"))


@task()
def system_exit() -> None:
    raise SystemExit("this task failed")


@task()
def returns_no_json() -> Any:
    return lambda: True


@task(takes_context=True)
def own_id(context: TaskContext, attempt: int) -> str:
    assert context.attempt == attempt
    return str(context.task_result.id)


not_a_task = print
