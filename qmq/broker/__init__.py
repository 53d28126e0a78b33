"""The broker of one node: takes, stores and hands out messages.

`produce_checks` checks what producers send, `pull_results` decides what a consumer gets next, `sessions` has the consumers, `broker` runs
the turns that tie them to the store, `connection` and `data_server` are the sockets.
"""
