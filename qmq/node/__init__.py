"""Nodes: the processes of each role, and how they are assembled.

dev_node          `qmq dev`: all roles in one process
broker            `qmq broker`: one replica of a broker group
delay             `qmq delay`: one replica of a delay group
replica/          a replica of either kind: starts and stops it, makes its broker from its parts
broker_assembly   makes the broker of `qmq dev` from its parts
process           the process of a role: clock, disk, network and timing of a node
metrics/          its metrics
"""
