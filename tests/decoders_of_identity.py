"""The decoders of what says who somebody is: tokens, keys of identity providers, certificates, files of contexts."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import hostile_values as values
import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from decoder import Decoder
from hypothesis import strategies as st

from qmq import errors
from qmq.security.access import JwtConfig
from qmq.security.contexts import ContextFile
from qmq.security.jwt_tokens import JwtVerifier
from qmq.security.tls import Credentials, Tls

ISSUER: Final = "https://id.example"
KEY: Final = ec.generate_private_key(ec.SECP256R1())
PUBLIC: Final = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(KEY.public_key()))
HEADER: Final = {"alg": "ES256", "kid": "one", "typ": "JWT"}
CLAIMS: Final = {"iss": ISSUER, "aud": "qmq", "sub": "app:a", "exp": 2_000_000_000, "nbf": 5}
CONTEXTS: Final = {"current": "c", "contexts": {"c": {"bootstrap": "a:1"}}}


def unsigned(*parts: bytes) -> str:
    """A token of this header, these claims and this signature."""
    return ".".join(jwt.utils.base64url_encode(each).decode() for each in (*parts, b"", b"")[:3])


def signed(claims: bytes) -> str:
    """A token that the identity provider signed: a person may choose its claims there."""
    return jwt.PyJWS().encode(claims, KEY, "ES256", {"kid": "one"})


TOKENS: Final = st.one_of(
    values.TEXTS,
    st.tuples(values.json_of(values.changed(HEADER)), values.BYTES, values.BYTES).map(lambda parts: unsigned(*parts)),
    values.json_of(values.changed(CLAIMS)).map(signed),
)


def verifier(keys: bytes) -> JwtVerifier:
    return JwtVerifier(JwtConfig(ISSUER, f"{ISSUER}/jwks"), fetch=lambda: keys, now_ms=lambda: 10**12)


VERIFIER: Final = verifier(json.dumps({"keys": [{**PUBLIC, "kid": "one"}]}).encode())


def contexts(data: bytes) -> Any:
    with TemporaryDirectory() as folder:
        path = Path(folder, "contexts.json")
        path.touch(0o600)
        path.write_bytes(data)
        return ContextFile(path).load()


def authority(data: bytes) -> Any:
    with TemporaryDirectory() as folder:
        path = Path(folder, "ca.pem")
        path.write_bytes(data)
        return Credentials(Tls(path)).client_context()


IDENTITY: Final = (
    Decoder(
        "a token of an identity provider",
        TOKENS,
        VERIFIER.verify,
        (errors.NotAuthenticated,),
        ("qmq.security.jwt_tokens.JwtVerifier.claims",),
        always=(
            *values.TEXT_EXAMPLES,
            *[unsigned(each) for each in values.each_change(HEADER)],
            *[signed(each) for each in values.each_change(CLAIMS)],
        ),
    ),
    Decoder(
        "an identity provider's keys",
        values.json_of(values.objects(keys=st.lists(values.changed({**PUBLIC, "kid": "one", "use": "sig"}), max_size=3))),
        verifier,
        (),
        ("qmq.security.jwt_tokens._parse",),
        always=values.each_change({"keys": [{**PUBLIC, "kid": "one", "use": "sig"}]}),
    ),
    Decoder(
        "the file of contexts",
        values.json_of(values.changed(CONTEXTS)),
        contexts,
        (errors.InvalidArgument,),
        ("qmq.security.contexts.ContextFile.load",),
        always=values.each_change(CONTEXTS),
    ),
    Decoder(
        "certificates",
        values.BYTES,
        authority,
        (errors.InvalidArgument,),
        ("qmq.security.tls.Credentials._fill",),
        always=values.BYTE_EXAMPLES,
    ),
)
