"""The decision: which attention path, kernel provider and indexer mode a batch gets, and why."""
