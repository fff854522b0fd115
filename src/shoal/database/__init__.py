"""Where a head keeps its tables: a SQLite file, or a PostgreSQL server that several heads share."""
