"""The broker: one node that takes, keeps and hands out messages.

`intake` checks what producers send, `delivery` decides what a consumer gets next, `sessions` knows the consumers, `broker` runs the turns
that tie them to the store, `connection` and `server` are the sockets.
"""
