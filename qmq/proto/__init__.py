"""The control plane's protocol, generated from v1/*.proto, which are its reference."""
