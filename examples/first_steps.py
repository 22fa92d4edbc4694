"""A log in a folder: append, read, coordinate, resume. Run it with `./run python`."""

import tempfile

import headrace as hr

log = hr.connect(tempfile.mkdtemp() + "/data")
log.create_topic("clicks", "user bigint, url string", key="user", partitions=4)

# An entry is on the disk, whole, when `append` returns; its position is a token for readers.
receipt = log.append("clicks", [{"user": 1, "url": "/"}, {"user": 2, "url": "/cart"}])
print("appended", receipt.rows, "rows at position", receipt.position)

# Several topics and a counter, all or nothing: taken only if `orders/7` is still 0.
log.create_topic("orders", "id bigint, amount decimal(10,2)", key="id")
log.create_topic("audit", "text")
with log.transaction() as tx:
    tx.append("orders", [{"id": 7, "amount": 12}])
    tx.append("audit", ["order 7 was placed"])
    tx.expect("orders/7", 0)

# A second one that expects the same is refused, and leaves nothing.
try:
    log.append("orders", [{"id": 7, "amount": 13}], expect={"orders/7": 0})
except hr.errors.Conflict as conflict:
    print("refused:", conflict.fact)

# A writer stores each of its entries once, however often it is retried.
writer = log.writer("importer")
writer.append("clicks", [{"user": 3, "url": "/help"}], version=0, state={"line": 1})
again = log.writer("importer")  # after a crash: claims the name, fences the old holder
receipt = again.append("clicks", [{"user": 3, "url": "/help"}], version=0)
print("stored before:", receipt.duplicate, "- resume at", again.state)

for batch in log.read("clicks"):
    for row, partition, offset in zip(
        batch.to_pylist(), batch.partition.to_pylist(), batch.offset.to_pylist(), strict=True
    ):
        print(row, "is offset", offset, "of partition", partition)

log.close()
