"""The partitioned log: one promise, kept by a folder and by Kafka."""
