"""The delivery core: sends numbered batches to one destination, and sends them again until the
outcome of each is known.

Window             (window.py)             which batch is sent next, what an answer means, the
                                           state of each batch, and its final error. Pure
Retries            (retries.py)            which refusals are retried, after which pause
Balancer           (balancer.py)           which broker group takes a batch. Pure
Partitioner        (partitioner.py)        which partition of the route takes which messages. Pure
Master connection  (qmq/client/producing/group_sender.py)
                                           sends the window's batches to the broker group's current
                                           master

The producer, the ordered producer, the delay dispatcher and the Spark sink each have a subclass of
this window. The outbox sends through a client's producers.

    sender       above the window   window         batches on  order             a batch refused for
                                                   their way                     good
    producer     `Balancer`,        `SenderWindow` 32          none: a refused   fails
                 `BatchPool`                                   batch waits
                                                               alone
    ordered      `Partitioner`      `Stream`       32          numbers without   fails; later ones
    producer                                                   gaps              get new numbers in
                                                                                 a new session
    delay        `Balancer` or      `DueWindow`    8           without gaps, if  void: its messages
    server       `Partitioner`                                 ordered           are planned again
    Spark sink   `BalancedRows` or  `PacketWindow` 8           without gaps, if  the task fails
                 `PartitionedRows`                             ordered

32 is half the number of batches that a broker remembers of a producer (qmq/log/queue.py), so it
remembers every retried batch.

Why nothing is stored twice, and order holds:
* A batch that may be stored is sent again only to the same destination under the same number, and
  brokers take a number once.
* A refusal in an ordered flight stops it at the refused batch; the later batches are sent again
  after it. A partition's broker takes number n only after n - 1.
* A partition's messages go to another partition only when its window is settled: first those that
  were sent and are not stored, then the waiting ones.

When a sender dies: batches of a producer that were not acknowledged may be stored, and an
application that sends them again sends new messages. The delay server has each batch as a PLAN in
the log, and its next master resumes every open plan as uncertain under its own number. The next
attempt of a Spark task finds the stored rows by their numbers.
"""
