"""The tables and the alerts, as a declarative pipeline of Spark. `spark-pipelines run` updates them
with what came since the last update.

    flights.departed ──┬──▶ airline_days                delays by airline and day, of closed days
                       └──▶ flights ──┬──▶ airport_hours   by airport and hour, of all flights
                                      └──▶ flights.alerts  a message for each very late flight
"""

from pyspark import pipelines as dp
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

spark = SparkSession.active()
SERVERS = spark.conf.get("pipeline.servers")
ALERT_MIN = spark.conf.get("pipeline.alert_min")
FIELDS = (
    "number int, day date, scheduled timestamp, departed timestamp, carrier string, flight int, "
    "aircraft string, origin string, destination string, delay_min int, arrival_delay_min int"
)
MEASURED = ("flights", "cancelled", "delay_min", "came_late")
LATEST = "1 day"
"""How late a flight's message may be: the longest delay is shorter."""


def departures(**options: str) -> DataFrame:
    asked = {"qmq.servers": SERVERS, "subscribe": "flights.departed", "startingOffsets": "earliest"}
    log = spark.readStream.format("qmq").options(**asked, **options).load()
    flight = f.from_json(f.col("body").cast("string"), FIELDS).alias("flight")
    key = f.col("key").cast("string").alias("key")
    return log.select(flight, key, "route_version", "sequence").select(
        "flight.*", "key", "route_version", "sequence"
    )


@dp.table(comment="one row for each flight, once")
def flights() -> DataFrame:
    return departures(maxOffsetsPerTrigger="100000")


def measures(end_of_window: Column) -> list[Column]:
    return [
        f.count("*").alias("flights"),
        f.count_if(f.col("delay_min").isNull()).alias("cancelled"),
        f.sum("delay_min").alias("delay_min"),
        f.count_if(f.col("departed") >= end_of_window).alias("came_late"),
    ]


@dp.table(comment="a row when a day is closed: when flights came that were due a day later")
def airline_days() -> DataFrame:
    # From the log, because `withWatermark` wants a table that exists before the pipeline does. All
    # flights of an update are one micro-batch, behind which the watermark moves: partitions that
    # are read at different speeds close no day too early.
    rows = departures().withWatermark("scheduled", LATEST)
    days = rows.select("*", f.window("scheduled", "1 day").alias("w")).groupBy("w", "carrier")
    found = days.agg(*measures(f.col("w.end")))
    return found.select(f.to_date("w.start").alias("day"), "carrier", *MEASURED)


@dp.materialized_view(comment="computed from all flights by each update")
def airport_hours() -> DataFrame:
    rows = spark.read.table("flights")
    hours = rows.select("*", f.window("scheduled", "1 hour").alias("w")).groupBy("w", "origin")
    found = hours.agg(*measures(f.col("w.end")))
    return found.select(f.col("w.start").alias("hour"), "origin", *MEASURED)


dp.create_sink("alerts", "qmq", {"qmq.servers": SERVERS, "subject": "flights.alerts"})


@dp.append_flow(target="alerts", name="very_late")
def very_late() -> DataFrame:
    rows = spark.readStream.table("flights").where(f"delay_min >= {ALERT_MIN}")
    told = f.struct("number", "day", "carrier", "flight", "origin", "destination", "delay_min")
    return rows.select("key", f.to_json(told).alias("body"), f.col("carrier").alias("tag"))
