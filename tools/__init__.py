"""What the repository itself runs: set-up, checks, generated pages. Not shipped."""
