"""The digests and the compression of bodies. Pure.

The gateway decompresses a body before it stores it, so that every kind of consumer can read it, and QMQ compresses the whole batch.
Delivered bodies are not compressed and have an MD5 digest, because all clients write this digest in the same way
(some write leading zeros of a CRC-32, others do not).
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Final

from qmq.gateway.rocketmq_names import name_of
from qmq.gateway.status_codes import Refused
from qmq.proto.rocketmq import definition_pb2 as api

_ANY_HEADER: Final = 32 + zlib.MAX_WBITS
"""zlib detects the header, gzip's or zlib's: older clients send the one, newer clients the other."""


def check_digest(body: bytes, digest: api.Digest) -> None:
    """Raises Refused if the body is not what its sender computed the digest of."""
    told = digest.checksum.strip().upper()
    if not told or digest.type == api.DIGEST_TYPE_UNSPECIFIED:
        return
    if digest.type == api.CRC32:
        is_right = told.lstrip("0") == f"{zlib.crc32(body):X}".lstrip("0")
    elif digest.type == api.MD5:
        is_right = told == _md5(body)
    else:
        is_right = told == hashlib.sha1(body, usedforsecurity=False).hexdigest().upper()
    if not is_right:
        raise Refused(
            api.MESSAGE_CORRUPTED, f"the body does not have the {name_of(api.DigestType, digest.type)} digest {told}: send it again"
        )


def digest_of(body: bytes) -> api.Digest:
    """The MD5 digest that a consumer receives with the body."""
    return api.Digest(type=api.MD5, checksum=_md5(body))


def _md5(body: bytes) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest().upper()


def plain_body(body: bytes, encoding: api.Encoding.ValueType, body_bytes_max: int) -> bytes:
    """Decompresses the body that a client sent. Raises Refused for an unknown encoding, a broken body, or more than `body_bytes_max`."""
    if encoding != api.GZIP:
        return body
    unpacker = zlib.decompressobj(_ANY_HEADER)
    try:
        found = unpacker.decompress(body, body_bytes_max + 1)
    except zlib.error as failure:
        raise Refused(api.MESSAGE_CORRUPTED, f"the body cannot be decompressed, although its encoding is GZIP: {failure}") from failure
    if len(found) > body_bytes_max:
        raise Refused(
            api.MESSAGE_BODY_TOO_LARGE, f"the body has more than {body_bytes_max} bytes when it is decompressed: send a smaller one"
        )
    if not unpacker.eof:
        raise Refused(api.MESSAGE_CORRUPTED, "the compressed body ends too early: send it again")
    return found
