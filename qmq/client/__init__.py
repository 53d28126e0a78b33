"""The client library, asyncio first. Applications use `client.py`;
`qmq/client/producing/producer.py` and `qmq/client/consuming/consumer.py` do the work,
`qmq/client/connection/pool.py` holds the connections.
"""
