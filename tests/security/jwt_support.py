"""Keys of an issuer, and the JWTs that it signs."""

from __future__ import annotations

import json
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

NOW_MS = 1_800_000_000_000


ISSUER = "https://id.example"


EC = ec.generate_private_key(ec.SECP256R1())


CLAIMS = {"iss": ISSUER, "aud": "qmq", "sub": "orders", "exp": NOW_MS // 1000 + 600}


def jwks(**keys: Any) -> bytes:
    kinds = {"EC": jwt.algorithms.ECAlgorithm, "RS": jwt.algorithms.RSAAlgorithm, "Ed": jwt.algorithms.OKPAlgorithm}
    found = []
    for name, key in keys.items():
        kind = kinds["RS" if isinstance(key, rsa.RSAPrivateKey) else "Ed" if isinstance(key, ed25519.Ed25519PrivateKey) else "EC"]
        found.append({**json.loads(kind.to_jwk(key.public_key())), "kid": name, "use": "sig"})
    return json.dumps({"keys": found}).encode()


def token(key: Any = EC, algorithm: str = "ES256", kid: str = "one", **claims: Any) -> str:
    whole = {name: value for name, value in {**CLAIMS, **claims}.items() if value is not None}
    return jwt.encode(whole, key, algorithm=algorithm, headers={"kid": kid})
