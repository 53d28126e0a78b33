"""The RocketMQ gateway: clients of Apache RocketMQ 5 (gRPC, `apache.rocketmq.v2`) send to and
receive from QMQ. See docs/ROCKETMQ.md.

messages          converts RocketMQ's messages, names, digests and compression, and QMQ's. Pure
status            QMQ's errors as RocketMQ's codes, and the count of answers. Pure
filters           a tag expression or an SQL92 condition over properties. Pure
receipts          received messages, their times and receipt handles. Pure
config            the gateway's settings, and those that a client gets
clients           the live clients, and which QMQ principal a client is, by its access key
parts             a client of the cluster, and what works with it, for one identity
topics            the subjects and their kinds
readers           the readers of groups, for all clients of this gateway (qmq.client.group_reading)
sending           SendMessage, RecallMessage; EndTransaction, and how a transaction's message waits
                  for its commit
receiving         ReceiveMessage, AckMessage, and the other calls that settle; PullMessage and
                  offsets
service           the gRPC service
server            starts and stops the server; metrics of calls, clients and the messages that
                  clients hold
"""
