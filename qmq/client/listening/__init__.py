"""Listeners: the application registers handlers for messages, and QMQ consumes, calls and settles. docs/LISTENERS.md describes them.

listener_options.py     the options of a listener, checked
context.py    a handler's signature: the type of its payload, its context, its dependencies            pure
context.py             what the end of a handler means for the message: Retry, Reject, and the decision         pure
context.py              what a handler gets besides the payload
context.py            the application's own dependencies, made for each message
idempotent.py           the interface of a store of finished messages, for effects that happen exactly once
message_handling.py     one message, from decoding to the verdict
batch_handling.py       many messages at a time
pools.py          runs the listener of an unordered subject: a consumer and its workers
pools.py         runs the listener of an ordered subject
stopping.py          how listeners stop
listeners.py            a client's listeners: registering, running, stopping
"""
