"""Nodes: the processes of each role, and how they are assembled.

dev_node            `qmq dev`: all roles in one process
replica_node        `qmq broker`: one replica of a broker group
delay_node          `qmq delay`: one replica of a delay group
broker_assembly     makes a broker from its parts, for all of these
environment         clock, disk, network and timing of a node
metering/           its metrics
"""
