"""The metrics of the server roles. They read state and change none. docs/reference/metrics.md has
the table.

broker    a broker's messages and requests (a delay server is one, too); its logs, its disk, its
          maintenance, its consumer groups, and a delay server's schedule
replica   its role in its broker group, and the coordination store, as this process sees it
meta      a metaserver and its view of the cluster
copies    copies of messages: in a lake, and in another cluster
serving   combines them for a role, and listens; refusals by access control, and whether strangers
          can reach the server
"""
