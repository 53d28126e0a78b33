"""Listeners: the application registers handlers for messages, and QMQ consumes, calls and settles. docs/LISTENERS.md describes them.

listener_options.py     the options of a listener, checked
context.py              a handler's signature, its context and dependencies, and what its end means for the message
idempotent.py           the interface of a store of finished messages, for effects that happen exactly once
message_handling.py     one message, from decoding to the verdict
batch_handling.py       many messages at a time
pools.py                runs a listener: a consumer and its workers
stopping.py             how listeners stop
listeners.py            a client's listeners: registering, running, stopping
"""
