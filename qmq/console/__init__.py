"""The console: a cluster in a browser (docs/CONSOLE.md).

    browser ──▶ ConsoleGuard (hosts, origins, headers) ──▶ a page
    a page  ──▶ the session's own qmq.Client ──▶ metaservers, brokers
            └─▶ ClusterWatch: the last state that was read, read again only when a page asks

The console is a client like any other: it has no rights of its own, and sends no requests while no
page is open.
"""
