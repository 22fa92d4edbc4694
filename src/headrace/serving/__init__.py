"""HTTP, change feeds and the page: what people and programs see of a project."""
