"""Takes the values of parameters that are texts, numbers, switches or paths without pydantic.

typer gives every value to pydantic, also a default and a text that stays as it is. Its import takes
longer than most commands, and a tenth of the memory of an idle node. So a value that is plainly
right is taken here. All others go to typer, which says what is wrong with them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final, get_args, get_origin

_WHOLE: Final = re.compile(r"0|-?[1-9][0-9]{0,17}", re.ASCII)


class PlainValue:
    """Stands where typer keeps what makes the value of a parameter. `kind` is the type of the
    value, or of each value if there may be many.
    """

    def __init__(self, kind: type, info: Any) -> None:
        self._kind, self._info = kind, info

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value of the parameter. Raises BadParameter."""
        is_list = param.multiple or param.nargs == -1
        if value is None:
            return () if is_list else None
        if not is_list and self._is_right(value):
            return value
        if is_list and isinstance(value, list | tuple) and all(map(self._is_right, value)):
            return list(value)
        if not is_list and isinstance(value, str) and self._says_right(value):
            return self._kind(value)
        param._runtime_param = None  # so that typer makes its own, here and from now on
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)

    def _is_right(self, value: Any) -> bool:
        if self._kind is Path:
            return isinstance(value, Path) and _is_usable(value)
        return type(value) is self._kind

    def _says_right(self, text: str) -> bool:
        if self._kind is Path:
            return _is_usable(text)
        return self._kind is int and _WHOLE.fullmatch(text) is not None and self._is_within(text)

    def _is_within(self, text: str) -> bool:
        number, least, most = self._kind(text), self._info.min, self._info.max
        return (least is None or number >= least) and (most is None or number <= most)


def _is_usable(path: str | Path) -> bool:
    """Whether typer has nothing to say against a path: a file that exists must be readable."""
    return not os.path.lexists(path) or os.access(path, os.R_OK)


_KINDS: Final = (str, int, float, bool, Path)
_CHECKS_OF_PATHS: Final = ("exists", "writable", "resolve_path", "allow_dash", "path_type")


def take_plain_values(command: Any) -> None:
    """Let a command take plain values, also that of `--help`."""
    context = command.context_class(command, info_name=command.name, **command.context_settings)
    for parameter in command.get_params(context):
        descriptor = getattr(parameter, "type_descriptor", None)
        if descriptor is None:  # an older typer, which has no pydantic
            continue
        kind, info = descriptor.annotation, descriptor.parameter_info
        if get_origin(kind) is list:
            kind = get_args(kind)[0]
        if kind in _KINDS and info.parser is None and not info.clamp and not _is_checked(info):
            parameter._runtime_param = PlainValue(kind, info)


def take_plain_values_below(command: Any) -> None:
    """The same for a command and all commands of its group."""
    take_plain_values(command)
    for each in getattr(command, "commands", {}).values():
        take_plain_values_below(each)


def _is_checked(info: Any) -> bool:
    return any(getattr(info, each) for each in _CHECKS_OF_PATHS) or not (
        info.file_okay and info.dir_okay
    )
