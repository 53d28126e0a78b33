"""The client library, asyncio first. Applications use `client.py`; `producer.py` and `consumer.py` do the work, `links.py` holds the
connections.
"""
