"""Listeners: the application says what is to be done with a message, and QMQ does the rest. docs/LISTENERS.md has the whole story.

listener_options.py        what may be said of a listener, checked
handler_signature.py        a handler's signature: its payload's type, its context, what else it depends on          pure
outcomes.py       what a handler's end means for the message: Retry, Reject, and the decision              pure
context.py        what a handler is told beside the payload
providers.py      the application's own dependencies, made for each message
idempotent.py    what a store of finished messages has to do, for an effect that happens exactly once
message_handling.py       one message, from the codec to the verdict
batch_handling.py        the same for many at a time
worker_pool.py           a listener of an unordered subject at work: a consumer and its workers
ordered_pool.py          the same for an ordered subject
stop_signal.py       how all of them come to their end
listeners.py       a client's listeners: registering, running, stopping
"""
