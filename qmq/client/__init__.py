"""The client library: asyncio first. `client` is the door, `producer` and `consumer` do the work, `link` holds the connections."""
