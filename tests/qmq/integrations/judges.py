"""Other projects' own tests, from their source distributions, which `scripts/judges` fetches."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import pytest
from support import needs

FOLDER = needs.CACHE / "judges"


def judging(package: str, path: str) -> ModuleType:
    """A module of the source distribution of the version that is installed. Skips if it is not there."""
    try:
        file = FOLDER / f"{package}-{version(package)}" / path
    except PackageNotFoundError:
        pytest.skip(f"needs {package}", allow_module_level=True)
    if not file.is_file():
        pytest.skip(f"needs {package}'s own tests: scripts/judges", allow_module_level=True)
    spec = spec_from_file_location(f"{package}_judge", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
