"""SQL over the log, by DuckDB: topics, tables and views at one position."""
