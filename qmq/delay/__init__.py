"""The delay server: delayed messages wait on disk, in files for each hour, and are sent when they
are due. docs/DELAY.md.

    Schedule    (schedule.py)       where each message is on disk, and its state: the projection
    Wheel       (wheel.py)          the near messages by due time
    Loader      (wheel.py)          advances the horizon
    Engine      (engine.py)         ticks, plans, cancels: the only writer of actions
    Dispatcher  (dispatcher.py)     brings due messages to the real-time brokers: none is lost, none
                                    is stored twice, and ordered subjects keep their order
    DueWindow   (due_window.py)     the batches of one broker group or partition, and what an answer
                                    means; DueBatcher makes batches of waiting messages
"""
