"""Capture of PostgreSQL, by logical replication."""

import logging

# The client warns of what it cannot undo on a lost connection. That is told by the capture; who has
# set up logging gets the warnings too, but they are not printed beside what a command says.
logging.getLogger("psycopg").addHandler(logging.NullHandler())
