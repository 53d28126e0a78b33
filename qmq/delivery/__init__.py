"""The delivery core: sends numbered batches to one destination, and sends them again until the outcome of each is known
(docs/DELIVERY_CORE.md).

Window             (window.py)             which batch is sent next, and what an answer means. Pure
In-flight batch    (in_flight_batch.py)    the state of one batch. Pure
Retries            (retries.py)            which refusals are retried, after which pause, and the final error
Balancer           (balancer.py)           which broker group takes a batch. Pure
Partitioner        (partitioner.py)        which partition of the route takes which messages. Pure
Master connection  (qmq/client/producing/master_connection.py)  sends the window's batches to the broker group's current master

The producer, the ordered producer, the delay dispatcher and the Spark sink each have a subclass of this window.
"""
