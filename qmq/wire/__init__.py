"""The data plane's wire format: frames and their payloads. Sans-IO: bytes in, frames out, and back.

`frame` cuts a byte stream into frames, `frame_payloads` packs and unpacks what each kind of frame
carries, `frame_stream` is the one thin asyncio protocol that both ends put around them.
docs/FORMAT.md specifies every byte.
"""
