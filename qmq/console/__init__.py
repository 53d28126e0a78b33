"""The console: a cluster in a browser (docs/CONSOLE.md).

    browser ──▶ ConsoleGuard (hosts, origins, headers) ──▶ a page ──▶ the session's own qmq.Client ──▶ metaservers, brokers
                                                     │
                                                     └─ ClusterWatch: what was read last, read again only when a page asks

The console is a client like any other: it has no rights of its own, and nothing runs in it while nobody looks at a page.
"""
