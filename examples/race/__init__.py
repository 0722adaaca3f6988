"""The race for a model that draws well after the least CPU time: rules and records in README.md."""
