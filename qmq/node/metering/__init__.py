"""What Prometheus is told of the server roles: reads their state, changes none of it. docs/METRICS.md has the table.

broker          a broker's messages and requests (a delay server is one, too)
groups          its consumer groups
log             its logs, its disk, its upkeep
replica         its place in its broker group
delay           a delay server's schedule
meta            a metaserver and what it knows of the cluster
coordination    the coordination store, as this process finds it
exposure        whether strangers could reach it
serving         puts them together for a role, and listens
"""
