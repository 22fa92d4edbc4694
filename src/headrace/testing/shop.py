"""A shop and a bank in one PostgreSQL database, under writers; and what must hold of its views.

The shop takes orders of several lines, is paid, gives money back; the bank moves money between
accounts and books each transfer twice. Every transaction writes its own number to `transactions`:
the numbers of a writer are 1, 2, 3, ..., so that a gap is a lost transaction and nothing else.

`CHECKS` are questions to the *target*, each of which finds what is wrong: views against the tables
they were computed from, which are kept beside them; views against each other; whole transactions;
the bank's money. They are asked in one REPEATABLE READ transaction (`Reader`), and must hold in
each, whenever it is: that is what a cut promises. `SAME` are the views as SQL on the *source*: an
answer that owes nothing to our own code.

`headrace demo`, the slice test (`slice_case`) and its benchmark are built on this.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

if TYPE_CHECKING:
    from headrace.log.embedded.log import EmbeddedLog

ACCOUNTS, OPENING = 20, 1000
CUSTOMERS, PRODUCTS = 300, 40
COUNTRIES = ("Austria", "Brazil", "Canada", "Denmark", "Egypt", "France", "Ghana", "Japan")
TABLES = {
    "customers": "customer_id", "products": "product_id", "orders": "order_id",
    "lines": "order_id, line", "payments": "order_id", "accounts": "account_id",
    "entries": "transfer_id, account_id", "transactions": "writer, number",
}  # fmt: skip
"""And their keys."""
LOST = (psycopg.OperationalError, psycopg.InterfaceError)
SCHEMA = """
create table customers(customer_id int primary key, name text not null, country text not null);
create table products(
    product_id int primary key, product text not null, list_price numeric(10, 2) not null);
create table orders(
    order_id bigint primary key, customer_id int not null references customers,
    status text not null, placed timestamptz not null default now());
create table lines(
    order_id bigint references orders, line int, product_id int not null references products,
    quantity int not null, price numeric(10, 2) not null, primary key (order_id, line));
create table payments(
    order_id bigint primary key references orders, amount numeric(12, 2) not null,
    paid timestamptz not null default now());
create table accounts(account_id int primary key, owner text not null, balance bigint not null);
create table entries(
    transfer_id bigint, account_id int references accounts, amount bigint not null,
    primary key (transfer_id, account_id));
create table transactions(
    writer int, number bigint, kind text not null,
    at timestamptz not null default clock_timestamp(), primary key (writer, number));
"""
FIRST = f"""
insert into customers select g, 'Customer ' || g,
    (array{list(COUNTRIES)})[1 + g % {len(COUNTRIES)}] from generate_series(1, {CUSTOMERS}) g;
insert into products select g, 'Product ' || g, 1 + g * 7 % 90 + 0.5
    from generate_series(1, {PRODUCTS}) g;
insert into orders select -g, 1 + g % {CUSTOMERS}, case when g % 5 = 0 then 'new' else 'paid' end
    from generate_series(1, {{orders}}) g;
insert into lines select -g, l, p.product_id, 1 + (g + l) % 3, p.list_price
    from generate_series(1, {{orders}}) g, generate_series(1, 2) l
    join products p on true where p.product_id = 1 + (g * 11 + l) % {PRODUCTS};
insert into payments select order_id, sum(quantity * price) from orders join lines using (order_id)
    where status = 'paid' group by order_id;
insert into accounts select g, 'Owner ' || g, {OPENING} from generate_series(1, {ACCOUNTS}) g;
insert into entries select 0, g, {OPENING} from generate_series(1, {ACCOUNTS}) g;
"""


def make_shop(connection: psycopg.Connection[Any], orders: int = 1000) -> None:
    """Make the tables, with so many orders of old."""
    connection.execute(SCHEMA)
    connection.execute(FIRST.format(orders=orders))


# --- the pipeline ---------------------------------------------------------------------------------

PROJECT = """\
name = "shop"
log = "data"
pipelines = ["pipeline.py"]

[capture.shop]                       # the database of the shop and the bank: the source
dsn = "{source}"
tables = ["public.*"]

[page]
port = {port}
"""
PIPELINE = '''\
"""Three answers, kept right while the shop and the bank go on: plain PySpark, nothing else."""

import headrace as hr
from pyspark.sql import functions as F

shop = hr.Pipeline("shop")
TABLES = "customers products orders lines payments accounts entries transactions".split()
for table in TABLES:
    shop.table(table, of=f"shop.public.{{table}}")  # follows the database, row by row


@shop.view(key="country")
def revenue(payments, orders, customers):
    paid = payments.join(orders, "order_id").join(customers, "customer_id")
    return paid.groupBy("country").agg(
        F.count("*").alias("orders"), F.sum("amount").alias("revenue")
    )


@shop.view(key="product")
def bestsellers(orders, lines, products):
    sold = orders.where("status = 'paid'").join(lines, "order_id").join(products, "product_id")
    return sold.groupBy("product").agg(
        F.sum("quantity").alias("sold"), F.sum(F.expr("quantity * price")).alias("amount")
    )


@shop.view(key="account_id")
def balances(entries):
    return entries.groupBy("account_id").agg(
        F.sum("amount").alias("balance"), F.count("*").alias("bookings")
    )


{more}shop.keep(
    {kept}, *TABLES, in_=hr.Table("{target}")
)
'''
MORE = """\
size_of = F.udf(lambda amount: "small" if amount < 100 else "large", "string")  # Python workers


@shop.view()
def total(balances):  # no key: here what is applied twice is there twice
    return balances.agg(
        F.sum("balance").alias("total"),
        F.sum("bookings").alias("bookings"),
        F.count("*").alias("accounts"),
    )


@shop.view(key="size")
def sizes(payments):
    return payments.groupBy(size_of("amount").alias("size")).agg(F.count("*").alias("payments"))


"""
VIEWS = ("revenue", "bestsellers", "balances")
MORE_VIEWS = ("total", "sizes")


def write_project(
    folder: Path, source: str, target: str, *, port: int | str = 0, more: bool = False
) -> None:
    """Make the project's two files; `more`: with the views that only a test needs."""
    folder.mkdir(parents=True, exist_ok=True)
    views = [*VIEWS, *(MORE_VIEWS if more else ())]
    kept = ", ".join(f'"{view}"' for view in views)
    (folder / "headrace.toml").write_text(PROJECT.format(source=source, port=port))
    text = PIPELINE.format(target=target, kept=kept, more=MORE if more else "")
    (folder / "pipeline.py").write_text(text)


# --- writers --------------------------------------------------------------------------------------


class Writer:
    """One of several who write: its orders and transfers have numbers of their own."""

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], number: int, seed: str):
        """Writers are numbered from 1; `connect` gives an autocommit connection."""
        self.number = number
        self.chance = Random(f"{seed} {number}")
        self._connect = connect
        self._connection: psycopg.Connection[Any] | None = None
        self._next = 1
        self._open: list[tuple[int, str]] = []

    def transaction(self) -> None:
        """One transaction, in one message: it is there as a whole or not at all.

        A connection that is lost leaves it open which; the next one asks the database.
        """
        if self._connection is None or self._connection.closed:
            self._connection = self._connect()
            query = "select coalesce(max(number), 0) + 1 from transactions where writer = %s"
            row = self._connection.execute(query, [self.number]).fetchone()
            assert row is not None
            self._next = row[0]
            self._open = [
                (one, status)
                for one, status in self._connection.execute(
                    "select order_id, status from orders where order_id %% 10 = %s"
                    " order by order_id desc limit 20",
                    [self.number],
                ).fetchall()
            ]
        kind, statements, values = self._made()
        text = f"{statements}; insert into transactions values (%(writer)s, %(n)s, '{kind}')"
        values |= {"writer": self.number, "n": self._next}
        try:
            psycopg.ClientCursor(self._connection).execute(text, values)
        except LOST:
            self._connection.close()
            raise
        self._next += 1

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.close()

    def _made(self) -> tuple[str, str, dict[str, Any]]:
        chance = self.chance
        which = chance.random()
        if which < 0.4:
            return self._transfer()
        at = chance.randrange(len(self._open)) if self._open else -1
        if which < 0.65 or at < 0 or (self._open[at][1] == "paid" and which < 0.93):
            return self._order()
        order, status = self._open.pop(at)
        if status == "new":
            self._open.append((order, "paid"))
            return "payment", PAY, {"order": order}
        return "refund", REFUND, {"order": order}

    def _transfer(self) -> tuple[str, str, dict[str, Any]]:
        here, there = self.chance.sample(range(1, ACCOUNTS + 1), 2)
        values = {
            "transfer": 10 * self._next + self.number, "amount": self.chance.randrange(1, 100),
            "here": here, "there": there, "first": min(here, there),
        }  # fmt: skip
        return "transfer", TRANSFER, values

    def _order(self) -> tuple[str, str, dict[str, Any]]:
        chance = self.chance
        order = 10 * self._next + self.number
        products = chance.sample(range(1, PRODUCTS + 1), chance.randrange(1, 5))
        self._open = [*self._open[-40:], (order, "new")]
        values = {
            "order": order, "customer": chance.randrange(1, CUSTOMERS + 1), "products": products,
            "quantity": chance.randrange(1, 4),
        }  # fmt: skip
        return "order", ORDER, values


ORDER = """
insert into orders values (%(order)s, %(customer)s, 'new');
insert into lines select %(order)s, row_number() over (), product_id, %(quantity)s, list_price
    from products where product_id = any(%(products)s)"""
PAY = """
update orders set status = 'paid' where order_id = %(order)s;
insert into payments select order_id, sum(quantity * price) from lines
    where order_id = %(order)s group by order_id"""
REFUND = """
update orders set status = 'returned' where order_id = %(order)s;
delete from payments where order_id = %(order)s"""
TRANSFER = """
select from accounts where account_id in (%(here)s, %(there)s) order by account_id for update;
update accounts set balance = balance - %(amount)s where account_id = %(here)s;
update accounts set balance = balance + %(amount)s where account_id = %(there)s;
insert into entries values (%(transfer)s, %(here)s, -%(amount)s),
    (%(transfer)s, %(there)s, %(amount)s)"""


class Writers:
    """Threads that write so many transactions a second together, until they are told to stop."""

    def __init__(
        self, connect: Callable[[], psycopg.Connection[Any]], count: int, rate: float, seed: str
    ) -> None:
        """Nothing is written yet."""
        self.failed: list[str] = []
        self._pause = count / rate
        self._stop = threading.Event()
        self._writers = [Writer(connect, n, seed) for n in range(1, count + 1)]
        self._threads = [
            threading.Thread(target=self._write, args=[one], daemon=True) for one in self._writers
        ]

    def start(self) -> Writers:
        """Begin."""
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """No more; what was begun is ended."""
        self._stop.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        for writer in self._writers:
            writer.close()

    def _write(self, writer: Writer) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            try:
                writer.transaction()
            except LOST:
                time.sleep(0.05)
            except Exception as error:  # noqa: BLE001 - whoever asks is told
                self.failed.append(f"writer {writer.number}: {type(error).__name__}: {error}")
                return
            # As they would come by themselves; what is late is not made up for in a burst.
            due = max(due + writer.chance.expovariate(1 / self._pause), time.monotonic() - 0.1)
            self._stop.wait(max(0.0, due - time.monotonic()))


# --- what must hold -------------------------------------------------------------------------------

SAME = {
    "revenue": """
        select country, count(*) as orders, sum(amount) as revenue
        from payments join orders using (order_id) join customers using (customer_id)
        group by country""",
    "bestsellers": """
        select product, sum(quantity) as sold, sum(quantity * price) as amount
        from orders join lines using (order_id) join products using (product_id)
        where status = 'paid' group by product""",
    "balances": """
        select account_id, sum(amount) as balance, count(*) as bookings from entries
        group by account_id""",
    "total": """
        select sum(balance) as total, sum(bookings) as bookings, count(*) as accounts
        from (select sum(amount) as balance, count(*) as bookings from entries
            group by account_id) b""",
    "sizes": """
        select case when amount < 100 then 'small' else 'large' end as size, count(*) as payments
        from payments group by 1""",
}
"""The views, as SQL over the tables."""
COLUMNS = {
    "revenue": "country, orders, revenue", "bestsellers": "product, sold, amount",
    "balances": "account_id, balance, bookings", "total": "total, bookings, accounts",
    "sizes": "size, payments",
}  # fmt: skip


def _differs(view: str) -> str:
    columns, same = COLUMNS[view], f"select {COLUMNS[view]} from ({SAME[view]}) s"
    return (
        f"(select {columns} from {view} except all {same})"
        f" union all ({same} except all select {columns} from {view})"
    )


CHECKS = {
    "a transaction is missing":
        "select writer from transactions group by writer having count(*) <> max(number)",
    "money came or went":
        f"select sum(balance) from accounts having sum(balance) <> {ACCOUNTS * OPENING}",
    "a balance is not its bookings":
        "select account_id from accounts a full join balances b using (account_id)"
        " where a.balance is distinct from b.balance",
    "revenue is not what was sold":
        "select r, s from (select sum(revenue) r from revenue) r,"
        " (select sum(amount) s from bestsellers) s where r is distinct from s",
    "an order is half paid":
        "select order_id from orders o full join payments p using (order_id)"
        " where (o.status = 'paid') is distinct from (p.amount is not null)",
    "a payment is not its order's":
        "select order_id from payments p join lines l using (order_id)"
        " group by order_id, p.amount having sum(quantity * price) <> p.amount",
} | {f"{view} is not its tables'": _differs(view) for view in VIEWS}  # fmt: skip
"""What would be wrong, and the question that finds it in the target; nothing is right."""
MORE_CHECKS = CHECKS | {f"{view} is not its tables'": _differs(view) for view in MORE_VIEWS}


def _query(checks: dict[str, str]) -> str:
    parts = [f"select '{name.replace(chr(39), chr(39) * 2)}' as what,"
             f" (select string_agg(w::text, ' ') from (select * from ({question}) q limit 3) w)"
             for name, question in checks.items()]  # fmt: skip
    return " union all ".join(parts)


@dataclass(frozen=True)
class Look:
    """What a reader saw in one transaction."""

    applied: int
    """Transactions that are there."""
    through: int
    latencies: tuple[float, ...]
    """Seconds since the end of each transaction that the reader had not seen before."""
    wrong: tuple[str, ...] = ()
    lost: int = 0
    """Transactions without which a later one of the same writer is there, and rows that a view has
    not counted."""
    twice: int = 0
    """Rows that a view has counted too often."""


NEWEST = """
    select w, (select max(number) from transactions where writer = w)
    from generate_series(1, {writers}) w"""
COUNTS = """
    select (select count(*) from transactions),
        (select coalesce(sum(n), 0) from (
            select max(number) - count(*) as n from transactions group by writer) t),
        array[(select sum(bookings) from balances) - (select count(*) from entries),
            (select sum(orders) from revenue) - (select count(*) from payments)]"""


@dataclass
class Reader:
    """Reads the target, as anybody may at any time; every reading is one snapshot."""

    connect: Callable[[], psycopg.Connection[Any]]
    writers: int
    checks: dict[str, str] = field(default_factory=lambda: CHECKS)
    _connection: psycopg.Connection[Any] | None = None
    _seen: dict[int, int] = field(default_factory=dict)
    _through: int = 0

    def look(self, *, check: bool = True) -> Look | None:
        """Read, and say what is wrong; None while the tables are not there or nobody answers."""
        try:
            if self._connection is None or self._connection.closed:
                self._connection = self.connect()
                self._connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            with self._connection.transaction():
                return self._look(self._connection, check=check)
        except psycopg.errors.UndefinedTable:
            return None
        except LOST:
            self.close()
            return None

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            with contextlib.suppress(psycopg.Error):
                self._connection.close()
            self._connection = None

    def _look(self, connection: psycopg.Connection[Any], *, check: bool) -> Look:
        newest = connection.execute(NEWEST.format(writers=self.writers)).fetchall()
        row = connection.execute("select max(through), clock_timestamp() from _headrace").fetchone()
        assert row is not None
        through, now = row[0] or 0, row[1]
        wrong = []
        if through < self._through:
            wrong.append(f"it went back: from {self._through} to {through}")
        self._through = through
        latencies: list[float] = []
        for writer, number in newest:
            before = self._seen.get(writer)
            if before is not None and (number or 0) < before:
                wrong.append(f"transaction {before} of writer {writer} is gone, {number} is there")
            if before is not None and (number or 0) > before:
                ages = connection.execute(
                    "select extract(epoch from %s - at)::float8 from transactions"
                    " where writer = %s and number > %s", [now, writer, before],
                )  # fmt: skip
                latencies += [age for (age,) in ages.fetchall()]
            self._seen[writer] = number or 0
        if not check:
            return Look(sum(self._seen.values()), through, tuple(latencies), tuple(wrong))
        found = connection.execute(_query(self.checks)).fetchall()
        wrong += [f"{what}: {which}" for what, which in found if which is not None]
        row = connection.execute(COUNTS).fetchone()
        assert row is not None
        more = [int(one or 0) for one in row[2]]
        lost, twice = row[1] - sum(min(0, one) for one in more), sum(max(0, one) for one in more)
        return Look(row[0], through, tuple(latencies), tuple(wrong), int(lost), twice)


def tables_differ(
    source: psycopg.Connection[Any], target: psycopg.Connection[Any], views: Sequence[str]
) -> list[str]:
    """Every table of the target against the source, by SQL and text alone."""
    wrong = []
    for table, key in TABLES.items():
        sides = [_copied(one, f"select * from {table} order by {key}") for one in (source, target)]
        wrong += _unlike(table, *sides)
    for view in views:
        theirs = f"select {COLUMNS[view]} from {view} order by 1"
        ours = f"select {COLUMNS[view]} from ({SAME[view]}) s order by 1"
        wrong += _unlike(view, _copied(source, ours), _copied(target, theirs))
    return wrong


def _unlike(table: str, ours: list[str], theirs: list[str]) -> list[str]:
    if ours == theirs:
        return []
    missing, extra = sorted({*ours} - {*theirs}), sorted({*theirs} - {*ours})
    return [
        f"table {table}: {len(ours)} rows at the source, {len(theirs)} in the target;"
        f" missing {missing[:3]}, extra {extra[:3]}"
    ]


AGREE = {
    "revenue is not what was sold": ("revenue.revenue", "bestsellers.amount"),
    "payments are not those of revenue": ("revenue.orders", "sizes.payments"),
    "total is not the balances'": ("balances.balance", "total.total"),
    "bookings are not the balances'": ("balances.bookings", "total.bookings"),
}
"""What would be wrong of the views by themselves, and the two sums that say so."""


def views_disagree(log: EmbeddedLog) -> list[str]:
    """The first position of the log at which views disagree, for whoever reads them there."""
    moved: dict[int, Counter[str]] = {}
    for one in {one for pair in AGREE.values() for one in pair}:
        view, _, column = one.partition(".")
        for batch in log.read(f"shop.{view}"):
            rows = zip(batch.positions.to_pylist(), batch.data.to_pylist(), strict=True)
            for position, row in rows:
                moved.setdefault(position, Counter())[one] += row["_weight"] * (row[column] or 0)
    sums: Counter[str] = Counter()
    for position in sorted(moved):
        sums.update(moved[position])
        wrong = [what for what, (one, other) in AGREE.items() if sums[one] != sums[other]]
        if wrong:
            return [f"at position {position} of the log: {wrong[0]}"]
    return []


def _copied(connection: psycopg.Connection[Any], query: str) -> list[str]:
    made = sql.SQL("copy ({}) to stdout").format(sql.SQL(query))
    with connection.cursor() as cursor, cursor.copy(made) as data:
        return b"".join(bytes(one) for one in data).decode().splitlines()


def count_transactions(source: psycopg.Connection[Any]) -> int:
    """How many the source has."""
    row = source.execute("select count(*) from transactions").fetchone()
    assert row is not None
    return int(row[0])
