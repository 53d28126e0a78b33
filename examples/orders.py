"""Order processing: an order and its messages in one transaction, payments that happen once, a
reminder that comes later, and dead letters.

    python examples/orders.py                             on its own node; 300 orders
    python examples/orders.py --server localhost:20880    on a cluster that is there
    python examples/orders.py --orders 2000 --json

    shop ── order + outbox, one transaction ──▶ order.placed, order.unpaid
    order.placed ──▶ billing     charges once (SqlDedup), says order.paid by an outbox
    order.unpaid ──▶ reminders   after --remind seconds; writes to those who have not paid
    order.paid   ──▶ shipping    ships once

Of a hundred orders ten are paid at the second try only (the bank does not answer), and three never:
their messages are in billing's dead-letter queue at the end. Some orders are placed by a till that
dies between its commit and its sending: a watchdog sends what it left. Exit status 1 unless every
order is paid and shipped once, or is a dead letter and was reminded of once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sqlite3
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from own_node import own_node
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sqlalchemy import Engine, create_engine, text

import qmq
from qmq.sql import dedup, outbox
from qmq.sql.dedup import SqlDedup

SCHEMA = (
    "CREATE TABLE orders (number INTEGER PRIMARY KEY, cents INTEGER NOT NULL)",
    "CREATE TABLE payments (number INTEGER NOT NULL, cents INTEGER NOT NULL)",
    "CREATE TABLE parcels (number INTEGER NOT NULL)",
    "CREATE TABLE letters (number INTEGER NOT NULL)",
)
DEAD_TILL_EVERY = 20
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Order:
    """An order as sent, in JSON."""

    number: int
    cents: int

    @property
    def is_slow(self) -> bool:
        """Whether the bank answers at the second attempt only."""
        return self.number % 10 == 3

    @property
    def is_refused(self) -> bool:
        """Whether the order is never paid."""
        return self.number % 100 in (7, 42, 77)


@dataclass(slots=True)
class Result:
    """The state at the end."""

    orders: int = 0
    paid: int = 0
    shipped: int = 0
    reminded: int = 0
    dead_letters: int = 0
    left_in_outbox: int = 0
    is_right: bool = False


class Shop:
    """Places orders, each with its messages in one transaction."""

    def __init__(self, mq: qmq.Client, engine: Engine, path: Path, remind: timedelta) -> None:
        self._mq, self._engine, self._path, self._remind = mq, engine, path, remind

    async def place(self, order: Order) -> None:
        """Commit the order; then its messages are sent."""
        async with self._mq.outbox(self._engine) as box:
            box.connection.execute(
                text("INSERT INTO orders VALUES (:number, :cents)"), asdict(order)
            )
            self._say(box, order)

    async def place_and_die(self, order: Order) -> None:
        """Commit through a driver's own connection, and do not report it: as if the process of the
        shop had died right then.
        """
        connection = sqlite3.connect(self._path, timeout=30)
        try:
            connection.execute("INSERT INTO orders VALUES (?, ?)", (order.number, order.cents))
            async with self._mq.outbox(connection, grace=timedelta(seconds=1)) as box:
                self._say(box, order)
            connection.commit()
        finally:
            connection.close()

    def _say(self, box: outbox.Outbox, order: Order) -> None:
        body = json.dumps(asdict(order)).encode()
        box.send("order.placed", body, key=str(order.number))
        box.send("order.unpaid", body, key=str(order.number), delay=self._remind)


def listen(mq: qmq.Client, engine: Engine) -> None:
    """Register the handlers. Each handler's writes are committed with the message's
    id, or not at all.
    """
    once = SqlDedup(engine)

    @mq.listener(
        "order.placed",
        group="billing",
        concurrency=4,
        idempotent=once,
        retry_delays=[timedelta(seconds=0.1)],
    )
    def charge(order: Order, context: qmq.Context) -> None:
        if order.is_refused:
            raise PermissionError(f"the bank refuses order {order.number}")
        if order.is_slow and context.attempt == 1:
            raise TimeoutError("the bank does not answer")
        context.connection.execute(
            text("INSERT INTO payments VALUES (:number, :cents)"), asdict(order)
        )
        with context.mq.outbox(context.connection) as box:
            box.send("order.paid", context.message.body, key=str(order.number))

    @mq.listener("order.paid", group="shipping", concurrency=4, idempotent=once)
    def ship(order: Order, context: qmq.Context) -> None:
        context.connection.execute(
            text("INSERT INTO parcels VALUES (:number)"), {"number": order.number}
        )

    @mq.listener("order.unpaid", group="reminders", idempotent=once)
    def remind(order: Order, context: qmq.Context) -> None:
        paid = context.connection.execute(
            text("SELECT 1 FROM payments WHERE number = :number"), {"number": order.number}
        ).first()
        if paid is None:
            context.connection.execute(
                text("INSERT INTO letters VALUES (:number)"), {"number": order.number}
            )


def count(engine: Engine, dead: set[int]) -> Result:
    """Count the rows in the tables, and whether the numbers are right."""
    with engine.connect() as connection:
        found = {
            # Our own names, so they may be part of the statement.
            name: list(connection.scalars(text(f"SELECT number FROM {name} ORDER BY number")))  # noqa: S608
            for name in ("orders", "payments", "parcels", "letters")
        }
        left = connection.execute(text("SELECT COUNT(*) FROM qmq_outbox")).scalar_one()
    orders = found["orders"]
    refused = [number for number in orders if Order(number, 0).is_refused]
    fine = [number for number in orders if number not in set(refused)]
    is_right = (
        found["payments"] == fine == found["parcels"]
        and found["letters"] == refused == sorted(dead)
        and not left
    )
    return Result(
        len(orders),
        len(found["payments"]),
        len(found["parcels"]),
        len(found["letters"]),
        len(dead),
        left,
        is_right,
    )


async def trade(
    server: str, folder: Path, orders: int, remind_s: float, *, quiet: bool = False
) -> Result:
    """Place the orders, and wait until every message is handled."""
    path = folder / "shop.sqlite"
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": 30})
    with engine.begin() as connection:
        connection.execute(text("PRAGMA journal_mode = WAL"))
        for statement in SCHEMA:
            connection.execute(text(statement))
    outbox.create_tables(engine)
    dedup.create_tables(engine)
    async with qmq.connect(server) as mq:
        listen(mq, engine)
        shop, dead = Shop(mq, engine, path, timedelta(seconds=remind_s)), set[int]()
        async with mq.outbox_watchdog(engine), mq.listening():
            with Progress(console=Console(stderr=True), transient=True, disable=quiet) as bar:
                task = bar.add_task("orders", total=orders)
                for number in range(orders):
                    place = shop.place_and_die if number % DEAD_TILL_EVERY == 0 else shop.place
                    await place(Order(number, 100 + number))
                    bar.update(task, completed=number)
                until = time.monotonic() + PATIENCE_S + remind_s
                while (
                    not (result := await asyncio.to_thread(count, engine, dead)).is_right
                    and time.monotonic() < until
                ):
                    dead |= {
                        json.loads(letter.body)["number"]
                        for letter in await mq.dead_letters("billing").show(orders)
                    }
                    bar.update(task, description="waiting", completed=result.shipped)
                    await asyncio.sleep(0.1)
    engine.dispose()
    return result


async def run(chosen: argparse.Namespace) -> int:
    """Run the whole example. Returns the exit status."""
    logging.getLogger("qmq").setLevel(
        logging.CRITICAL
    )  # this example shows failing handlers, so their log is silenced
    async with AsyncExitStack() as stack:
        server = chosen.server or await own_node(stack)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        result = await trade(server, folder, chosen.orders, chosen.remind, quiet=chosen.json)
    if chosen.json:
        sys.stdout.write(json.dumps(asdict(result), indent=1) + "\n")
    else:
        table = Table(title="order processing", title_justify="left", show_header=False)
        table.add_column()
        table.add_column(justify="right")
        for name, value in asdict(result).items():
            table.add_row(name.replace("_", " "), str(value))
        Console().print(table)
    return 0 if result.is_right else 1


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--server", default="", help="a metaserver's address; without it, its own node"
    )
    options.add_argument("--orders", type=int, default=300)
    options.add_argument(
        "--remind",
        type=float,
        default=8.0,
        help="seconds after which unpaid orders are reminded of",
    )
    options.add_argument("--json", action="store_true")
    return asyncio.run(run(options.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
