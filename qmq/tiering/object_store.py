"""The calls that tiering makes to an object store. The calls block, so run them in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from qmq.errors import InvalidArgument
from qmq.limits import MIB

if TYPE_CHECKING:
    from obstore.store import ObjectStore as AnyStore

REQUEST_S: Final = 30.0
"""A request that takes longer has failed."""
RETRY_S: Final = 10.0
"""How long one call retries server errors and lost connections by itself; after that the copier
waits longer.
"""

OBJECT_BYTES_MAX: Final = 128 * MIB
"""QMQ puts no larger object. A larger one in its place is read up to here,
and then its checksum is wrong.
"""
READ_S: Final = 15.0
READ_RETRY_S: Final = 3.0
"""For reads that a client waits for: they fail sooner and are retried."""


class StoreAway(Exception):
    """The object store did not answer, or reported an error: try again later."""


class ObjectConflict(Exception):
    """The store has other bytes under an object's name."""


class Objects:
    """An object store, by obstore. Every method may raise StoreAway."""

    def __init__(self, store: AnyStore) -> None:
        self._store = store

    def create(self, name: str, data: bytes) -> bool:
        """Put an object atomically. Returns False if the name exists."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError

        try:
            obstore.put(self._store, name, data, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return False
        except (BaseError, OSError) as cause:
            raise StoreAway(f"putting {name} failed: {_first_line(cause)}") from cause
        return True

    def get(self, name: str) -> bytes | None:
        """An object's bytes, at most the first OBJECT_BYTES_MAX; None if there is none."""
        import obstore
        from obstore.exceptions import BaseError, NotFoundError

        try:
            found = obstore.get(self._store, name)
            if found.meta["size"] <= OBJECT_BYTES_MAX:
                return bytes(found.bytes())
            return bytes(obstore.get_range(self._store, name, start=0, length=OBJECT_BYTES_MAX))
        except (NotFoundError, FileNotFoundError):
            return None
        except (BaseError, OSError) as cause:
            raise StoreAway(f"getting {name} failed: {_first_line(cause)}") from cause

    def delete(self, name: str) -> None:
        """Delete an object if it exists."""
        import obstore
        from obstore.exceptions import BaseError, NotFoundError

        try:
            obstore.delete(self._store, name)
        except (NotFoundError, FileNotFoundError):
            return
        except (BaseError, OSError) as cause:
            raise StoreAway(f"deleting {name} failed: {_first_line(cause)}") from cause

    def delete_all(self, names: Sequence[str]) -> None:
        """Delete these objects, as far as they exist, with few requests. Raises StoreAway."""
        import obstore
        from obstore.exceptions import BaseError, NotFoundError

        try:
            obstore.delete(self._store, list(names))
        except (NotFoundError, FileNotFoundError):
            for name in names:
                self.delete(name)
        except (BaseError, OSError) as cause:
            raise StoreAway(
                f"deleting {len(names)} objects failed: {_first_line(cause)}"
            ) from cause

    def names(self, prefix: str) -> list[str]:
        """The names of the objects whose names begin with `prefix`,
        a whole path. Raises StoreAway.
        """
        import obstore
        from obstore.exceptions import BaseError

        try:
            return sorted(
                str(each["path"]) for batch in obstore.list(self._store, prefix) for each in batch
            )
        except (BaseError, OSError) as cause:
            raise StoreAway(f"listing {prefix} failed: {_first_line(cause)}") from cause


def put_checked(objects: Objects, name: str, data: bytes) -> bool:
    """Put an object if it does not exist, read it back and compare. Returns whether it is new.
    Raises StoreAway, ObjectConflict.
    """
    is_new = objects.create(name, data)
    stored = objects.get(name)
    if stored is None:
        raise StoreAway(f"{name} was put, but the object store does not return it")
    if stored != data:
        raise ObjectConflict(f"{name} is there with other bytes")
    return is_new


def open_objects(url: str, *, request_s: float = REQUEST_S, retry_s: float = RETRY_S) -> Objects:
    """The object store at a URL: `s3://bucket/prefix`, `gs://…`, `az://…` or `file:///folder`; a
    folder is made if it is missing.

    Sends no request to a remote store yet. Raises InvalidArgument.
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, from_url
    except ImportError as cause:
        raise InvalidArgument("--object-store needs obstore: pip install 'qmq[tiering]'") from cause
    scheme, _, place = url.partition("://")
    try:
        if scheme == "file":
            if not place.startswith("/"):
                raise InvalidArgument(f"an object store in a folder is file:///FOLDER, not {url!r}")
            return Objects(LocalStore(Path(place), mkdir=True))
        if scheme not in ("s3", "gs", "az"):
            raise InvalidArgument(
                f"an object store is s3://, gs://, az:// or file:///, not {url!r}"
            )
        return Objects(
            from_url(url, client_options=_client_options(request_s), retry_config=_retries(retry_s))
        )
    except (BaseError, ValueError, OSError) as cause:
        raise InvalidArgument(
            f"the object store {url!r} cannot be opened: {_first_line(cause)}"
        ) from cause


def _client_options(request_s: float) -> Any:
    seconds = timedelta(seconds=request_s)
    return {
        "timeout": seconds,
        "connect_timeout": min(seconds, timedelta(seconds=5)),
        "allow_http": True,
    }


def _retries(retry_s: float) -> Any:
    return {"max_retries": 3, "retry_timeout": timedelta(seconds=retry_s)}


def _first_line(cause: BaseException) -> str:
    return str(cause).strip().partition("\n")[0]
