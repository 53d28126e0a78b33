"""Storage: the log is the truth, the rest is replay.

Two primary logs hold everything: the *message log* (`segments`, `envelopes`) and the *action log* (`actions`). From them follow, by
replay, the consume logs (`consume_log`), what every group consumed (`consumption`), the producers' windows (`producers`); a checkpoint
(`checkpoint`) only makes the replay short. `store` puts them together. Nothing here imports asyncio: the broker drives it.
"""
