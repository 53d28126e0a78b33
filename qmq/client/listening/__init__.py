"""Listeners: the application registers handlers for messages, and QMQ consumes, calls and settles. docs/LISTENERS.md describes them.

listener_options.py     the options of a listener, checked
handler_signature.py    a handler's signature: the type of its payload, its context, its dependencies            pure
outcomes.py             what the end of a handler means for the message: Retry, Reject, and the decision         pure
context.py              what a handler gets besides the payload
providers.py            the application's own dependencies, made for each message
idempotent.py           the interface of a store of finished messages, for effects that happen exactly once
message_handling.py     one message, from decoding to the verdict
batch_handling.py       many messages at a time
worker_pool.py          runs the listener of an unordered subject: a consumer and its workers
ordered_pool.py         runs the listener of an ordered subject
stop_signal.py          how listeners stop
listeners.py            a client's listeners: registering, running, stopping
"""
