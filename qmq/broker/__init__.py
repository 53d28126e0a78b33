"""The broker of one node: takes, stores and hands out messages.

`produce_checks` checks what producers send, `dispatch/` has the consumers and decides what they get
next, `reading/` serves readers without a group, `broker` runs the turns that tie them to the store,
and `connection/` has the sockets.
"""
