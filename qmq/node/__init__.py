"""Nodes: the processes of each role, and how they are assembled.

dev_node            `qmq dev`: all roles in one process
broker_node         `qmq broker`: one replica of a broker group
delay_node          `qmq delay`: one replica of a delay group
replica_node        starts and stops a replica of either kind
replica_broker      makes the broker of a replica from its parts
broker_assembly     makes the broker of `qmq dev` from its parts
environment         clock, disk, network and timing of a node
metering/           its metrics
"""
