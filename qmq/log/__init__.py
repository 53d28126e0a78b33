"""Storage: two logs hold everything; all other state is rebuilt from them by replay.

The *message log* (`segments`, `envelopes`) and the *action log* (`actions`) are primary. Replay
derives from them the consume logs (`consume_log`), the producers' windows (`queue`) and the
progress of every group (`queue`, `group_state`, `lane_state`); a checkpoint (`checkpoint`) only
shortens the replay. `store` combines all of them. Nothing here imports asyncio: the broker drives
it.
"""
