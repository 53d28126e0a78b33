"""The client library, asyncio first. `client.py` is what applications use; `producer.py` and `consumer.py` do the work, `links.py` holds
the connections.
"""
