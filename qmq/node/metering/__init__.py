"""The metrics of the server roles. They read state and change none. docs/METRICS.md has the table.

broker_metrics          a broker's messages and requests (a delay server is one, too)
groups_metrics          its consumer groups
log_metrics             its logs, its disk, its maintenance
replica_metrics         its role in its broker group
delay_metrics           a delay server's schedule
meta_metrics            a metaserver and its view of the cluster
coordination_metrics    the coordination store, as this process sees it
access_metrics          refusals by access control
exposure_metrics        whether strangers can reach the server
serving                 combines them for a role, and listens
"""
