"""The project: the only place where captures, pipelines, followers and the page meet."""
