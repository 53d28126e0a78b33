"""Listeners: the application says what is to be done with a message, and QMQ does the rest. docs/LISTENERS.md has the whole story.

options.py        what may be said of a listener, checked
binding.py        a handler's signature: its payload's type, its context, what else it depends on          pure
outcomes.py       what a handler's end means for the message: Retry, Reject, and the decision              pure
context.py        what a handler is told beside the payload
providers.py      the application's own dependencies, made for each message
idempotence.py    what a store of finished messages has to do, for an effect that happens exactly once
handling.py       one message, from the codec to the verdict
batches.py        the same for many at a time
pool.py           a listener of an unordered subject at work: a consumer and its workers
lanes.py          the same for an ordered subject
stopping.py       how all of them come to their end
registry.py       a client's listeners: registering, running, stopping
"""
