"""A data pipeline, whole: 336,776 flights through an ordered subject into Spark's declarative
pipelines, tables, an Iceberg table, a picture, and alerts (README.md).

departures.py   the flights in the order of their departure, and their messages
node.py         a node in the folder of the pipeline, for those who have no cluster
load.py         sends the departures; continues where it stopped
server.py       Spark, as a server with the data source
flows.py        the tables and the alerts, as Spark's declarative pipeline
update.py       one update of the declarative pipeline
lake.py         the Iceberg table
alerts.py       the consumer of the alerts
checks.py       counts everything on every way
dashboard.py    the picture
__main__.py     one after the other
"""
