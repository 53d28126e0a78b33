"""Listeners: the application registers handlers for messages, and QMQ consumes, calls and settles.
docs/LISTENERS.md describes them.

listener_options.py     the options of a listener, checked; the interface of a store of finished
                        messages
context.py              a handler's signature, its context and dependencies, and what its end means
                        for the message
message_handling.py     one message, from decoding to the verdict; many at a time
listeners.py            a client's listeners: registering, running, stopping; the workers of one
"""
