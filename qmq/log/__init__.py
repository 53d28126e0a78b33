"""Storage: two logs hold everything; all other state is rebuilt from them by replay.

The *message log* (`segments`, `envelopes`) and the *action log* (`actions`) are primary. From them follow, by replay, the consume logs
(`consume_log`), what every group consumed (`share`, `lane_share`), the producers' windows (`producers`); a checkpoint (`checkpoint`) only
shortens the replay. `store` puts them together. Nothing here imports asyncio: the broker drives it.
"""
